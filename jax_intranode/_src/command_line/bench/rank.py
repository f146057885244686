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

from jax_intranode._src.command_line import launcher, source_tree
from jax_intranode._src.command_line.bench import options, record
from jax_intranode._src.command_line.bench.collectives import measure as collectives
from jax_intranode._src.command_line.bench.collectives.report import Row
from jax_intranode._src.command_line.bench.matmuls import measure as matmuls
from jax_intranode._src.command_line.bench.matmuls.operations import MATMULS
from jax_intranode._src.command_line.bench.matmuls.report import MatmulRow
from jax_intranode._src.command_line.bench.settings import PROCESS_PER_DEVICE, Settings, from_json

# Of operations; or a row of a whole program, of a class that only the source tree has.
_Row = Row | MatmulRow | Any


def main() -> None:
    """Makes the measurements. Rank 0 prints and writes the results.

    Command line: the settings as JSON, the JSON file for the results, and a file that gets a line
    when a measurement begins.
    """
    settings, output, begun = from_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    rank = launcher.connect(settings.platform) if settings.mode == PROCESS_PER_DEVICE else 0
    if jax.default_backend() != settings.platform:
        raise RuntimeError(f"wanted JAX on {settings.platform}, got {jax.default_backend()}")
    if any(jnp.dtype(name).itemsize == 8 for name in settings.dtypes):
        jax.config.update("jax_enable_x64", True)
    # make_mesh's default axis type is Explicit, which requires operands with explicit shardings.
    mesh = jax.make_mesh(
        (settings.devices,),
        ("x",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[: settings.devices],
    )
    header = record.header(settings)
    table = _Table(settings, header, begun) if rank == 0 else None
    measured = _program_rows if options.is_program(settings.name) else _rows
    rows: Sequence[_Row] = measured(settings, mesh, table)
    if rank == 0:
        result = {"header": header, "rows": [dataclasses.asdict(row) for row in rows]}
        output.write_text(json.dumps(result))


class _Table:
    """The table that rank 0 prints."""

    def __init__(self, settings: Settings, header: dict[str, Any], begun: Path) -> None:
        self._mode = settings.mode
        self._begun = begun
        self._seen: set[str] = set()
        settled = bool(settings.shapes) and settings.settle_ms > 0
        print(record.format_header(header, settled), flush=True)

    def begin(self, what: str) -> None:
        """Signals to the parent process that a measurement begins."""
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


def _rows(settings: Settings, mesh: Mesh, table: _Table | None) -> list[Row | MatmulRow]:
    rows: list[Row | MatmulRow] = []

    def add(what: str, measured: Callable[[], tuple[Row | MatmulRow, str | None]]) -> None:
        if table is not None:
            table.begin(what)
        row, fallback = measured()
        rows.append(row)
        if table is not None:
            table.add(row, fallback)

    if settings.name in MATMULS:
        for dtype, shape in settings.matmuls():
            add(f"{dtype}, {shape}", partial(matmuls.measure, settings, mesh, dtype, shape))
    else:
        for dtype, count in settings.measurements():
            what = f"{dtype}, {count * jnp.dtype(dtype).itemsize} bytes"
            add(what, partial(collectives.measure, settings, mesh, dtype, count))
    return rows


def _program_rows(settings: Settings, mesh: Mesh, table: _Table | None) -> list[Any]:
    if table is not None:
        table.begin(settings.name)
    row = source_tree.load("bench_programs.measure", settings.name).measure(settings, mesh)
    if table is not None:
        table.add(row)
    return [row]


if __name__ == "__main__":
    main()
