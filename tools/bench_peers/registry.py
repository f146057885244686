"""The list of peers, and the function that measures them.

Peers run after the ranks of JAX have ended, because these hold most of the GPUs' memory. They get
the environment of this process.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_peers.nccl_tests import NCCL_TESTS
from bench_peers.pallas import PALLAS
from bench_peers.peer import Unavailable
from bench_peers.pytorch import PYTORCH
from bench_peers.report import table_of as table_of
from jax_intranode._src.command_line import launcher
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher.progress import ProgressLine

PEERS = {peer.name: peer for peer in (PYTORCH, PALLAS, NCCL_TESTS)}


def measure(
    names: Sequence[str], settings: Settings, timeout_s: float, line: ProgressLine
) -> dict[str, Any]:
    """Measures peers. Writes one line to stderr for each peer that can't be measured.

    Args:
        names: keys of PEERS.
        settings: what to measure.
        timeout_s: the time limit of each peer.
        line: the progress line.

    Returns:
        "versions", a text for each peer that ran, and "rows", one for each library, dtype and size.
        A row has "library", "size" ("m", "k" and "n" for a matmul), "dtype", "time_us",
        "time_p99_us" (or None) and "wrong" (or None).
    """
    versions: list[str] = []
    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            if settings.platform != "gpu":
                raise Unavailable("measured on GPUs only")
            with tempfile.TemporaryDirectory(prefix="jax_intranode_peers_") as directory:
                result = PEERS[name].measure(settings, Path(directory), timeout_s, line)
        except Unavailable as reason:
            sys.stderr.write(f"# {name} not measured: {reason}\n")
        except launcher.RankError as error:
            sys.stderr.write(f"# {name} not measured: it failed.\n{error}\n")
        else:
            versions.append(result["version"])
            rows += result["rows"]
    return {"versions": versions, "rows": rows}


def count(names: Sequence[str], settings: Settings) -> int:
    """Returns the number of measurements that the progress line counts for these peers."""
    return sum(PEERS[name].count(settings) for name in names)
