"""What `run` does in the script's process: its options, and what they switch on."""

import argparse
import os
from collections.abc import Sequence

import jax_intranode
from jax_intranode._src.command_line.options import PROGRAM, Parser, WrongInput, integer_from

STEPS = 40  # of --compare


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options that stand before the script, which `launch run` has, too."""
    add = parser.add_argument
    text = "replace collectives that XLA's partitioner adds to plain jit programs, too"
    add("--auto", action="store_true", help=text)
    text = (
        "run the steps of the script plain and accelerated in turns, and compare times and "
        "results: those of the jitted function with replaced collectives that is called most"
    )
    add("--compare", action="store_true", help=text)
    text = f"how many steps --compare takes (default {STEPS}, at least 9); the script then goes on"
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

        compare.start(options.steps or STEPS, options.auto)
    else:
        jax_intranode.install(auto=options.auto)
