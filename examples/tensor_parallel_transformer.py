"""A transformer, tensor and sequence parallel, whose matmuls and collectives are one operation.

A small decoder-only transformer learns the texts of Python's `help()`, byte by byte, on a data x
model mesh. Attention heads and the columns of the MLP are split over the mesh axis "model".
Between the layers each rank of it has a part of every sequence, and all of the width (Megatron's
sequence parallelism). So a layer gathers the sequence before the matmuls that are split by columns
(`all_gather_matmul`, one for query, key and value, one for gate and up), and sums and cuts it again
after those that are split by rows (`matmul_reduce_scatter`).

The same training runs with `jax_intranode` and with `jax.lax`, from the same initial values, on the
same batches, in turns:

    python examples/tensor_parallel_transformer.py --plot losses.png

It uses all GPUs where there are two or more, and four CPU devices, for a much smaller model,
otherwise. The losses begin alike and drift apart by a little: the two round and sum in different
places, and a training amplifies what is in the last bits.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode

VOCABULARY = 256  # bytes
WARM_UP = 20  # steps in which the learning rate grows
UNTIMED = 2  # first steps, which compile, and connect the devices
DECAY, DECAY_OF_SQUARES, EPSILON = 0.9, 0.95, 1e-8  # of Adam


@dataclass(frozen=True)
class Settings:
    """What to train; each is an option of the command line.

    Attributes:
        steps: of training.
        layers: of the transformer.
        width: of the activations between layers; that of the MLP is three times as large.
        heads: of attention.
        sequence: bytes of a sequence.
        batch: sequences of each data-parallel replica in a step.
        dtype: of the computation; parameters, gradients and the optimizer are float32.
        attention: by which implementation of `jax.nn.dot_product_attention`.
        data: data-parallel replicas; the devices of each share a model.
    """

    steps: int
    layers: int
    width: int
    heads: int
    sequence: int
    batch: int
    dtype: str
    attention: str
    data: int


CPU = Settings(
    steps=300,
    layers=2,
    width=128,
    heads=4,
    sequence=128,
    batch=4,
    dtype="float32",
    attention="xla",
    data=2,
)
GPU = Settings(
    steps=100,
    layers=4,
    width=4096,
    heads=32,
    sequence=2048,
    batch=1,
    dtype="bfloat16",
    attention="cudnn",
    data=1,
)
# Settings that are one of few words; the others are numbers.
CHOICES = {"dtype": ("float32", "bfloat16"), "attention": ("xla", "cudnn")}


# What is compared.


class Operations(NamedTuple):
    """The operations in which ranks exchange data. Activations are [batch, sequence, width].

    Attributes:
        all_gather_matmul: from a rank's part of the sequences, and matrices, the products of the
            whole sequences with each of them.
        matmul_reduce_scatter: a rank's part of the sequences, of the sum of all ranks' products.
        psum: the sum of a tree over one or more axes.
    """

    all_gather_matmul: Callable[[jax.Array, list[jax.Array]], list[jax.Array]]
    matmul_reduce_scatter: Callable[[jax.Array, jax.Array], jax.Array]
    psum: Callable[[Any, Any], Any]


OURS = Operations(
    partial(jax_intranode.all_gather_matmul, axis_name="model", gather_axis=1),
    partial(jax_intranode.matmul_reduce_scatter, axis_name="model", scatter_axis=1),
    jax_intranode.psum,
)


def lax_all_gather_matmul(x: jax.Array, ws: list[jax.Array]) -> list[jax.Array]:
    """Gathers once, and multiplies."""
    gathered = lax.all_gather(x, "model", axis=1, tiled=True)
    return [gathered @ w for w in ws]


def lax_matmul_reduce_scatter(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies, then sums and cuts."""
    return lax.psum_scatter(x @ w, "model", scatter_dimension=1, tiled=True)


LAX = Operations(lax_all_gather_matmul, lax_matmul_reduce_scatter, lax.psum)


# The transformer.


class Whole(NamedTuple):
    """One value for each parameter that every rank of "model" has whole."""

    embedding: Any
    norm_1: Any  # of all layers, before attention
    norm_2: Any  # of all layers, before the MLP
    norm: Any
    unembedding: Any


class Split(NamedTuple):
    """One value for each parameter that is split over "model": those of all layers, stacked."""

    query: Any
    key: Any
    value: Any
    output: Any
    gate: Any
    up: Any
    down: Any


class Params(NamedTuple):
    """One value for each parameter of the transformer."""

    whole: Whole
    split: Split


