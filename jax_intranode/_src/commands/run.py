"""``python -m jax_intranode run``: runs a script or a module that nobody edits."""

import argparse
import importlib.util
import sys
from pathlib import Path

import jax_intranode
from jax_intranode._src.commands import WrongInput
from jax_intranode._src.launcher import start_rank

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
    parser.add_argument(
        "--auto",
        action="store_true",
        help="replace collectives that XLA's partitioner adds to plain jit programs, too",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, or with -m a module")
    others = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )
    others.required = False


def run(arguments: argparse.Namespace) -> int:
    """Runs the script as ``python SCRIPT ...`` does, after `jax_intranode.install`.

    Raises:
        WrongInput: there is no such script.
    """
    script = Path(arguments.script)
    if not arguments.module and not script.exists():
        raise WrongInput(
            f"{script}: there is no such file in {Path.cwd()}: name a script, or with -m a module"
        )
    jax_intranode.install(auto=arguments.auto)
    if arguments.module:
        _check_module(arguments.script)
    start_rank.run_as_main([arguments.script, *arguments.arguments], is_module=arguments.module)
    return 0


def _check_module(name: str) -> None:
    """Raises WrongInput if there is no such module."""
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd())
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        # A package that cannot be imported for another reason shows its own error.
        found = not f"{name}.".startswith(f"{error.name}.")
    if not found:
        raise WrongInput(f"-m {name}: there is no such module: install it, or run where it lies")
