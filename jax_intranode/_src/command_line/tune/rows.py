"""From measured sizes to the rows of the table."""

from collections.abc import Sequence
from dataclasses import dataclass

from jax_intranode._src.selection import table


@dataclass(frozen=True)
class Measured:
    """What a size has shown.

    Attributes:
        nbytes: the bytes of `table.Row`.
        best: the fastest launch. Its `nbytes` are those of the size.
        us: microseconds of a call that uses it.
        lax_us: microseconds of the same call of ``jax.lax``.
    """

    nbytes: int
    best: table.Row
    us: float
    lax_us: float

    @property
    def wins(self) -> bool:
        """Whether ours is not slower."""
        return self.us <= self.lax_us


def rows_of(measured: Sequence[Measured]) -> tuple[table.Row, ...]:
    """Returns the rows: the launch of each size, up to the last size below the first loss.

    Args:
        measured: the sizes in any order. Of several measurements of a size the last one counts.
    """
    rows: list[table.Row] = []
    by_size = {of_size.nbytes: of_size for of_size in measured}
    for _, of_size in sorted(by_size.items()):
        if not of_size.wins:
            break
        row = of_size.best
        if rows and _launch(rows[-1]) == _launch(row):
            rows[-1] = row
        else:
            rows.append(row)
    return tuple(rows)


def _launch(row: table.Row) -> tuple[str, int, int, int]:
    return row.algorithm, row.threads, row.blocks, row.segment_bytes


def fastest(
    times: Sequence[tuple[float, table.Row]], before: table.Row | None, tolerance: float
) -> tuple[float, table.Row]:
    """Returns the fastest launch, or that of the size before if it is as fast but for noise.

    Args:
        times: microseconds and launches of a size.
        before: the launch of the next smaller size.
        tolerance: relative difference of times that is noise.
    """
    best = min(times, key=lambda one: one[0])
    for us, row in times:
        same = before is not None and _launch(row) == _launch(before)
        if same and us <= best[0] * (1 + tolerance):
            return us, row
    return best
