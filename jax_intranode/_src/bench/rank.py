"""The program of each rank: makes all measurements, in the same order on every rank."""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_intranode._src import launcher
from jax_intranode._src.bench import record, settings
from jax_intranode._src.bench.collectives import measure as collectives
from jax_intranode._src.bench.collectives.report import Row
from jax_intranode._src.bench.matmuls import measure as matmuls
from jax_intranode._src.bench.matmuls.operations import MATMULS
from jax_intranode._src.bench.matmuls.report import MatmulRow
from jax_intranode._src.bench.programs import measure as programs
from jax_intranode._src.bench.programs.definitions import PROGRAMS
from jax_intranode._src.bench.programs.report import ProgramRow

_Row = Row | ProgramRow | MatmulRow


def main() -> None:
    """Makes the measurements. Rank 0 prints and writes the results.

    Command line: the settings as JSON, the JSON file for the results, and a file that gets a line
    when a measurement begins.
    """
    told, output, begun = settings.from_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    rank = launcher.connect(told.platform) if told.mode == settings.PROCESS_PER_DEVICE else 0
    if jax.default_backend() != told.platform:
        raise RuntimeError(f"wanted JAX on {told.platform}, got {jax.default_backend()}")
    if any(jnp.dtype(name).itemsize == 8 for name in told.dtypes):
        jax.config.update("jax_enable_x64", True)
    # make_mesh's default axis type is Explicit, which requires operands with explicit shardings.
    mesh = jax.make_mesh(
        (told.devices,),
        ("x",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[: told.devices],
    )
    header = record.header(told)
    table = _Table(told, header, begun) if rank == 0 else None
    measured = _program_rows if told.name in PROGRAMS else _rows
    rows: Sequence[_Row] = measured(told, mesh, table)
    if rank == 0:
        result = {"header": header, "rows": [dataclasses.asdict(row) for row in rows]}
        output.write_text(json.dumps(result))


class _Table:
    """The table that rank 0 prints."""

    def __init__(self, told: settings.Settings, header: dict[str, Any], begun: Path) -> None:
        self._mode = told.mode
        self._begun = begun
        self._seen: set[str] = set()
        settled = bool(told.shapes) and told.settle_ms > 0
        print(record.format_header(header, settled), flush=True)

    def begin(self, what: str) -> None:
        """Tells the parent process that a measurement begins."""
        with self._begun.open("a") as file:
            file.write(f"{self._mode}, {what}\n")

    def add(self, row: _Row, fallback: str | None = None) -> None:
        """Prints a row and, once, the reason if our call fell back to jax.lax."""
        # The head of the table follows what libraries log during the first measurement.
        self._once(row.COLUMNS)
        if fallback is not None:
            self._once(f"# fell back to jax.lax: {fallback}")
        print(row, flush=True)

    def _once(self, text: str) -> None:
        if text not in self._seen:
            self._seen.add(text)
            print(text, flush=True)


def _rows(told: settings.Settings, mesh: Mesh, table: _Table | None) -> list[Row | MatmulRow]:
    rows: list[Row | MatmulRow] = []

    def add(what: str, measured: Callable[[], tuple[Row | MatmulRow, str | None]]) -> None:
        if table is not None:
            table.begin(what)
        row, fallback = measured()
        rows.append(row)
        if table is not None:
            table.add(row, fallback)

    if told.name in MATMULS:
        for dtype, shape in told.matmuls():
            add(f"{dtype}, {shape}", partial(matmuls.measure, told, mesh, dtype, shape))
    else:
        for dtype, count in told.measurements():
            what = f"{dtype}, {count * jnp.dtype(dtype).itemsize} bytes"
            add(what, partial(collectives.measure, told, mesh, dtype, count))
    return rows


def _program_rows(told: settings.Settings, mesh: Mesh, table: _Table | None) -> list[ProgramRow]:
    if table is not None:
        table.begin(told.name)
    row = programs.measure(told, mesh)
    if table is not None:
        table.add(row)
    return [row]


if __name__ == "__main__":
    main()
