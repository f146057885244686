"""The command line, for example `python -m jax_intranode bench psum`."""

import argparse
import sys
from importlib.metadata import version

import jax_intranode
from jax_intranode._src import native
from jax_intranode._src.bench import command, options
from jax_intranode._src.bench.plots import command as plot
from jax_intranode._src.rewrite import script


def _versions() -> str:
    return (
        f"jax_intranode {jax_intranode.__version__} "
        f"({'with' if native.module('gpu') else 'without'} CUDA kernels), jax {version('jax')}, "
        f"jaxlib {version('jaxlib')}"
    )


def main() -> int:
    """Runs the command that the command line names and returns its exit code."""
    parser = argparse.ArgumentParser(prog="jax_intranode")
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser(
        "bench", help="measure and check an operation and the same one of jax.lax"
    )
    options.add_arguments(bench)
    bench.set_defaults(run=command.run)
    draw = commands.add_parser("plot", help="draw JSON files of bench into one PNG")
    plot.add_arguments(draw)
    draw.set_defaults(run=plot.run)
    unedited = commands.add_parser(
        "run", help="run a script or a module with its collectives accelerated"
    )
    script.add_arguments(unedited)
    unedited.set_defaults(run=script.run)
    arguments = parser.parse_args()
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
