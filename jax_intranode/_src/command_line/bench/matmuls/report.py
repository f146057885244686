"""The table of a collective matmul: one row for each shape."""

from dataclasses import dataclass

from jax_intranode._src.command_line.bench.cells import milliseconds, optional, shipped_text


@dataclass(frozen=True)
class MatmulRow:
    """One line of a collective matmul's table.

    Times are in microseconds a call, and those of the slowest rank. Counts of wrong elements are
    totals over all devices.

    Attributes:
        operation: a key of `operations.MATMULS`.
        backward: whether the backward pass was measured.
        m: rows of the product that a device computes.
        k: the size of the contracted dimension.
        n: columns of the product.
        dtype: the dtype's name.
        mode: "process-per-device" or "single-process".
        algorithm: the algorithm of our call, "mixed" if several operations differ, "lax" if it
            fell back to jax.lax, "none" if nothing was communicated.
        reason: why this algorithm.
        plans: the plan of each overlapped matmul of our call; empty if none is overlapped.
        chain: the number of calls in one execution.
        time_us: median time of our call.
        time_p99_us: its 99th percentile.
        tflops: TFLOP/s of one device: 2mkn (backward twice that) / time_us.
        wrong: the number of wrong elements in our results.
        alone_time_us: median time of the same products without communication.
        bound_us: the larger of alone_time_us and the time in which a device receives its data at
            the profile's `link_bound_bytes_per_s`; None on CPUs.
        share: bound_us / time_us; or None.
        lax_time_us: median time of lax's call.
        lax_time_p99_us: its 99th percentile.
        lax_share: bound_us / lax_time_us; or None.
        lax_wrong: the number of wrong elements in the sample of lax's results.
        ratio: lax_time_us / time_us, above 1 where ours is faster.
        error: root-mean-square error of a sample of our results against float64, relative to the
            root mean square of the float64 results; None if not finite.
        lax_error: the same for lax's results.
        handler_calls: how often XLA called our FFI handlers while all three were timed, over all
            ranks; 0 where it replayed CUDA graphs.
        shipped_plan: whether the same call has the "same plan" or an "other plan" without
            JAX_INTRANODE_TUNING; None if it is not set.
        shipped_time_us: that call's median time; or None.
    """

    operation: str
    backward: bool
    m: int
    k: int
    n: int
    dtype: str
    mode: str
    algorithm: str
    reason: str
    plans: list[dict[str, int]]
    chain: int
    time_us: float
    time_p99_us: float
    tflops: float
    wrong: int
    alone_time_us: float
    bound_us: float | None
    share: float | None
    lax_time_us: float
    lax_time_p99_us: float
    lax_share: float | None
    lax_wrong: int
    ratio: float
    error: float | None
    lax_error: float | None
    handler_calls: int
    shipped_plan: str | None = None
    shipped_time_us: float | None = None

    COLUMNS = (
        f"# {'':>6} {'':>6} {'':>6} {'':>8} {'':>14} | {'ours (ms)':^41} | "
        f"{'at best (ms)':^17} | {'lax (ms)':^31} |\n"
        f"# {'M':>6} {'K':>6} {'N':>6} {'type':>8} {'algorithm':>14} | {'p50':>8} {'p99':>8} "
        f"{'TFLOP/s':>8} {'share':>6} {'#wrong':>7} | {'matmul':>8} {'bound':>8} | "
        f"{'p50':>8} {'p99':>8} {'share':>6} {'#wrong':>6} | {'ratio':>6}"
    )

    def __str__(self) -> str:
        """Returns the row as a line of the table."""
        return (
            f"  {self.m:6} {self.k:6} {self.n:6} {self.dtype:>8} {self.algorithm:>14} | "
            f"{milliseconds(self.time_us)} {milliseconds(self.time_p99_us)} {self.tflops:8.2f} "
            f"{optional(self.share, 6)} {self.wrong:7} | "
            f"{milliseconds(self.alone_time_us)} {milliseconds(self.bound_us)} | "
            f"{milliseconds(self.lax_time_us)} {milliseconds(self.lax_time_p99_us)} "
            f"{optional(self.lax_share, 6)} {self.lax_wrong:6} | {self.ratio:6.2f}"
            f"{shipped_text(self.shipped_plan, milliseconds(self.shipped_time_us))}"
        )
