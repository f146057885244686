"""A tensor-parallel MLP whose only change is `psum`: handwritten digits on a data x model mesh.

The hidden layer is split by columns and the second one by rows over the mesh axis "model", so the
forward pass needs one all-reduce. The batch is split over "data", so every step also all-reduces
the loss and the gradients. The same training runs with `jax_intranode.psum` and with
`jax.lax.psum`, from the same initial values:

    python examples/tensor_parallel_mlp.py

It uses all GPUs where there are two or more, and eight CPU devices otherwise.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jax_intranode
from jax_intranode._src.ops.psum import selection

PIXELS, HIDDEN, CLASSES = 64, 256, 10
STEPS, BATCH = 500, 256
LEARNING_RATE, MOMENTUM = 0.2, 0.9

Psum = Callable[[Any, str], Any]


class Params(NamedTuple):
    """One value for each parameter of the MLP."""

    w1: Any
    b1: Any
    w2: Any
    b2: Any


# How the parameters are split: the hidden layer by columns, the second layer by rows.
SPLIT = Params(w1=P(None, "model"), b1=P("model"), w2=P("model", None), b2=P())


def make_mesh() -> Mesh:
    """Returns a mesh of 8, 4 or 2 devices, with two data-parallel halves if there are 4 or more."""
    devices = jax.devices()
    if jax.default_backend() == "cpu" or len(devices) < 2:
        devices = jax.devices("cpu")
    size = max(n for n in (2, 4, 8) if n <= len(devices))
    data = 2 if size >= 4 else 1
    shape, axis_types = (data, size // data), (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh(shape, ("data", "model"), axis_types, devices=devices[:size])


def forward(params: Params, x: jax.Array, psum: Psum) -> jax.Array:
    """Returns the logits, from this device's columns of the first layer and rows of the second."""
    hidden = jax.nn.relu(x @ params.w1 + params.b1)
    return psum(hidden @ params.w2, "model") + params.b2


def make_train(mesh: Mesh, psum: Psum) -> Callable[..., tuple[Params, jax.Array]]:
    """Returns a function that trains for one step per batch and gives parameters and losses."""
    replicas = mesh.shape["data"]

    def loss_fn(params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        log_probabilities = jax.nn.log_softmax(forward(params, x, psum))
        return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1).mean()

    def step(
        state: tuple[Params, Params], batch: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[Params, Params], jax.Array]:
        params, velocity = state
        # Marked as varying over "data", the parameters get this replica's own gradients. Without
        # this line JAX would sum them over "data" by itself, with its own psum.
        own = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
        loss, grads = psum(jax.value_and_grad(loss_fn)(own, *batch), "data")
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g / replicas, velocity, grads)
        params = jax.tree.map(lambda p, v: p - LEARNING_RATE * v, params, velocity)
        return (params, velocity), loss / replicas

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(SPLIT, P(None, "data"), P(None, "data")),
        out_specs=(SPLIT, P()),
    )
    def train(params: Params, x: jax.Array, labels: jax.Array) -> tuple[Params, jax.Array]:
        velocity = jax.tree.map(jnp.zeros_like, params)
        (params, _), losses = jax.lax.scan(step, (params, velocity), (x, labels))
        return params, losses

    return train


def initial_params(rng: np.random.Generator) -> Params:
    """Returns parameters for the whole MLP, not yet split."""
    return Params(
        w1=rng.normal(0, (2 / PIXELS) ** 0.5, (PIXELS, HIDDEN)).astype(np.float32),
        b1=np.zeros(HIDDEN, np.float32),
        w2=rng.normal(0, (2 / HIDDEN) ** 0.5, (HIDDEN, CLASSES)).astype(np.float32),
        b2=np.zeros(CLASSES, np.float32),
    )


def accuracy(params: Params, x: np.ndarray, labels: np.ndarray) -> float:
    """Returns the share of right answers, computed with the whole MLP on one device."""
    logits = forward(Params(*map(np.asarray, params)), x, psum=lambda partial_sum, _: partial_sum)
    return float(np.mean(np.argmax(logits, axis=1) == labels))


def print_algorithms(mesh: Mesh) -> None:
    """Prints how `jax_intranode` runs each psum of the training step."""
    rows, columns = BATCH // mesh.shape["data"], HIDDEN // mesh.shape["model"]
    psums = [
        ("logits", "model", (rows, CLASSES)),
        ("loss", "data", ()),
        ("gradient of w1", "data", (PIXELS, columns)),
        ("gradient of b1", "data", (columns,)),
        ("gradient of w2", "data", (columns, CLASSES)),
        ("gradient of b2", "data", (CLASSES,)),
    ]
    print("jax_intranode.psum runs")
    for what, axis, shape in psums:
        chosen = selection(mesh, (axis,), shape, jnp.float32)
        print(f"  {what:<15} {shape!s:<10} over {axis:<6} as {chosen.algorithm}: {chosen.reason}")


def main() -> None:
    """Trains twice and prints both results side by side."""
    # For machines without GPUs. It says nothing about GPUs, and must come before JAX's first use.
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = make_mesh()
    print(f"jax {jax.__version__}, {mesh.devices.flat[0].device_kind}, mesh {dict(mesh.shape)}\n")

    digits = load_digits()
    x, x_test, labels, labels_test = train_test_split(
        np.float32(digits.data / 16), np.int32(digits.target), test_size=0.2, random_state=0
    )
    rng = np.random.default_rng(0)
    batches = rng.integers(len(x), size=(STEPS, BATCH))

    def put(values: np.ndarray, spec: P) -> jax.Array:
        return jax.device_put(values, NamedSharding(mesh, spec))

    params = jax.tree.map(put, initial_params(rng), SPLIT)
    x, labels = put(x[batches], P(None, "data")), put(labels[batches], P(None, "data"))

    print(f"{'':<18} {'last loss':>10} {'test accuracy':>14} {'seconds per step':>17}")
    for name, psum in (("jax_intranode.psum", jax_intranode.psum), ("jax.lax.psum", jax.lax.psum)):
        train = make_train(mesh, psum)
        jax.block_until_ready(train(params, x, labels))  # compiles, and connects the devices
        start = time.perf_counter()
        trained, losses = jax.block_until_ready(train(params, x, labels))
        seconds = (time.perf_counter() - start) / STEPS
        share = accuracy(trained, x_test, labels_test)
        print(f"{name:<18} {losses[-1]:>10.5f} {share:>14.4f} {seconds:>17.6f}")
        if share <= 0.95:
            raise SystemExit(f"{name}: the test accuracy should exceed 0.95")
    print()
    print_algorithms(mesh)


if __name__ == "__main__":
    main()
