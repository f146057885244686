"""A tensor-parallel MLP in which `jax_intranode.psum` takes the place of `jax.lax.psum`.

    python examples/tensor_parallel_mlp.py

The MLP classifies handwritten digits on a mesh with the axes "data" and "model". Its first layer is
sharded over "model" by columns and its second layer by rows, so a forward pass needs one
all-reduce. The batch is sharded over "data", so each step also all-reduces the loss and the
gradients. The same training runs with both psums, from the same initial parameters.

The program uses all GPUs if there are at least two, and eight CPU devices otherwise.
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

PIXELS, HIDDEN, CLASSES = 64, 256, 10
STEPS, BATCH = 500, 256
LEARNING_RATE, MOMENTUM = 0.2, 0.9

Psum = Callable[[Any, str], Any]


class Params(NamedTuple):
    """The parameters of the MLP, or one value for each of them."""

    w1: Any
    b1: Any
    w2: Any
    b2: Any


SPECS = Params(w1=P(None, "model"), b1=P("model"), w2=P("model", None), b2=P())


def make_mesh() -> Mesh:
    """Returns a mesh of 8, 4 or 2 devices; two data-parallel replicas if there are 4 or more."""
    devices = jax.devices()
    if jax.default_backend() == "cpu" or len(devices) < 2:
        devices = jax.devices("cpu")
    size = max(n for n in (2, 4, 8) if n <= len(devices))
    data = 2 if size >= 4 else 1
    axis_types = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh(
        (data, size // data), ("data", "model"), axis_types, devices=devices[:size]
    )


def forward(params: Params, x: jax.Array, psum: Psum) -> jax.Array:
    """Returns the logits, given this rank's shards of the parameters."""
    hidden = jax.nn.relu(x @ params.w1 + params.b1)
    return psum(hidden @ params.w2, "model") + params.b2


def make_train(mesh: Mesh, psum: Psum) -> Any:
    """Returns a jitted function: (parameters, batches) to (trained parameters, losses)."""
    replicas = mesh.shape["data"]

    def loss_fn(params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        log_probabilities = jax.nn.log_softmax(forward(params, x, psum))
        return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1).mean()

    def step(
        state: tuple[Params, Params], batch: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[Params, Params], jax.Array]:
        params, velocity = state
        # Without this line JAX would sum the gradients over "data" with a psum of its own, which
        # jax_intranode does not accelerate. With it, each replica gets its own gradients.
        local = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
        loss, grads = psum(jax.value_and_grad(loss_fn)(local, *batch), "data")
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g / replicas, velocity, grads)
        params = jax.tree.map(lambda p, v: p - LEARNING_RATE * v, params, velocity)
        return (params, velocity), loss / replicas

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(SPECS, P(None, "data"), P(None, "data")),
        out_specs=(SPECS, P()),
    )
    def train(params: Params, x: jax.Array, labels: jax.Array) -> tuple[Params, jax.Array]:
        velocity = jax.tree.map(jnp.zeros_like, params)
        (params, _), losses = jax.lax.scan(step, (params, velocity), (x, labels))
        return params, losses

    return train


def initial_params(rng: np.random.Generator) -> Params:
    """Returns random parameters, not yet sharded."""
    return Params(
        w1=rng.normal(0, (2 / PIXELS) ** 0.5, (PIXELS, HIDDEN)).astype(np.float32),
        b1=np.zeros(HIDDEN, np.float32),
        w2=rng.normal(0, (2 / HIDDEN) ** 0.5, (HIDDEN, CLASSES)).astype(np.float32),
        b2=np.zeros(CLASSES, np.float32),
    )


def accuracy(params: Params, x: np.ndarray, labels: np.ndarray) -> float:
    """Returns the fraction of correct predictions, computed without sharding."""
    logits = forward(Params(*map(np.asarray, params)), x, psum=lambda partial_sum, _: partial_sum)
    return float(np.mean(np.argmax(logits, axis=1) == labels))


def main() -> None:
    """Trains with both psums and prints loss, accuracy and speed."""
    # Has no effect on GPUs. Must come before JAX's first use.
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

    params = jax.tree.map(put, initial_params(rng), SPECS)
    x, labels = put(x[batches], P(None, "data")), put(labels[batches], P(None, "data"))

    rows, seconds = [], []
    for name, psum in (("jax_intranode.psum", jax_intranode.psum), ("jax.lax.psum", jax.lax.psum)):
        start = time.perf_counter()
        train = make_train(mesh, psum).lower(params, x, labels).compile()
        print(f"compiled with {name} in {time.perf_counter() - start:.1f} s", flush=True)
        jax.block_until_ready(train(params, x, labels))  # warm-up
        start = time.perf_counter()
        trained, losses = jax.block_until_ready(train(params, x, labels))
        seconds.append((time.perf_counter() - start) / STEPS)
        correct = accuracy(trained, x_test, labels_test)
        rows.append(f"{name:<18} {losses[-1]:>10.5f} {correct:>14.4f} {seconds[-1]:>17.6f}")
        if correct <= 0.95:
            raise SystemExit(f"{name}: the test accuracy should exceed 0.95")
    print(f"\n{'':<18} {'last loss':>10} {'test accuracy':>14} {'seconds per step':>17}")
    print(*rows, sep="\n")
    print(f"A step with jax.lax.psum takes {seconds[1] / seconds[0]:.2f} x as long.\n")

    print("jax_intranode runs these psums in each step:")
    train = make_train(mesh, jax_intranode.psum)
    for call in jax_intranode.explain(train)(params, x, labels).own:
        axes = ",".join(call.axes)
        print(f"  {call.nbytes:>6} bytes over {axes:<5} as {call.algorithm}: {call.reason}")


if __name__ == "__main__":
    main()
