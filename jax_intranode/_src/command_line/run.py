"""``python -m jax_intranode run``: runs a script or a module that nobody edits."""

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

from jax_intranode._src.command_line import acceleration, start_rank
from jax_intranode._src.command_line.options import WrongInput

DESCRIPTION = (
    "Runs a script or a module as Python does, after jax_intranode.install(): collectives of "
    "jax.lax inside shard_map and pmap run in this package's kernels where that is faster. "
    "JAX_INTRANODE_DISABLE=1 runs it without. --compare runs its steps plain and accelerated in "
    "turns, and says how long they take and how far their results are apart."
)
EXAMPLES = """\
python -m jax_intranode run train.py --steps 10
python -m jax_intranode run --compare train.py                plain and accelerated in turns
python -m jax_intranode run -m package.train --steps 10"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    acceleration.add_options(parser)
    add_script(parser, "a Python file, or with -m a module")


def add_script(parser: argparse.ArgumentParser, what: str) -> None:
    """Declares the script or module, with its own arguments, which `launch` has, too."""
    parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is the name of a module"
    )
    # One argument: argparse would take a "--" behind the script away.
    what += ", and its arguments"
    parser.add_argument("script", nargs=argparse.PARSER, metavar="SCRIPT", help=what)


def script_of(arguments: argparse.Namespace) -> list[str]:
    """The script or module and its arguments, as `start_rank` takes them."""
    words: list[str] = arguments.script
    return ["-m"] * arguments.module + words[words[0] == "--" :]


def check_script(name: str, *, is_module: bool) -> None:
    """Raises WrongInput if there is no such file, or no module or package that it can lie in."""
    package = name.partition(".")[0]
    if is_module and importlib.util.find_spec(package) is None:
        raise WrongInput(
            f"-m {name}: there is no module {package!r} here: install it, or run where it lies"
        )
    if not is_module and not Path(name).exists():
        raise WrongInput(
            f"{name}: there is no such file in {Path.cwd()}: name a script, or with -m a module"
        )


def run(arguments: argparse.Namespace) -> NoReturn:
    """Replaces this process by one that runs the script, and accelerates it."""
    script = script_of(arguments)
    check_script(script[arguments.module], is_module=arguments.module)
    options = [f"--{name}" for name in ("auto", "compare") if getattr(arguments, name)]
    options += [f"--steps={arguments.steps}"] if arguments.steps else []
    acceleration.parse_options(options)
    flags = ["-i"] * sys.flags.inspect + ["-u"] * getattr(sys.stdout, "write_through", False)
    os.execv(sys.executable, [*start_rank.command(*flags), "run", *options, *script])
