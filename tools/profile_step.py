"""Captures a profile of training steps, in which XProf shows the names of this package.

    python tools/profile_step.py OUT [--steps 3]

The program is a tensor-parallel MLP with one matmul before and one after the activation. It uses
all GPUs if there are at least two, and otherwise four CPU devices. The profile is written to the
folder OUT. The program prints how to view it.
"""

import argparse

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode

# On CPU devices our kernels run small collectives only.
SIZES = {"cpu": (16, 128, 4096), "gpu": (4096, 4096, 16384)}  # rows, width, hidden width
DTYPES = {"cpu": jnp.float32, "gpu": jnp.bfloat16}
LEARNING_RATE = 0.1
SPECS = {"up": P(None, "model"), "down": P("model", None), "scale": P()}


def loss_of(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The loss of this rank's rows of x and shards of the parameters, summed over all ranks."""
    hidden = jax.nn.gelu(jax_intranode.all_gather_matmul(x, params["up"], "model"))
    y = jax_intranode.matmul_reduce_scatter(hidden, params["down"], "model")
    error = jnp.float32(params["scale"] * y - x)
    return jax_intranode.psum(jnp.mean(error**2), "model")


def step(params: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """One step of gradient descent; returns the parameters and the loss."""
    # Without this line JAX would sum the gradient of "scale" with a psum of its own.
    local = params | {"scale": jax.lax.pcast(params["scale"], "model", to="varying")}
    loss, gradients = jax.value_and_grad(loss_of)(local, x)
    gradients["scale"] = jax_intranode.psum(gradients["scale"], "model")
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradients), loss


def main() -> None:
    """Compiles and runs the program, then captures the profile of a few more steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", metavar="OUT", help="folder of the profile")
    parser.add_argument("--steps", type=int, default=3, help="steps in the profile (3)")
    arguments = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", 4)  # has no effect on GPUs
    devices = jax.devices() if len(jax.devices()) > 1 else jax.devices("cpu")
    platform = devices[0].platform
    rows, width, hidden = SIZES[platform]
    mesh = jax.make_mesh((len(devices),), ("model",), (AxisType.Auto,), devices=devices)

    def random(seed: int, shape: tuple[int, ...], spec: P) -> jax.Array:
        values = jax.random.normal(jax.random.key(seed), shape, DTYPES[platform])
        return jax.device_put(values / shape[0] ** 0.5, NamedSharding(mesh, spec))

    params = {
        "up": random(0, (width, hidden), SPECS["up"]),
        "down": random(1, (hidden, width), SPECS["down"]),
        "scale": random(2, (width,), SPECS["scale"]),
    }
    x = random(3, (rows, width), P("model"))
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(SPECS, P("model")), out_specs=(SPECS, P()))
    train = jax.jit(sharded)
    for _ in range(2):  # compiles, and warms up
        params, loss = jax.block_until_ready(train(params, x))

    with jax.profiler.trace(arguments.out):
        for number in range(arguments.steps):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                params, loss = jax.block_until_ready(train(params, x))

    kind = devices[0].device_kind
    print(f"{len(devices)} x {kind}, jax {jax.__version__}, loss {float(loss):.4f}")
    print(f"To view the profile: pip install xprof && xprof --logdir {arguments.out}")
    print("Open the page that it names, and choose the tool Trace Viewer.")


if __name__ == "__main__":
    main()
