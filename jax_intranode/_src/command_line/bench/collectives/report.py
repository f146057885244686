"""The table of a collective: one row for each size."""

from dataclasses import dataclass

from jax_intranode._src.command_line.bench.cells import optional, shipped_text


@dataclass(frozen=True)
class Row:
    """One line of a collective's table.

    Times are in microseconds a call, and those of the slowest rank. Counts of wrong elements are
    totals over all devices.

    Attributes:
        size: bytes, as defined in `operations.Operation`.
        count: the number of elements in these bytes.
        dtype: the dtype's name.
        mode: "process-per-device" or "single-process".
        algorithm: the algorithm of our call. "push" stands for psum_scatter and all_gather
            together, "mixed" for several different ones, "lax" for a fallback to jax.lax.
        operations: the number of operations that our call runs.
        graph_time_us: median time of our kernels alone in a CUDA graph; None if not measured.
        graph_time_p99_us: its 99th percentile.
        graph_wrong: the number of wrong elements in the graph's result.
        time_us: median time of our call from JAX, less the chain's own multiplications.
        time_p99_us: its 99th percentile.
        algbw: size / time_us in GB/s; None if the time is below the clock's resolution.
        busbw: bus bandwidth in GB/s: algbw * 2(n-1)/n, or (n-1)/n for psum_scatter, all_gather
            and all_to_all. It compares with a link's speed for any number n of devices. None where
            algbw is.
        wrong: the number of wrong elements in our result.
        lax_time_us: median time of lax's call from JAX.
        lax_time_p99_us: its 99th percentile.
        lax_wrong: the number of wrong elements in lax's result.
        ratio: lax_time_us / time_us, above 1 where ours is faster; None where algbw is.
        error: root-mean-square error of our result against float64, relative to the root mean
            square of the float64 result; None where nothing is rounded, or if it is not finite.
        lax_error: the same for lax's result.
        handler_calls: how often XLA called our FFI handlers while times from JAX were taken, over
            all ranks; 0 where it replayed CUDA graphs.
        shipped_algorithm: the algorithm of the same call without JAX_INTRANODE_TUNING; None if it
            is not set.
        shipped_time_us: that call's median time from JAX; or None.
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
    shipped_algorithm: str | None = None
    shipped_time_us: float | None = None

    COLUMNS = (
        f"# {'':>11} {'':>11} {'':>8} {'':>14} | {'in a graph (us)':^24} | "
        f"{'from JAX (us, GB/s)':^40} | {'lax, from JAX (us)':^24} |\n"
        f"# {'size(B)':>11} {'count':>11} {'type':>8} {'algorithm':>14} | {'p50':>8} {'p99':>8} "
        f"{'#wrong':>6} | {'p50':>8} {'p99':>8} {'algbw':>7} {'busbw':>7} {'#wrong':>6} | "
        f"{'p50':>8} {'p99':>8} {'#wrong':>6} | {'ratio':>6}"
    )

    def __str__(self) -> str:
        """Returns the row as a line of the table."""
        graph_wrong = "-" if self.graph_wrong is None else self.graph_wrong
        return (
            f"  {self.size:11} {self.count:11} {self.dtype:>8} {self.algorithm:>14} | "
            f"{optional(self.graph_time_us, 8)} {optional(self.graph_time_p99_us, 8)} "
            f"{graph_wrong:>6} | {self.time_us:8.2f} {self.time_p99_us:8.2f} "
            f"{optional(self.algbw, 7)} {optional(self.busbw, 7)} {self.wrong:6} | "
            f"{self.lax_time_us:8.2f} {self.lax_time_p99_us:8.2f} {self.lax_wrong:6} | "
            f"{optional(self.ratio, 6)}"
            f"{shipped_text(self.shipped_algorithm, optional(self.shipped_time_us, 8))}"
        )
