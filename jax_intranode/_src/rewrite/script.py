"""``python -m jax_intranode run``: runs a script or a module that nobody edits."""

import argparse
import runpy
import sys
from pathlib import Path

from jax_intranode._src.rewrite import switch

DESCRIPTION = (
    "Runs a script or a module as Python does, after jax_intranode.install(): collectives of "
    "jax.lax inside shard_map and pmap run in this package's kernels where that is faster. "
    "JAX_INTRANODE_DISABLE=1 runs it without."
)
EXAMPLES = """\
python -m jax_intranode run train.py --steps 10
python -m jax_intranode run -m package.train --steps 10"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is the name of a module"
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    others = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )
    others.required = False


def run(arguments: argparse.Namespace) -> int:
    """Runs the script as ``python SCRIPT ...`` does, with `switch.install`."""
    switch.install()
    sys.argv = [arguments.script, *arguments.arguments]
    if arguments.module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(arguments.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(arguments.script).resolve().parent)
        runpy.run_path(arguments.script, run_name="__main__")
    return 0
