"""A rank of the self-test of `doctor`: a psum and an all-gather between two devices.

    python -m jax_intranode._src.command_line.selftest PLATFORM MODE FILE

Mode "single": one process has both devices. Mode "multi": each of two processes has one. The first
process writes to the file, as JSON, what ran the psum, why, and whether the results are right.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.command_line import launcher

_ELEMENTS = 256  # of float32 on each device: the size at which every table has a row


def main() -> None:
    """Runs the test."""
    platform, mode, file = sys.argv[1:]
    if mode == "multi":
        launcher.connect(platform)
    elif platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 2)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax_intranode.psum(x, "x"), jax_intranode.all_gather(x, "x", tiled=True)

    program = jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=(P(), P(None)), check_vma=False)
    )
    whole = np.arange(2 * _ELEMENTS, dtype=np.float32)
    sharding = NamedSharding(mesh, P("x"))
    x = jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
    right = True
    for _ in range(10):
        total, gathered = (np.asarray(y.addressable_data(0)) for y in program(x))
        right &= np.array_equal(total, whole[:_ELEMENTS] + whole[_ELEMENTS:])
        right &= np.array_equal(gathered, whole)
    psum = jax_intranode.explain(program)(x).own[0]
    if jax.process_index() == 0:
        Path(file).write_text(
            json.dumps(
                {
                    "right": right,
                    "algorithm": psum.algorithm,
                    "reason": psum.reason,
                    "operations": jax_intranode.usage_counter(),
                    "device": jax.devices()[0].device_kind,
                }
            )
        )


if __name__ == "__main__":
    main()
