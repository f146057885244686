"""What the benchmark says of a collective: its rows, and the table of the peers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax_intranode._src.bench.cells import optional


@dataclass(frozen=True)
class Row:
    """One line of an operation's table. Times are in microseconds a call, the slowest rank's.

    Attributes:
        size: bytes, as `operations.Operation` counts them.
        count: elements in these bytes.
        dtype: the dtype's name.
        mode: "process-per-device" or "single-process".
        algorithm: what ours ran as: an algorithm, "push" for psum_scatter and all_gather, "mixed"
            if several differ, "lax" if it fell back.
        operations: how many operations ours ran as.
        graph_time_us: our kernels by themselves in a CUDA graph, median; None if not measured.
        graph_time_p99_us: their 99th percentile.
        graph_wrong: elements of the graph's result that are wrong, over all devices.
        time_us: ours as called, the multiply of the chain taken off: median.
        time_p99_us: its 99th percentile.
        algbw: size / time_us, in GB/s; None if the time is below what the clock shows.
        busbw: algbw * 2(n-1)/n (psum_scatter and all_gather: (n-1)/n), which compares with a
            link's speed for any n; or None.
        wrong: elements of our result that are wrong, over all devices.
        lax_time_us: lax's as called: median.
        lax_time_p99_us: its 99th percentile.
        lax_wrong: elements of lax's result that are wrong, over all devices.
        ratio: lax_time_us / time_us, above 1 where ours is faster; or None.
        error: how far our result is from the float64 one: root mean square over the elements,
            relative to that of the latter; None where nothing is rounded, or not finite.
        lax_error: how far lax's is.
        handler_calls: how often XLA called a handler of ours while both were timed as called, over
            all ranks; 0 where it replayed graphs.
    """

    size: int
    count: int
    dtype: str
    mode: str
    algorithm: str
    operations: int
    graph_time_us: float | None
    graph_time_p99_us: float | None
    graph_wrong: int | None
    time_us: float
    time_p99_us: float
    algbw: float | None
    busbw: float | None
    wrong: int
    lax_time_us: float
    lax_time_p99_us: float
    lax_wrong: int
    ratio: float | None
    error: float | None
    lax_error: float | None
    handler_calls: int

    COLUMNS = (
        f"# {'':>11} {'':>11} {'':>8} {'':>14} | {'in a graph (us)':^24} | "
        f"{'as called (us, GB/s)':^40} | {'lax, as called (us)':^24} |\n"
        f"# {'size(B)':>11} {'count':>11} {'type':>8} {'algorithm':>14} | {'p50':>8} {'p99':>8} "
        f"{'#wrong':>6} | {'p50':>8} {'p99':>8} {'algbw':>7} {'busbw':>7} {'#wrong':>6} | "
        f"{'p50':>8} {'p99':>8} {'#wrong':>6} | {'ratio':>6}"
    )

    def __str__(self) -> str:
        """The row as the table shows it."""
        graph_wrong = "-" if self.graph_wrong is None else self.graph_wrong
        return (
            f"  {self.size:11} {self.count:11} {self.dtype:>8} {self.algorithm:>14} | "
            f"{optional(self.graph_time_us, 8)} {optional(self.graph_time_p99_us, 8)} "
            f"{graph_wrong:>6} | {self.time_us:8.2f} {self.time_p99_us:8.2f} "
            f"{optional(self.algbw, 7)} {optional(self.busbw, 7)} {self.wrong:6} | "
            f"{self.lax_time_us:8.2f} {self.lax_time_p99_us:8.2f} {self.lax_wrong:6} | "
            f"{optional(self.ratio, 6)}"
        )


def format_peers(peers: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table of the peers beside ours in a graph.

    Args:
        peers: what `measure` returned.
        rows: the rows of ours.
    """
    times: dict[tuple[str, int], dict[str, float | None]] = {}
    for row in rows:
        column = f"ours, {row['mode']}"
        times.setdefault((row["dtype"], row["size"]), {})[column] = row["graph_time_us"]
    for row in peers["rows"]:
        times.setdefault((row["dtype"], row["size"]), {})[row["library"]] = row["time_us"]
    columns = list(dict.fromkeys(name for of_size in times.values() for name in of_size))
    wrong = sum(row["wrong"] or 0 for row in peers["rows"])
    lines = [
        f"# in a graph (us), p50 (nccl-tests: mean): {', '.join(peers['versions'])}",
        f"# {'size(B)':>12} {'type':>8} | " + " ".join(f"{name:>24}" for name in columns),
        *(
            f"  {size:12} {dtype:>8} | "
            + " ".join(optional(of_size.get(name), 24) for name in columns)
            for (dtype, size), of_size in times.items()
        ),
        f"# wrong elements of the peers: {wrong}",
    ]
    return "\n".join(lines)
