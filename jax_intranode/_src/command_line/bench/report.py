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


def _us(field: str, title: str, width: int = 8, form: str = ".2f") -> Column:
    return Column(field, title, width, form)


def _ms(field: str, title: str) -> Column:
    return Column(field, title, 8, ".3f", 1e-3)


COLLECTIVES: Table = (
    (
        "",
        (
            Column("size", "size(B)", 11),
            Column("count", "count", 11),
            Column("dtype", "type", 8),
            Column("algorithm", "algorithm", 14),
        ),
    ),
    (
        "in a graph (us)",
        (
            _us("graph_time_us", "p50"),
            _us("graph_time_p99_us", "p99"),
            Column("graph_wrong", "#wrong", 6),
        ),
    ),
    (
        "from JAX (us, GB/s)",
        (
            _us("time_us", "p50"),
            _us("time_p99_us", "p99"),
            Column("algbw", "algbw", 7, ".2f"),
            Column("busbw", "busbw", 7, ".2f"),
            Column("wrong", "#wrong", 6),
        ),
    ),
    (
        "lax, from JAX (us)",
        (
            _us("lax_time_us", "p50"),
            _us("lax_time_p99_us", "p99"),
            Column("lax_wrong", "#wrong", 6),
        ),
    ),
    ("", (Column("ratio", "ratio", 6, ".2f"),)),
)

MATMULS: Table = (
    (
        "",
        (
            Column("m", "M", 6),
            Column("k", "K", 6),
            Column("n", "N", 6),
            Column("dtype", "type", 8),
            Column("algorithm", "algorithm", 14),
        ),
    ),
    (
        "ours (ms)",
        (
            _ms("time_us", "p50"),
            _ms("time_p99_us", "p99"),
            Column("tflops", "TFLOP/s", 8, ".2f"),
            Column("share", "share", 6, ".2f"),
            Column("wrong", "#wrong", 7),
        ),
    ),
    ("at best (ms)", (_ms("alone_time_us", "matmul"), _ms("bound_us", "bound"))),
    (
        "lax (ms)",
        (
            _ms("lax_time_us", "p50"),
            _ms("lax_time_p99_us", "p99"),
            Column("lax_share", "share", 6, ".2f"),
            Column("lax_wrong", "#wrong", 6),
        ),
    ),
    ("", (Column("ratio", "ratio", 6, ".2f"),)),
)

# What runs without JAX_INTRANODE_TUNING, where that is set: at the end of a line.
_SHIPPED = {
    "shipped_algorithm": _us("shipped_time_us", ""),
    "shipped_plan": _ms("shipped_time_us", ""),
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
