"""The command line, for example `python -m jax_intranode bench psum`.

This file imports nothing that a broken installation may lack, so that `info` always runs. Each
command is a module that is imported when the command is chosen. The module has

    DESCRIPTION: what the command does, for its --help.
    EXAMPLES: command lines, for its --help.
    add_arguments(parser): declares the command's arguments.
    run(arguments) -> int: runs the command and returns the exit code. It raises `WrongInput` for
        arguments that cannot be served.
"""

import argparse
import difflib
import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax_intranode
from jax_intranode._src.command_line.options import (
    PROGRAM,
    Failed,
    Parser,
    WrongInput,
    rank_on_this_node,
)


class Command(NamedTuple):
    """A command.

    Attributes:
        name: its name.
        help: what it does, in a few words.
        module: the module that has it.
        needs_package: whether it runs only where `import jax_intranode` works.
        starts_ranks: whether it is one process that starts all others it needs. If a launcher has
            started several, only the first of a node runs it. False: each process runs it.
    """

    name: str
    help: str
    module: str
    needs_package: bool = True
    starts_ranks: bool = True


# In the order in which a new user meets them.
COMMANDS = (
    Command(
        "demo",
        "show in half a minute what this package gains on this machine",
        "jax_intranode._src.command_line.demo",
    ),
    Command(
        "doctor",
        "check whether this package works on this node, and what runs each operation",
        "jax_intranode._src.command_line.doctor",
        needs_package=False,
    ),
    Command(
        "info",
        "print versions, GPUs and links, modes, environment variables, problems",
        "jax_intranode._src.command_line.info",
        needs_package=False,
    ),
    Command(
        "run",
        "run a script or a module with its collectives accelerated",
        "jax_intranode._src.command_line.run",
        needs_package=False,
        starts_ranks=False,
    ),
    Command(
        "launch",
        "start a process per GPU or CPU device, again after a fault",
        "jax_intranode._src.command_line.launch",
    ),
    Command(
        "bench",
        "measure and check an operation and the same one of jax.lax",
        "jax_intranode._src.command_line.bench.command",
    ),
    Command(
        "tune",
        "measure this node, and write a file of what is fastest on it",
        "jax_intranode._src.command_line.tune.command",
    ),
)


def _main_parser() -> argparse.ArgumentParser:
    width = max(len(command.name) for command in COMMANDS)
    commands = [f"  {command.name:<{width}}  {command.help}" for command in COMMANDS]
    parser = Parser(
        prog=PROGRAM,
        description=jax_intranode.__doc__,
        epilog="\n".join(
            ["commands:", *commands, "", f"`{PROGRAM} COMMAND --help` says more about one."]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the versions and exit")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _command_parser(command: Command, module: Any) -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"{PROGRAM} {command.name}",
        description=textwrap.fill(module.DESCRIPTION, 80),
        epilog="examples:\n" + "\n".join(f"  {line}" for line in module.EXAMPLES.splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    return parser


def _find(name: str) -> Command:
    names = [command.name for command in COMMANDS]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        meant = f"did you mean {near[0]}?" if near else f"use one of {', '.join(names)}."
        raise WrongInput(f"there is no command {name!r}: {meant}")
    return COMMANDS[names.index(name)]


def _run(argv: Sequence[str]) -> int:
    parser = _main_parser()
    options = parser.parse_args(argv)
    if options.version:
        from jax_intranode._src.command_line import machine

        print(machine.versions())
        return 0
    if options.command is None:
        parser.print_help()
        return 2
    command = _find(options.command)
    for name in jax_intranode._set_by_jax:  # not for programs that a command starts
        os.environ.pop(name, None)
    error = jax_intranode._import_error
    if error is not None and (installed := _shadowed()) is not None:
        _run_installed(installed, command, argv)
    if command.needs_package and error is not None:
        sys.stderr.write(
            f"{PROGRAM} {command.name}: jax_intranode cannot be used here: "
            f"{type(error).__name__}: {error}\n`{PROGRAM} info` shows what is installed.\n"
        )
        return 1
    module = importlib.import_module(command.module)
    try:
        arguments = _command_parser(command, module).parse_args(options.arguments)
        if command.starts_ranks and rank_on_this_node() > 0:
            return 0
        return int(module.run(arguments))
    except WrongInput as error:
        named = str(error).startswith((f"{command.name} ", f"{command.name}:"))
        sys.stderr.write(f"{PROGRAM} {'' if named else f'{command.name}: '}{error}\n")
        return 2
    except Failed as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _shadowed() -> Path | None:
    """The installed package, if this is a source tree without native modules in front of it."""
    package = Path(jax_intranode.__file__).resolve().parent
    if package.parent != Path.cwd() or sys.flags.safe_path:
        return None
    if str(package.parent) in sys.path[1:]:  # PYTHONPATH asks for it
        return None
    try:
        found = metadata.distribution("jax_intranode").locate_file("jax_intranode")
    except metadata.PackageNotFoundError:
        return None
    installed = Path(str(found)).resolve()
    return installed if installed.is_dir() and installed != package else None


def _run_installed(installed: Path, command: Command, argv: Sequence[str]) -> NoReturn:
    """Replaces this process by one that imports the installed package."""
    if command.name not in ("run", "launch"):  # these start programs that may import from here
        os.environ["PYTHONSAFEPATH"] = "1"
    flags = getattr(subprocess, "_args_from_interpreter_flags")()  # noqa: B009, not in mypy's stubs
    # Not -P: `run` and `launch` would take it for the user's.
    source = (
        f"import sys; sys.path.insert(0, {str(installed.parent)!r}); "
        "from jax_intranode.__main__ import main; "
        "del sys.path[0]; sys.exit(main())"
    )
    if sys.stdout is not None:  # closed
        sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *flags, "-c", source, *argv])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the command line names and returns its exit code.

    Args:
        argv: the arguments; by default those of this process.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _run(argv)
    except WrongInput as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    except BrokenPipeError:  # as by `... | head`
        # Python would write what is left at exit, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
