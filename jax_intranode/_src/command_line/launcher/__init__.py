"""One process per rank on this node: start them, watch them, and leave none behind.

The parent process:
    job: the processes of one run.
    service: JAX's coordination service, which tells the ranks of each other.
    files: `run_ranks`, a run whose output goes to files, for tests and benchmarks.
    functions: `run_function`, a run of a function of this package, with messages and progress.
    progress: the progress line.
    output: a rank's output as `python -m jax_intranode launch` (commands/launch.py) shows it.
Each rank:
    start_rank: the program that `launch` starts, which runs the user's script.
    rank: how a rank joins the others.
    function_rank: the program that `run_function` starts.
    all_ranks: numbers that the ranks exchange.

torchrun and mpirun start processes, too. Neither starts JAX's coordination service, so it would
live in rank 0 and die with it, and neither is a dependency that JAX programs have anyway.
"""

import subprocess as _subprocess
import sys as _sys
from pathlib import Path as _Path

from jax_intranode._src.command_line.launcher.files import RankError as RankError
from jax_intranode._src.command_line.launcher.files import run_ranks as run_ranks
from jax_intranode._src.command_line.launcher.functions import MODES as MODES
from jax_intranode._src.command_line.launcher.functions import (
    PROCESS_PER_DEVICE as PROCESS_PER_DEVICE,
)
from jax_intranode._src.command_line.launcher.functions import SINGLE_PROCESS as SINGLE_PROCESS
from jax_intranode._src.command_line.launcher.functions import Devices as Devices
from jax_intranode._src.command_line.launcher.functions import end_by_exit as end_by_exit
from jax_intranode._src.command_line.launcher.functions import run_function as run_function
from jax_intranode._src.command_line.launcher.job import Job as Job
from jax_intranode._src.command_line.launcher.progress import ProgressLine as ProgressLine
from jax_intranode._src.command_line.launcher.rank import connect as connect
from jax_intranode._src.command_line.launcher.rank import rank_env as rank_env
from jax_intranode._src.command_line.launcher.rank import sharing_env as sharing_env
from jax_intranode._src.command_line.launcher.service import (
    coordination_service as coordination_service,
)

# The beginning of a rank's command: a script and its arguments follow, see start_rank.py.
START_RANK = (
    _sys.executable,
    *("-u", "-X", "faulthandler"),  # no variables: Python may have been told to ignore them
    *getattr(_subprocess, "_args_from_interpreter_flags")(),  # noqa: B009, not in mypy's stubs
    str(_Path(__file__).with_name("start_rank.py")),
)
