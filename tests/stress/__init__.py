"""Random programs for as long as you like, every result compared, and processes that fail.

    python tests/stress/run.py --help

It tests the installed package. run.py starts the processes and shows their progress.

calls.py    random calls, chains of them, and the bits that they must have
chains.py   what each process runs: programs of such chains
faults/     jobs in which one process fails
"""

import os
from pathlib import Path


def importable() -> dict[str, str]:
    """The environment variable with which a process can import this package."""
    tests = str(Path(__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {"PYTHONPATH": os.pathsep.join([*filter(None, path), tests])}
