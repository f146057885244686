"""The number of this process among those that a launcher has started on this node."""

import os

from jax_intranode._src.selection import config

# As set by this package's launcher, Open MPI, MPICH and Intel MPI, Slurm, and torchrun.
_VARIABLES = (
    config.RANK,
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
    "LOCAL_RANK",
)


def of_this_process() -> int:
    """The rank; 0 if no launcher has set one."""
    for name in _VARIABLES:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 0
