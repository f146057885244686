"""``python -m jax_intranode run``: runs a script or a module that nobody edits."""

import argparse
import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import jax_intranode
from jax_intranode._src.command_line.launcher import start_rank
from jax_intranode._src.command_line.options import PROGRAM, Parser, WrongInput, integer_from

STEPS = 40  # of --compare

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
    text = f"how many steps to compare (default {STEPS}); the script goes on after them"
    few = "with fewer, no program is timed twice"
    add("--steps", type=integer_from(9, few), metavar="N", help=text)


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """Returns what `start_rank.split` has found in front of the script, or raises WrongInput."""
    parser = Parser(prog=f"{PROGRAM} run", add_help=False)
    add_options(parser)
    options = parser.parse_args(words)
    if options.steps and not options.compare:
        raise WrongInput(
            f"--steps {options.steps}: this is an option of --compare, and those of the script "
            "stand behind its name"
        )
    if options.compare and os.environ.get("JAX_INTRANODE_DISABLE") == "1":
        raise WrongInput("--compare: JAX_INTRANODE_DISABLE=1 switches acceleration off: unset it")
    return options


def begin(options: argparse.Namespace) -> None:
    """Accelerates what this process runs from here on, or compares it."""
    if options.compare:
        from jax_intranode._src.command_line import compare

        accelerate = functools.partial(jax_intranode.accelerate, auto=options.auto)
        compare.start(options.steps or STEPS, accelerate)
    else:
        jax_intranode.install(auto=options.auto)


def run(arguments: argparse.Namespace) -> NoReturn:
    """Replaces this process by one that runs the script, and accelerates it."""
    script = script_of(arguments)
    check_script(script[arguments.module], is_module=arguments.module)
    options = [f"--{name}" for name in ("auto", "compare") if getattr(arguments, name)]
    options += [f"--steps={arguments.steps}"] if arguments.steps else []
    parse_options(options)
    flags = ["-i"] * sys.flags.inspect + ["-u"] * getattr(sys.stdout, "write_through", False)
    os.execv(sys.executable, [*start_rank.command(*flags), "run", *options, *script])
