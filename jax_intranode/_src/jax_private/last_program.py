"""A program after all others, compiled by XLA alone: JAX would trace it, and log it to the user.

0.10.2 to 0.12: the client of a backend compiles a module and loads the executable.
"""

import jax
import numpy as np
from jax._src import xla_bridge
from jax._src.interpreters import mlir
from jax.extend.mlir import ir
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax

_PROGRAM = """
func.func public @main(%x: tensor<1xf32>) -> tensor<1xf32> {
  %y = stablehlo.add %x, %x : tensor<1xf32>
  return %y : tensor<1xf32>
}
"""


def results(platform: str) -> list[jax.Array]:
    """Results of a program over all local devices. It has no collective, which would connect them.

    None if JAX has no backends any more.
    """
    if not xla_bridge.backends_are_initialized():
        return []
    client = xla_bridge.get_backend(platform)
    devices = client.local_devices()
    options = _jax.CompileOptions()
    options.num_replicas = len(devices)
    options.device_assignment = _jax.DeviceAssignment.create(np.array([[d.id] for d in devices]))
    with mlir.make_ir_context():
        program = client.compile_and_load(
            ir.Module.parse(_PROGRAM),
            executable_devices=_jax.DeviceList(tuple(devices)),
            compile_options=options,
        )
    with jax.transfer_guard("allow"):  # whatever the program has set
        split = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
        x = jax.device_put(np.zeros(len(devices), np.float32), split)
    (of_devices,) = program.execute_sharded([x]).disassemble_into_single_device_arrays()
    return list(of_devices)
