"""The program of two nodes with two processes each that tools/nodes.sh runs.

    nodes_program.py [ADDRESS NUMBER_OF_PROCESSES PROCESS [VICTIM]]

Without arguments, JAX learns them from Slurm or Open MPI. Each process says on which node it is,
and what runs a sum over each axis. The process VICTIM is then killed. The others say what the next
sum ends with, and stay until JAX ends them, as they would in an operation of NCCL.
"""

import os
import signal
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode


def main() -> None:
    numbers = [int(number) for number in sys.argv[2:]]
    address = sys.argv[1] if numbers else None
    # JAX notices a process that sends no heartbeats; by default after 100 s.
    jax.distributed.initialize(address, *numbers[:2], heartbeat_timeout_seconds=10)
    process, node = jax.process_index(), os.uname().nodename
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P(("data", "model")))
    x = jax.make_array_from_callback((4,), sharding, lambda i: np.array([1, 2, 4, 8])[i])

    def total(*axes: str) -> Callable[[jax.Array], jax.Array]:
        rest = P(*(axis for axis in mesh.axis_names if axis not in axes))
        shard = jax.shard_map(mesh=mesh, in_specs=P(("data", "model")), out_specs=rest)
        return jax.jit(shard(lambda v: jax_intranode.psum(v, axes)))

    sums = {("model",): (3, 12)[process // 2], ("data",): (5, 10)[process % 2]}
    for axes, wanted in {**sums, ("data", "model"): 15}.items():
        (call,) = jax_intranode.explain(total(*axes))(x)
        mine = total(*axes)(x).addressable_data(0)
        assert mine.tolist() == [wanted], (axes, mine, wanted)
        print(f"process {process} on {node}: {', '.join(axes)}: {call.algorithm} {call.reason}")

    if victim := numbers[2:]:
        if process == victim[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for axes in sums:
                jax.block_until_ready(total(*axes)(x))
        except RuntimeError as error:
            print(f"process {process} on {node}: {error}", flush=True)
        time.sleep(60)


main()