COLUMNS, ROWS = P(None, None, "model"), P(None, "model", None)
SPECS = Params(
    whole=Whole(*[P()] * len(Whole._fields)),
    split=Split(
        query=COLUMNS, key=COLUMNS, value=COLUMNS, output=ROWS, gate=COLUMNS, up=COLUMNS, down=ROWS
    ),
)


def initial_params(settings: Settings, key: jax.Array) -> Params:
    """Returns parameters for the whole transformer."""
    layers, width, inner = settings.layers, settings.width, 3 * settings.width
    keys = iter(jax.random.split(key, len(Split._fields) + 1))

    def matrices(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (layers, rows, columns)) * rows**-0.5

    # The more layers add to the activations, the less each does.
    small = (2 * layers) ** -0.5
    return Params(
        Whole(
            embedding=jax.random.normal(next(keys), (VOCABULARY, width)),
            norm_1=jnp.ones((layers, width)),
            norm_2=jnp.ones((layers, width)),
            norm=jnp.ones(width),
            unembedding=jnp.zeros((width, VOCABULARY)),
        ),
        Split(
            query=matrices(width, width),
            key=matrices(width, width),
            value=matrices(width, width),
            output=matrices(width, width) * small,
            gate=matrices(width, inner),
            up=matrices(width, inner),
            down=matrices(inner, width) * small,
        ),
    )


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalizes each position by itself: a rank needs no other rank's part of the sequence."""
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * inverse).astype(x.dtype) * scale


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions of [batch, sequence, heads, channels]: pairs of channels turn as it goes."""
    _, sequence, _, channels = x.shape
    frequencies = 10000.0 ** (-2 * jnp.arange(channels // 2) / channels)
    angles = jnp.arange(sequence)[:, None, None] * frequencies
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def attention(settings: Settings, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention of this rank's heads over the whole sequence."""
    channels = settings.width // settings.heads
    query, key, value = (x.reshape(*x.shape[:2], -1, channels) for x in (query, key, value))
    mixed = jax.nn.dot_product_attention(
        rotate(query),
        rotate(key),
        value,
        is_causal=True,
        implementation=settings.attention,  # type: ignore[arg-type]
    )
    return mixed.reshape(*mixed.shape[:2], -1)


def forward(settings: Settings, ops: Operations, params: Params, tokens: jax.Array) -> jax.Array:
    """Returns the logits of this rank's part of the sequences, [batch, sequence / ranks]."""
    whole, split = jax.tree.map(lambda p: p.astype(settings.dtype), params)

    def layer(x: jax.Array, params: tuple[jax.Array, jax.Array, Split]) -> tuple[jax.Array, None]:
        norm_1, norm_2, w = params
        q, k, v = ops.all_gather_matmul(rms_norm(x, norm_1), [w.query, w.key, w.value])
        x = x + ops.matmul_reduce_scatter(attention(settings, q, k, v), w.output)
        gate, up = ops.all_gather_matmul(rms_norm(x, norm_2), [w.gate, w.up])
        return x + ops.matmul_reduce_scatter(jax.nn.silu(gate) * up, w.down), None

    x, _ = lax.scan(layer, whole.embedding[tokens], (whole.norm_1, whole.norm_2, split))
    return (rms_norm(x, whole.norm) @ whole.unembedding).astype(jnp.float32)


# Training.


class State(NamedTuple):
    """What a step makes anew: the parameters, Adam's two averages, and how many steps there were.

    Attributes:
        params: the parameters.
        mean: the average of their gradients.
        square: the average of the squares of their gradients.
        count: steps so far.
    """

    params: Params
    mean: Params
    square: Params
    count: Any


STATE_SPECS = State(SPECS, SPECS, SPECS, P())
TOKENS = P("data", "model")


def initial_state(settings: Settings, mesh: Mesh) -> State:
    """Returns the state before the first step; each device makes its own part."""

    def make(key: jax.Array) -> State:
        params = initial_params(settings, key)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return State(params, zeros, zeros, jnp.zeros((), jnp.int32))

    shardings = jax.tree.map(partial(NamedSharding, mesh), STATE_SPECS)
    return jax.jit(make, out_shardings=shardings)(jax.random.key(0))


