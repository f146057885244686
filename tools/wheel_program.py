"""What an installed wheel must run: a sum and a matmul on four CPU devices. It has both parts."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode import _cuda, _host

jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(None, "model"), P("model")), out_specs=(P(), P()))
def f(x, w):
    return jax_intranode.psum(x[:, :1], "model"), jax_intranode.matmul_all_reduce(x, w, "model")


x, w = jnp.ones((4, 8)), jnp.ones((8, 4))
total, product = f(x, w)
assert (total == 4).all() and (product == 8).all()
assert {call.algorithm for call in jax_intranode.explain(f)(x, w)} == {"one_shot"}
print(f"ran with jax {jax.__version__}, CUDA part of CUDA {_cuda.CUDA_VERSION}, {_host.__file__}")
