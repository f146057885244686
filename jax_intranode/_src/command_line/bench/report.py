"""The tables of the benchmark: which fields of a row they show, and how. docs/bench.md has all."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        field: the field of a row.
        title: its head.
        width: its width.
        form: the format of a number.
        factor: a number is multiplied by this.
        nothing: stands for None.
    """

    field: str
    title: str
    width: int
    form: str = ""
    factor: float = 1
    nothing: str = "-"

    def cell(self, row: Mapping[str, Any]) -> str:
        """Returns the text of a row."""
        return number(row[self.field], self.width, self.form, self.factor, self.nothing)


# Columns, by the title above them.
Table = Sequence[tuple[str, Sequence[Column]]]


def number(value: Any, width: int, form: str = ".2f", factor: float = 1, nothing: str = "-") -> str:
    """Returns a value as text of this width."""
    if value is None:
        return f"{nothing:>{width}}"
    return f"{value:>{width}}" if isinstance(value, str) else f"{value * factor:{width}{form}}"


def times(name: str, form: str = ".2f", factor: float = 1, width: int = 8) -> tuple[Column, Column]:
    """Returns the columns of the median and the 99th percentile of a time in microseconds."""
    median = Column(f"{name}_us", "p50", width, form, factor)
    return median, Column(f"{name}_p99_us", "p99", width, form, factor)


_WHAT = (Column("dtype", "type", 8), Column("algorithm", "algorithm", 14))
_RATIO = ("", (Column("ratio", "ratio", 6, ".2f"),))
_MS = (".3f", 1e-3)

COLLECTIVES: Table = (
    ("", (Column("size", "size(B)", 11), Column("count", "count", 11), *_WHAT)),
    ("in a graph (us)", (*times("graph_time"), Column("graph_wrong", "#wrong", 6))),
    (
        "from JAX (us, GB/s)",
        (
            *times("time"),
            Column("algbw", "algbw", 7, ".2f"),
            Column("busbw", "busbw", 7, ".2f"),
            Column("wrong", "#wrong", 6),
        ),
    ),
    ("lax, from JAX (us)", (*times("lax_time"), Column("lax_wrong", "#wrong", 6))),
    _RATIO,
)

MATMULS: Table = (
    ("", (*(Column(name, name.upper(), 6) for name in "mkn"), *_WHAT)),
    (
        "ours (ms)",
        (
            *times("time", *_MS),
            Column("tflops", "TFLOP/s", 8, ".2f"),
            Column("share", "share", 6, ".2f"),
            Column("wrong", "#wrong", 7),
        ),
    ),
    (
        "at best (ms)",
        (Column("alone_time_us", "matmul", 8, *_MS), Column("bound_us", "bound", 8, *_MS)),
    ),
    (
        "lax (ms)",
        (
            *times("lax_time", *_MS),
            Column("lax_share", "share", 6, ".2f"),
            Column("lax_wrong", "#wrong", 6),
        ),
    ),
    _RATIO,
)

# What runs without JAX_INTRANODE_TUNING, where that is set: at the end of a line.
_SHIPPED = {
    "shipped_algorithm": Column("shipped_time_us", "", 8, ".2f"),
    "shipped_plan": Column("shipped_time_us", "", 8, *_MS),
}


def head(table: Table) -> str:
    """Returns the two lines above a table."""
    titles, names = [], []
    for title, columns in table:
        names.append(" ".join(f"{column.title:>{column.width}}" for column in columns))
        titles.append(f"{title:^{len(names[-1])}}")
    return f"# {' | '.join(titles).rstrip()}\n# {' | '.join(names)}"


def line(table: Table, row: Mapping[str, Any]) -> str:
    """Returns a row as a line of a table."""
    groups = (" ".join(column.cell(row) for column in columns) for _, columns in table)
    text = f"  {' | '.join(groups)}"
    for field, time in _SHIPPED.items():
        if row.get(field) is not None:
            text += f" | shipped: {row[field]:>14} {time.cell(row)}"
    return text