def adam(state: State, grads: Params, rate: float) -> State:
    """Returns the state after a step of Adam."""
    count = state.count + 1
    mean = jax.tree.map(lambda m, g: m + (1 - DECAY) * (g - m), state.mean, grads)
    square = jax.tree.map(
        lambda s, g: s + (1 - DECAY_OF_SQUARES) * (g * g - s), state.square, grads
    )
    t = count.astype(jnp.float32)
    rate_now = rate * jnp.minimum(1, t / WARM_UP)
    unbiased = jnp.sqrt(1 - DECAY_OF_SQUARES**t) / (1 - DECAY**t)
    params = jax.tree.map(
        lambda p, m, s: p - rate_now * unbiased * m / (jnp.sqrt(s) + EPSILON),
        state.params,
        mean,
        square,
    )
    return State(params, mean, square, count)


def make_step(settings: Settings, mesh: Mesh, ops: Operations) -> Callable[..., Any]:
    """Returns a jitted function of a state, tokens and next tokens, to a state and the loss."""
    tokens_of_all = settings.data * settings.batch * settings.sequence
    rate = 0.025 * settings.width**-0.5

    def own_loss(params: Params, tokens: jax.Array, wanted: jax.Array) -> jax.Array:
        """This rank's summand of the loss."""
        log_probabilities = jax.nn.log_softmax(forward(settings, ops, params, tokens))
        chosen = jnp.take_along_axis(log_probabilities, wanted[..., None], axis=-1)
        return -chosen.sum() / tokens_of_all

    @partial(jax.jit, donate_argnums=0)
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(STATE_SPECS, TOKENS, TOKENS),
        out_specs=(STATE_SPECS, P()),
    )
    def step(state: State, tokens: jax.Array, wanted: jax.Array) -> tuple[State, jax.Array]:
        # Marked as varying, the parameters get the gradients of this rank's own tokens. Without
        # these lines JAX would sum them by itself, with its own psum.
        whole = lax.pcast(state.params.whole, ("data", "model"), to="varying")
        split = lax.pcast(state.params.split, "data", to="varying")
        loss, grads = jax.value_and_grad(own_loss)(Params(whole, split), tokens, wanted)
        # A gradient is summed over all ranks that have the parameter. Those of "model" share the
        # sequences, so what they have whole has met only a part of the tokens on each.
        loss, of_whole = ops.psum((loss, grads.whole), ("data", "model"))
        of_split = ops.psum(grads.split, "data")
        return adam(state, Params(of_whole, of_split), rate), loss

    return step


def read_text() -> np.ndarray:
    """Returns what Python's `help()` says of topics such as "LAMBDA", as bytes."""
    return np.frombuffer("\n".join(topics.topics.values()).encode(), np.uint8)


