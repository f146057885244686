"""`bench` with what its developers need besides: whole programs, other libraries, and plots.

    python tools/bench.py mlp_block
    python tools/bench.py psum --peers torch --plot psum.png
    python tools/bench.py plot old.json new.json -o both.png

The operations and options of `python -m jax_intranode bench` are there, too. docs/bench.md explains
them.
"""

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # -P leaves it out
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_peers import lax_flags
from bench_peers import registry as peers
from bench_plots import command as plots
from bench_programs.definitions import PROGRAMS

from jax_intranode._src.command_line import machine, options
from jax_intranode._src.command_line.bench import command as bench
from jax_intranode._src.command_line.bench import report
from jax_intranode._src.command_line.bench.settings import WAYS
from jax_intranode._src.command_line.launcher import runs
from jax_intranode._src.command_line.options import Failed, WrongInput

PROGRAM = "python tools/bench.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bench` and those that only this program has."""
    bench.add_arguments(parser, _parse_name, f"; or programs: {', '.join(PROGRAMS)}")
    add, names = parser.add_argument, "NAME[,NAME...]"
    text = (
        "measure jax.lax also with flags of XLA that make its collectives faster, in processes of "
        "their own"
    )
    add("--lax-flags", choices=("tuned",), help=text)
    text = f"versions of a program: {', '.join(WAYS)} (default all; lax always runs)"
    add("--ways", type=options.names_from(WAYS), default=list(WAYS), metavar=names, help=text)
    text = f"other libraries to measure too: {', '.join(peers.PEERS)}, or all (default none)"
    add("--peers", type=_parse_peers, default=[], metavar=names, help=text)
    text = "plot the results; needs matplotlib"
    add("--plot", type=options.new_file, metavar="FILE.png", help=text)


def _parse_name(text: str) -> str:
    if "," in text:
        return ",".join(options.names_from(list(PROGRAMS))(text))
    return text if text in PROGRAMS else bench.parse_name(text, PROGRAMS)


def _parse_peers(text: str) -> list[str]:
    return list(peers.PEERS) if text == "all" else options.names_from((*peers.PEERS, "all"))(text)


def run(arguments: argparse.Namespace) -> int:
    """Measures in the chosen modes, prints the tables and writes the files.

    Returns:
        The exit code: 0 if all elements were right in all modes, 1 if one was wrong.
    """
    signal.signal(signal.SIGTERM, runs.end_by_exit)
    names = arguments.name.split(",") if arguments.name.split(",")[0] in PROGRAMS else []
    if names and (arguments.peers or arguments.plot):
        raise WrongInput(f"--peers and --plot are for operations, not for the program {names[0]}")
    if not names and arguments.ways != list(WAYS):
        raise WrongInput(f"--ways is for programs, not for {arguments.name}")
    if arguments.plot:
        plots.check_can_draw("--plot")
    settings = [
        dataclasses.replace(of_mode, ways=arguments.ways)
        for of_mode in bench.settings_of(arguments, *machine.platform_and_devices(arguments))
    ]
    function = {"function": "bench_programs.measure:measure_all"} if names else {}
    run_mode = partial(bench.run_mode, **function)
    flags = lax_flags.known_flags() if arguments.lax_flags else ""
    of_modes = len(settings) * (len(names) or bench.count(settings[0]))
    of_peers = peers.count(arguments.peers, settings[0])
    line = runs.ProgressLine(sys.stderr, of_modes * (2 if flags else 1) + of_peers)
    variables, limit_s = bench.environment(arguments), arguments.timeout
    result = bench.empty_result()
    for of_mode in settings:
        if flags:
            of_mode = lax_flags.measured(of_mode, variables, flags, limit_s, line, run_mode)
        measured = run_mode(of_mode, variables, limit_s, line)
        command = report.command_line(sys.argv, ("tools/bench.py",))
        more = {"mode": arguments.mode, "lax_flags": flags, "command": command}
        bench.add_mode(result, measured, **more)
    if arguments.peers:
        result["peers"] = peers.measure(arguments.peers, settings[0], limit_s, line)
        print(peers.table_of(result["peers"], result["rows"]), end="", flush=True)
    bench.write(result, arguments.json)
    if arguments.plot is not None:
        plots.draw([result], arguments.plot)
    if not names:
        return 0 if bench.are_right(result["rows"]) else 1
    good = all(row["difference"] is not None for row in result["rows"])
    print(f"# results are finite numbers: {'OK' if good else 'FAILED'}", flush=True)
    return 0 if good else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `plot`, or measures; returns the exit code: 2 for wrong arguments."""
    argv = sys.argv[1:] if argv is None else argv
    # The ranks import programs and peers.
    paths, own = os.environ.get("PYTHONPATH", "").split(os.pathsep), str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, paths), *[own] * (own not in paths)])
    command: Any = plots if argv[:1] == ["plot"] else sys.modules[__name__]
    parser = options.Parser(
        prog=f"{PROGRAM} plot" if command is plots else PROGRAM,
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    try:
        command.add_arguments(parser)
        return int(command.run(parser.parse_args(argv[1:] if command is plots else argv)))
    except (Failed, WrongInput) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2 if isinstance(error, WrongInput) else 1


if __name__ == "__main__":
    sys.exit(main())
