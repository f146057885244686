"""A rank of `tune`: measures the collectives of one mode and one world size."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

import jax_intranode
from jax_intranode._src.command_line import launcher
from jax_intranode._src.command_line.bench.settings import (
    PROCESS_PER_DEVICE,
    SINGLE_PROCESS,
    from_json,
)
from jax_intranode._src.command_line.tune import sweep
from jax_intranode._src.command_line.tune.rows import rows_of
from jax_intranode._src.group import communicator
from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.group import rendezvous as rendezvous_lib
from jax_intranode._src.selection import tuning


def main() -> None:
    """Measures. Rank 0 prints the measurements and writes the result.

    Command line: the settings as JSON, the JSON file for the result, a file that gets a line when a
    measurement begins, the seconds that all measurements may take, and the operations.
    """
    settings, output, begun = from_json(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    seconds, operations = float(sys.argv[4]), sys.argv[5].split(",")
    rank = launcher.connect(settings.platform) if settings.mode == PROCESS_PER_DEVICE else 0
    end = time.monotonic() + seconds
    mesh = jax.make_mesh(
        (settings.devices,),
        ("x",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[: settings.devices],
    )
    jax_intranode.initialize(mesh)
    rendezvous = rendezvous_lib.rendezvous_of(mesh.devices.flat)
    reason = rendezvous.reason or communicator.communicator(
        rendezvous, partition_lib.partition(mesh, ("x",))
    )
    if reason is not None:
        raise RuntimeError(f"these devices can't be measured: {reason}")

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    mode = "single" if settings.mode == SINGLE_PROCESS else "multi"
    where = f"{settings.devices} x {mesh.devices.flat[0].device_kind}, {settings.mode}"
    result: dict[str, Any] = {
        "device": mesh.devices.flat[0].device_kind,
        "tables": [],
        "measurements": [],
        "left_out": [],
    }
    for packets in ("bare", "flagged"):
        for operation in operations:
            dtype = sweep.DTYPES[settings.platform][packets]
            what = f"{operation} of {dtype}, {where}"

            def begin(nbytes: int, what: str = what) -> None:
                if rank == 0:
                    with begun.open("a") as file:
                        file.write(f"{what}, {nbytes} bytes\n")

            if result["left_out"]:  # the time is over
                result["left_out"].append(what)
                continue
            say(f"# {what} ({packets} packets)")
            measured = []
            of_one = sweep.Sweep(
                settings,
                mesh,
                rendezvous.epoch_buffer_bytes,
                operation,
                packets,
                lambda name: sweep.ask_all_ranks(time.monotonic() > end, name),
            )
            try:
                for of_size in of_one.run(begin):
                    measured.append(of_size)
                    say(sweep.describe(of_size))
            except sweep.OutOfTime:
                say("# the time is over: for this and for what follows the shipped rows stay")
                result["left_out"].append(what)
                continue
            rows = rows_of(measured)
            say(f"# faster than lax up to {rows[-1].nbytes if rows else 0} bytes")
            result["tables"].append(
                tuning.table_fields(mode, operation, packets, settings.devices, rows)
            )
            result["measurements"].append(
                {
                    "mode": mode,
                    "operation": operation,
                    "dtype": dtype,
                    "ranks": settings.devices,
                    "sizes": [dataclasses.asdict(of_size) for of_size in measured],
                }
            )
    if rank == 0:
        output.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
