"""What each rank runs: measures the collectives of one mode and one world size."""

import contextlib
import dataclasses
import time
from functools import partial
from typing import Any

import jax_intranode
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.command_line.launcher.all_ranks import Rank
from jax_intranode._src.command_line.launcher.runs import SINGLE_PROCESS
from jax_intranode._src.command_line.tune import sweep
from jax_intranode._src.group import communicator
from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.group import rendezvous as rendezvous_lib
from jax_intranode._src.selection import table, tuning


def _begin(rank: Rank, what: str, nbytes: int) -> None:
    rank.begin(f"{what}, {nbytes} bytes")


def measure(rank: Rank, seconds: float, operations: list[str], **fields: Any) -> dict[str, Any]:
    """Measures. Rank 0 prints the measurements.

    Args:
        seconds: how long all measurements may take.
    """
    settings, end = Settings(**fields), time.monotonic() + seconds
    mesh = rank.mesh()
    jax_intranode.initialize(mesh)
    rendezvous = rendezvous_lib.rendezvous_of(mesh.devices.flat)
    reason = rendezvous.reason or communicator.communicator(
        rendezvous, partition_lib.partition(mesh, ("x",))
    )
    if reason is not None:
        raise RuntimeError(f"these devices can't be measured: {reason}")

    mode = "single" if settings.mode == SINGLE_PROCESS else "multi"
    device = mesh.devices.flat[0].device_kind
    tables: list[Any] = []
    measurements: list[Any] = []
    left_out: list[str] = []
    for packets in ("bare", "flagged"):
        for operation in operations:
            dtype = sweep.DTYPES[settings.platform][packets]
            if operation in sweep.NORMS and packets == "flagged":
                continue  # norms take floating-point types only
            what = f"{operation} of {dtype}, {settings.devices} x {device}, {settings.mode}"
            if left_out:  # the time is over
                left_out.append(what)
                continue
            rank.print(f"# {what} ({packets} packets)")
            measured = []
            of_one = sweep.Sweep(
                settings,
                mesh,
                rendezvous.epoch_buffer_bytes,
                operation,
                packets,
                lambda name: sweep.ask_all_ranks(time.monotonic() > end, name),
            )
            whole = False
            with contextlib.suppress(sweep.OutOfTime):
                for of_size in of_one.run(partial(_begin, rank, what)):
                    measured.append(of_size)
                    rank.print(sweep.describe(of_size))
                whole = True
            rows = sweep.rows_of(measured)
            if whole:
                rank.print(f"# faster than lax up to {rows[-1].nbytes if rows else 0} bytes")
            else:
                rank.print("# the time is over: for what follows the shipped rows stay")
                if not rows:
                    left_out.append(what)
                    continue
                upto = max(of_size.nbytes for of_size in measured)
                left_out.append(f"{what}, more than {upto} bytes")
                hardware = table.hardware_of(settings.platform, device)
                shipped = table.rows(hardware, mode, operation, packets, settings.devices)
                rows = sweep.rows_of(measured, shipped)
            tables.append(tuning.table_fields(mode, operation, packets, settings.devices, rows))
            sizes = [dataclasses.asdict(of_size) for of_size in measured]
            facts = {"mode": mode, "operation": operation, "dtype": dtype}
            measurements.append({**facts, "ranks": settings.devices, "sizes": sizes})
    return {
        "device": device,
        "tables": tables,
        "measurements": measurements,
        "left_out": left_out,
    }
