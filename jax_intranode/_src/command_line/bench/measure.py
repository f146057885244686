"""What each rank runs: all measurements, in the same order on every rank."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_intranode._src.command_line.bench import collectives, matmuls, report
from jax_intranode._src.command_line.bench.operations import MATMULS
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher.all_ranks import Rank

# What is measured, its table, and the function that makes a row of it, with the reason for a
# fallback to lax.
Measurement = tuple[str, report.Table, Callable[[], tuple[dict[str, Any], str | None]]]
# What a row says of jax.lax with XLA's flags tuned.
_TUNED = ("lax_tuned_time_us", "lax_tuned_time_p99_us", "lax_tuned_wrong")


def measure(rank: Rank, **fields: Any) -> dict[str, Any]:
    """Measures an operation."""
    return measure_all(rank, Settings(**fields), _measurements)


def measure_all(
    rank: Rank,
    settings: Settings,
    measurements: Callable[[Settings, Mesh], Iterable[Measurement]],
) -> dict[str, Any]:
    """Makes the measurements. Rank 0 prints the table.

    Returns:
        "header" and "rows" of the JSON file.
    """
    if any(jnp.dtype(name).itemsize == 8 for name in settings.dtypes):
        jax.config.update("jax_enable_x64", True)
    mesh = rank.mesh()
    if settings.platform == "gpu":  # XLA loads NCCL, whose version the header has
        jnp.zeros(mesh.size, device=NamedSharding(mesh, P("x"))).sum().block_until_ready()
    header = report.header(settings)
    rank.print(report.format_header(header, bool(settings.shapes) and settings.settle_ms > 0))
    printed: set[str] = set()

    def once(text: str) -> None:
        if text not in printed:
            printed.add(text)
            rank.print(text)

    rows = []
    tuned = iter(settings.lax_tuned)
    for what, table, make in measurements(settings, mesh):
        rank.begin(f"{settings.mode}, {what}")
        row, fallback = make()
        row |= dict(zip(_TUNED, next(tuned, [None] * 3), strict=True))
        rows.append(row)
        # The head of the table follows what libraries log during the first measurement.
        once(report.head(table))
        if fallback is not None:
            once(f"# fell back to jax.lax: {fallback}")
        rank.print(report.line(table, row))
    return {"header": header, "rows": rows}


def _measurements(settings: Settings, mesh: Mesh) -> Iterator[Measurement]:
    if settings.name in MATMULS:
        for dtype, shape in settings.matmuls():
            make = partial(matmuls.measure, settings, mesh, dtype, shape)
            yield f"{dtype}, {shape}", report.MATMULS, make
    else:
        for dtype, count in settings.measurements():
            what = f"{dtype}, {count * jnp.dtype(dtype).itemsize} bytes"
            make = partial(collectives.measure, settings, mesh, dtype, count)
            yield what, report.COLLECTIVES, make
