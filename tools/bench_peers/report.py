"""The tables of peers: their times and ours."""

from collections.abc import Sequence
from typing import Any

from jax_intranode._src.command_line.bench.report import number


def table_of(peers: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table of the peers' times and ours; nothing if no peer was measured.

    Args:
        peers: the result of `registry.measure`.
        rows: our rows, as dictionaries.
    """
    if not peers["rows"]:
        return ""
    return (_of_matmuls if is_matmul(rows[0]) else _of_collectives)(peers, rows) + "\n"


def is_matmul(row: dict[str, Any]) -> bool:
    """Returns whether a row of the JSON file is that of a collective matmul."""
    return "k" in row


def key_of(row: dict[str, Any]) -> tuple[str, int, int, int]:
    """Returns the fields that identify a measurement in our rows and in those of peers."""
    return row["dtype"], row["m"], row["k"], row["n"]


def _of_matmuls(peers: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    times: dict[tuple[str, int, int, int], dict[str, float]] = {}
    bounds = {key_of(row): row["bound_us"] for row in rows}
    for row in rows:
        times.setdefault(key_of(row), {})[f"ours, {row['mode']}"] = row["time_us"]
    for row in peers["rows"]:
        times.setdefault(key_of(row), {})[row["library"]] = row["time_us"]
    columns = list(dict.fromkeys(name for by_library in times.values() for name in by_library))

    def cell(key: tuple[str, int, int, int], name: str) -> str:
        us = times[key].get(name)
        share = bounds[key] / us if us and bounds.get(key) else None
        return f"{number(us, 20, '.3f', 1e-3)} {'' if share is None else f'({share:.2f})':>6}"

    wrong = sum(row["wrong"] or 0 for row in peers["rows"])
    lines = [
        f"# p50 in ms (bound / p50), peers in a CUDA graph: {', '.join(peers['versions'])}",
        f"# {'M':>6} {'K':>6} {'N':>6} {'type':>8} | " + " ".join(f"{c:>27}" for c in columns),
        *(
            f"  {m:6} {k:6} {n:6} {dtype:>8} | "
            + " ".join(cell((dtype, m, k, n), name) for name in columns)
            for dtype, m, k, n in times
        ),
        f"# wrong elements of the peers: {wrong}",
    ]
    return "\n".join(lines)


def _of_collectives(peers: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Their times and ours in a CUDA graph."""
    times: dict[tuple[str, int], dict[str, float | None]] = {}
    for row in rows:
        column = f"ours, {row['mode']}"
        times.setdefault((row["dtype"], row["size"]), {})[column] = row["graph_time_us"]
    for row in peers["rows"]:
        times.setdefault((row["dtype"], row["size"]), {})[row["library"]] = row["time_us"]
    columns = list(dict.fromkeys(name for by_library in times.values() for name in by_library))
    wrong = sum(row["wrong"] or 0 for row in peers["rows"])
    lines = [
        f"# p50 in a CUDA graph (us; nccl-tests: mean): {', '.join(peers['versions'])}",
        f"# {'size(B)':>12} {'type':>8} | " + " ".join(f"{name:>24}" for name in columns),
        *(
            f"  {size:12} {dtype:>8} | "
            + " ".join(number(by_library.get(name), 24) for name in columns)
            for (dtype, size), by_library in times.items()
        ),
        f"# wrong elements of the peers: {wrong}",
    ]
    return "\n".join(lines)
