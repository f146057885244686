"""What several commands declare alike: types of arguments, options, and how a command fails.

It imports nothing that a broken installation may lack.
"""

import argparse
import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from jax_intranode._src.selection import config

PROGRAM = "python -m jax_intranode"


class WrongInput(argparse.ArgumentTypeError):
    """The message is one line; the command line shows it without a traceback, and exits with 2.

    Types of arguments raise it, too; argparse then names the argument.
    """


class Failed(RuntimeError):
    """The command line shows the message without a traceback, and exits with 1."""


class Parser(argparse.ArgumentParser):
    """A parser that raises WrongInput. argparse prints the usage, too, and exits."""

    def error(self, message: str) -> NoReturn:
        meant = ""
        if message.startswith("unrecognized arguments: "):
            name = message.split()[2].partition("=")[0]
            for near in difflib.get_close_matches(name, self._option_string_actions, n=1):
                meant = f" Did you mean {near}?"
        raise WrongInput(f"{message}.{meant} `{self.prog} --help` lists what it takes.")


def new_file(text: str) -> Path:
    """An argparse type for a file that can be written, as is known before anything takes time."""
    file = Path(text)
    directory = file.absolute().parent
    if file.is_dir():
        raise WrongInput(f"{file}: this is a directory: name a file")
    if not directory.is_dir():
        raise WrongInput(f"{file}: there is no directory {directory}: make it, or choose another")
    return file


def integer_from(minimum: int, why: str = "") -> Callable[[str], int]:
    """Returns an argparse type for integers of at least this minimum; why not for smaller ones."""

    def integer(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise WrongInput(f"{text!r}: use an integer of at least {minimum}{why and ': '}{why}")
        return int(text)

    return integer


def positive_number(most: float = float("inf")) -> Callable[[str], float]:
    """Returns an argparse type for finite numbers above 0, up to a largest one."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= most or value == float("inf"):
            upto = "" if most == float("inf") else f" of at most {most:g}"
            raise WrongInput(f"{text!r}: use a positive number{upto}")
        return value

    return number


def names_from(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns an argparse type for names separated by commas, each once."""

    def names(text: str) -> list[str]:
        found = list(dict.fromkeys(text.split(",")))
        for name in found:
            if name not in allowed:
                raise WrongInput(f"{name!r} is none of {', '.join(allowed)}")
        return found

    return names


def add_platform(parser: argparse.ArgumentParser, gpus: str = "any") -> None:
    parser.add_argument(
        "--platform",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help=f"auto chooses GPUs if there are {gpus} (default auto)",
    )


def add_mode(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode",
        choices=("process-per-device", "single-process", "both"),
        default="both",
        help="one process per device, a single process for all devices, or both (default both)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declares --json of the commands that print a report."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


# As set by this package's launcher, Open MPI, MPICH and Intel MPI, Slurm, and torchrun.
_RANK_VARIABLES = (
    config.RANK,
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
    "LOCAL_RANK",
)


def rank_on_this_node() -> int:
    """The number of this process among those that a launcher has started here; else 0."""
    for name in _RANK_VARIABLES:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 0