def make_batch(
    settings: Settings, mesh: Mesh, text: np.ndarray, index: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of a step, and those that follow each of them."""
    rng = np.random.default_rng(index)
    size = settings.data * settings.batch
    starts = rng.integers(len(text) - settings.sequence, size=size)
    windows = text[starts[:, None] + np.arange(settings.sequence + 1)].astype(np.int32)

    def put(values: np.ndarray) -> jax.Array:
        sharding = NamedSharding(mesh, TOKENS)
        return jax.make_array_from_callback(values.shape, sharding, values.__getitem__)

    return put(windows[:, :-1]), put(windows[:, 1:])


class Run(NamedTuple):
    """A training: its losses, and the seconds of each step."""

    losses: list[float]
    seconds: list[float]


def train(settings: Settings, mesh: Mesh, steps: dict[str, Any]) -> dict[str, Run]:
    """Trains by each of the functions, in turns, and prints their losses side by side."""
    text = read_text()
    # Two calls with one key: a step may not give away what another one needs.
    states = {name: initial_state(settings, mesh) for name in steps}
    runs = {name: Run([], []) for name in steps}
    shown = {round(k * (settings.steps - 1) / 10) for k in range(11)}
    show("step", *steps)
    for index in range(settings.steps):
        batch = make_batch(settings, mesh, text, index)
        # Who goes first changes, so that neither has the better place.
        for name in sorted(steps, reverse=index % 2 == 1):
            start = time.perf_counter()
            states[name], loss = steps[name](states[name], *batch)
            jax.block_until_ready((states[name], loss))
            runs[name].seconds.append(time.perf_counter() - start)
            runs[name].losses.append(float(loss))
        if index in shown:
            show(str(index), *(f"{run.losses[-1]:.5f}" for run in runs.values()))
    return runs


# The command.


def say(*what: Any) -> None:
    """Prints, in one of the processes."""
    if jax.process_index() == 0:
        print(*what, flush=True)


def show(*cells: str) -> None:
    """Prints a row of a table."""
    say(f"{cells[0]:<18}" + "".join(f"{cell:>16}" for cell in cells[1:]))


def plot(runs: dict[str, Run], file: Path) -> None:
    """Draws the losses of both trainings into one picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    # The second one dashed, so that one sees the first below it.
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=True):
        axes.plot(run.losses, style, label=name)
    axes.set(xlabel="step", ylabel="loss (nats a byte)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file)


def make_mesh(devices: list[jax.Device], data: int) -> Mesh:
    """Returns a mesh of all the devices, so many replicas of them."""
    shape, axis_types = (data, len(devices) // data), (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh(shape, ("data", "model"), axis_types, devices=devices)


def positive(text: str) -> int:
    """Returns the number of an option."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Returns the parser, for its errors, and the options; None where the default holds."""
    parser = argparse.ArgumentParser(
        description="Trains a tensor-parallel transformer with jax_intranode and with jax.lax.",
        epilog=f"Defaults on GPUs: {GPU}. On CPUs: {CPU}.",
    )
    for field in fields(Settings):
        if field.name in CHOICES:
            parser.add_argument(f"--{field.name}", choices=CHOICES[field.name])
        else:
            parser.add_argument(f"--{field.name}", type=positive, metavar="N")
    parser.add_argument(
        "--devices", type=positive, metavar="N", help="default: all GPUs, or 4 CPUs"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draws the losses")
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="started once per GPU, by Slurm or Open MPI: calls jax.distributed.initialize()",
    )
    return parser, parser.parse_args()


def choose(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> tuple[Settings, list[jax.Device]]:
    """Returns the settings, with the platform's defaults, and the devices."""
    devices = jax.devices()
    if jax.default_backend() == "cpu" or len(devices) < 2:
        devices = jax.devices("cpu")
    size = options.devices or max(n for n in (1, 2, 4, 8) if n <= len(devices))
    if size > len(devices):
        parser.error(f"--devices is {size}; there are {len(devices)}")
    devices = devices[:size]
    defaults = CPU if devices[0].platform == "cpu" else GPU
    given = {f.name: getattr(options, f.name) for f in fields(Settings)}
    chosen = {k: getattr(defaults, k) if v is None else v for k, v in given.items()}
    if options.data is None and size % (2 * chosen["data"]) != 0:
        chosen["data"] = 1  # sooner no replicas than models that are not split
    channels = chosen["width"] // chosen["heads"]
    if options.attention is None and (
        chosen["dtype"] == "float32" or channels % 8 != 0 or channels > 128
    ):
        chosen["attention"] = "xla"  # cuDNN has none of those
    settings = Settings(**chosen)

    ranks = max(1, size // settings.data)
    for what, value, divisor in (
        ("the number of devices", size, settings.data),
        ("--heads", settings.heads, ranks),
        ("--sequence", settings.sequence, ranks),
        ("--width", settings.width, 2 * settings.heads),
    ):
        if value % divisor != 0:
            parser.error(f"{what} is {value}; it must be a multiple of {divisor}")
    return settings, devices


def main() -> None:
    """Trains with both, and prints losses and tokens per second side by side."""
    parser, options = parse()
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if options.distributed:
        jax.distributed.initialize()
    else:
        # For machines without GPUs. It says nothing about GPUs, and must come before JAX's first
        # use.
        jax.config.update("jax_num_cpu_devices", options.devices or 4)
    settings, devices = choose(parser, options)
    mesh = make_mesh(devices, settings.data)
    say(f"jax {jax.__version__}, {devices[0].device_kind}, mesh {dict(mesh.shape)}\n{settings}\n")

    steps = {
        "jax_intranode": make_step(settings, mesh, OURS),
        "jax.lax": make_step(settings, mesh, LAX),
    }
    runs = train(settings, mesh, steps)
    tokens = settings.data * settings.batch * settings.sequence
    medians = [statistics.median(run.seconds[UNTIMED:] or run.seconds) for run in runs.values()]
    show("tokens per second", *(f"{tokens / seconds:.0f}" for seconds in medians))

    state = jax.eval_shape(partial(initial_state, settings, mesh))
    batch = make_batch(settings, mesh, read_text(), 0)
    say("\nThe operations of a step of jax_intranode:")
    say(jax_intranode.explain(steps["jax_intranode"])(state, *batch))
    if options.plot and jax.process_index() == 0:
        plot(runs, options.plot)


if __name__ == "__main__":
    main()
