"""``python -m jax_intranode run``: runs a script or a module that nobody edits."""

import argparse
import runpy
import sys
from pathlib import Path

from jax_intranode._src.rewrite import switch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is the name of a module"
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )


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
