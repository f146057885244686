"""The command line: `python -m jax_intranode bench psum`."""

import argparse
import sys

from jax_intranode._src import bench


def main() -> int:
    """Runs the command that the command line names and returns its exit code."""
    parser = argparse.ArgumentParser(prog="jax_intranode")
    commands = parser.add_subparsers(dest="command", required=True)
    bench_parser = commands.add_parser(
        "bench", help="measure and check an operation beside the one of jax.lax"
    )
    bench_parser.add_argument("operation", choices=bench.OPERATIONS)
    bench.add_arguments(bench_parser)
    return bench.run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
