"""The command line: `python -m jax_intranode bench psum`."""

import argparse
import sys

from jax_intranode._src.bench import command
from jax_intranode._src.bench.plots import command as plot


def main() -> int:
    """Runs the command that the command line names and returns its exit code."""
    parser = argparse.ArgumentParser(prog="jax_intranode")
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser(
        "bench", help="measure and check an operation beside the one of jax.lax"
    )
    command.add_arguments(bench)
    bench.set_defaults(run=command.run)
    draw = commands.add_parser("plot", help="draw JSON files of bench into one PNG")
    plot.add_arguments(draw)
    draw.set_defaults(run=plot.run)
    arguments = parser.parse_args()
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
