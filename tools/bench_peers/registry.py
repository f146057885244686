"""The list of peers, the function that measures them, and their tables: their times and ours.

Peers run after the ranks of JAX have ended, because these hold most of the GPUs' memory. They get
the environment of this process.
"""

import sys
from collections.abc import Sequence
from typing import Any

from bench_peers.nccl_tests import NCCL_TESTS
from bench_peers.pallas import PALLAS
from bench_peers.peer import Unavailable
from bench_peers.pytorch import PYTORCH
from jax_intranode._src.command_line.bench.report import number
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher.own_files import private_directory
from jax_intranode._src.command_line.launcher.runs import ProgressLine, RankError

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
            with private_directory() as directory:
                result = PEERS[name].measure(settings, directory, timeout_s, line)
        except Unavailable as reason:
            sys.stderr.write(f"# {name} not measured: {reason}\n")
        except RankError as error:
            sys.stderr.write(f"# {name} not measured: it failed.\n{error}\n")
        else:
            versions.append(result["version"])
            rows += result["rows"]
    return {"versions": versions, "rows": rows}


def count(names: Sequence[str], settings: Settings) -> int:
    """Returns the number of measurements that the progress line counts for these peers."""
    return sum(PEERS[name].count(settings) for name in names)


# Tables.


def is_matmul(row: dict[str, Any]) -> bool:
    """Returns whether a row of the JSON file is that of a collective matmul."""
    return "k" in row


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the fields that identify a measurement in our rows and in those of peers."""
    return row["dtype"], *(row[name] for name in ("size", "m", "k", "n") if name in row)


def table_of(peers: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table of the peers' times and ours; nothing if no peer was measured.

    Of collectives both are times in a CUDA graph.

    Args:
        peers: the result of `measure`.
        rows: our rows, as dictionaries.
    """
    if not peers["rows"]:
        return ""
    matmuls = is_matmul(rows[0])
    times: dict[tuple[Any, ...], dict[str, float | None]] = {}
    bounds = {key_of(row): row["bound_us"] if matmuls else None for row in rows}
    for row in rows:
        us = row["time_us" if matmuls else "graph_time_us"]
        times.setdefault(key_of(row), {})[f"ours, {row['mode']}"] = us
    for row in peers["rows"]:
        times.setdefault(key_of(row), {})[row["library"]] = row["time_us"]
    columns = list(dict.fromkeys(name for by_library in times.values() for name in by_library))

    def cell(key: tuple[Any, ...], name: str) -> str:
        us, bound = times[key].get(name), bounds.get(key)
        if not matmuls:
            return number(us, 24)
        share = f"({bound / us:.2f})" if us and bound else ""
        return f"{number(us, 20, '.3f', 1e-3)} {share:>6}"

    how = (
        "ms (bound / p50), peers in a CUDA graph"
        if matmuls
        else "a CUDA graph (us; nccl-tests: mean)"
    )
    names = " ".join(f"{name:>6}" for name in "MKN") if matmuls else f"{'size(B)':>12}"
    width = 6 if matmuls else 12
    lines = [
        f"# p50 in {how}: {', '.join(peers['versions'])}",
        f"# {names} {'type':>8} | " + " ".join(f"{c:>{27 if matmuls else 24}}" for c in columns),
        *(
            f"  {' '.join(f'{size:{width}}' for size in key[1:])} {key[0]:>8} | "
            + " ".join(cell(key, name) for name in columns)
            for key in times
        ),
        f"# wrong elements of the peers: {sum(row['wrong'] or 0 for row in peers['rows'])}",
    ]
    return "\n".join(lines) + "\n"
