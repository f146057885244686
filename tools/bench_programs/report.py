"""The table of a whole program."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProgramRow:
    """One line of a whole program's table.

    Times are in microseconds a call, and those of the slowest rank.

    Attributes:
        program: the program's name.
        mode: "process-per-device" or "single-process".
        time_us: median time with our collectives.
        time_p99_us: its 99th percentile.
        lax_time_us: median time with lax's collectives.
        lax_time_p99_us: its 99th percentile.
        ratio: lax_time_us / time_us, above 1 where ours is faster.
        unedited_time_us: median time of the program with lax's collectives under
            `jax_intranode.accelerate`.
        unedited_ratio: lax_time_us / unedited_time_us.
        difference: the largest difference of the other two results from lax's, relative to the
            largest absolute value of lax's, over all arrays of the result; None if a value is not
            finite.
        handler_calls: how often XLA called our FFI handlers while times were taken, over all ranks.
    """

    program: str
    mode: str
    time_us: float
    time_p99_us: float
    lax_time_us: float
    lax_time_p99_us: float
    ratio: float
    unedited_time_us: float
    unedited_ratio: float
    difference: float | None
    handler_calls: int

    COLUMNS = (
        f"# {'':>24} | {'ours (us)':^21} | {'lax (us)':^21} | {'':>6} | "
        f"{'lax, accelerated':^17} |\n"
        f"# {'program':>24} | {'p50':>10} {'p99':>10} | {'p50':>10} {'p99':>10} | {'ratio':>6} | "
        f"{'p50':>10} {'ratio':>6} | {'difference':>10}"
    )

    def __str__(self) -> str:
        """Returns the row as a line of the table."""
        difference = "not finite" if self.difference is None else f"{self.difference:10.1e}"
        return (
            f"  {self.program:>24} | {self.time_us:10.1f} {self.time_p99_us:10.1f} | "
            f"{self.lax_time_us:10.1f} {self.lax_time_p99_us:10.1f} | {self.ratio:6.2f} | "
            f"{self.unedited_time_us:10.1f} {self.unedited_ratio:6.2f} | {difference}"
        )
