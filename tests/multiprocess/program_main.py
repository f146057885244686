"""Runs a whole program of several processes as one rank.

    program_main.py PLATFORM NAME [ARGUMENT...]

NAME is a function of one of the files programs_*.py: ordinary programs, which must not fail, and
faulty ones. A line "RESULT: ..." is what a test checks, and the line "END: ..." has the failure
that the process ended with.
"""

import atexit
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]  # python -P leaves it out


def _say_how_it_ended() -> None:
    """Runs after all that JAX and the package do at exit, because it was registered before."""
    failure = jax_intranode.last_failure()
    # Text and newline in one write, because XLA's threads write to the same file.
    print(f"END: {failure and failure.message}\n", end="", flush=True)


if __name__ == "__main__":
    atexit.register(_say_how_it_ended)

import logging  # noqa: E402
import signal  # noqa: E402

import programs_that_end  # noqa: E402
import programs_that_go_on  # noqa: E402
import programs_with_faults  # noqa: E402

import jax_intranode  # noqa: E402
from jax_intranode._src.command_line.launcher.rank import connect  # noqa: E402


def main() -> None:
    platform, name, *arguments = sys.argv[1:]
    logging.basicConfig()
    # Programs that a shell starts in the background ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    connect(platform)
    sys.excepthook = sys.__excepthook__  # end as programs do that nobody prepared
    programs = {}
    for module in (programs_that_end, programs_that_go_on, programs_with_faults):
        programs.update(vars(module))
    programs[name](*arguments)


if __name__ == "__main__":
    main()
