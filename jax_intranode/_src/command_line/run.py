"""``python -m jax_intranode run``: runs a script or a module that nobody edits."""

import argparse
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import jax_intranode
from jax_intranode._src.command_line import compare
from jax_intranode._src.command_line.launcher import start_rank
from jax_intranode._src.command_line.options import PROGRAM, Parser, WrongInput, integer_from
from jax_intranode._src.selection import config

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
    add_options(parser)
    add_script(parser, "a Python file, or with -m a module")


def add_script(parser: argparse.ArgumentParser, what: str) -> None:
    """Declares the script or module, with its own arguments, which `launch` has, too."""
    parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is the name of a module"
    )
    parser.add_argument("script", metavar="SCRIPT", help=what)
    others = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )
    others.required = False


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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options that stand before the script, which `launch run` has, too."""
    add = parser.add_argument
    text = "replace collectives that XLA's partitioner adds to plain jit programs, too"
    add("--auto", action="store_true", help=text)
    text = (
        "run the steps of the script plain and accelerated in turns, and compare times and "
        "results: those of the jitted function that is called most"
    )
    add("--compare", action="store_true", help=text)
    text = f"how many steps to compare (default {compare.STEPS}); the script goes on after them"
    add("--steps", type=integer_from(16), default=compare.STEPS, metavar="N", help=text)


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """Returns what the words in front of the script say, as `start_rank.split` returns them."""
    parser = Parser(prog=f"{PROGRAM} run", add_help=False)
    add_options(parser)
    return parser.parse_args(words)


def begin(options: argparse.Namespace) -> None:
    """Accelerates what this process runs from here on, or compares it."""
    if not options.compare:
        jax_intranode.install(auto=options.auto)
    elif config.get().disable:
        raise WrongInput("--compare: JAX_INTRANODE_DISABLE=1 switches acceleration off: unset it")
    else:
        compare.start(options.steps, functools.partial(jax_intranode.accelerate, auto=options.auto))


def run(arguments: argparse.Namespace) -> int:
    """Runs the script as ``python SCRIPT ...`` does, after `jax_intranode.install`."""
    check_script(arguments.script, is_module=arguments.module)
    begin(arguments)
    start_rank.run_as_main([arguments.script, *arguments.arguments], is_module=arguments.module)
    return 0
