"""Trains a tensor-parallel transformer with jax_intranode and with jax.lax, and compares them.

    python examples/tensor_parallel_transformer.py
    python examples/tensor_parallel_transformer.py --plot training.png

A small decoder-only transformer learns the texts of Python's `help()`, byte by byte, on a mesh
with the axes "data" and "model". Attention heads and MLP columns are sharded over "model".
Between layers the activations are sharded along the sequence (sequence parallelism, as in
Megatron-LM). So each layer runs, twice:

- `all_gather_matmul`: gathers the sequence and multiplies it by column-sharded matrices;
- `matmul_reduce_scatter`: multiplies by a row-sharded matrix, sums over the ranks, and leaves each
  rank its part of the sequence.

There are three trainings: written with jax_intranode, written with jax.lax, and the latter again
under `jax_intranode.accelerate()`, which replaces its collectives without an edit.

All start from the same parameters and see the same batches. They take turns, step by step. Their
losses agree up to rounding: the two libraries round intermediate sums at different points. Training
amplifies such differences, the more the higher the learning rate. The default rates are low enough
that the curves stay together.

The program uses all GPUs if there are at least two, and otherwise four CPU devices and a much
smaller model. On CPU devices collective matmuls are not overlapped, so expect no speed-up there.
"""

import argparse
import contextlib
import datetime
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
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
WARM_UP_STEPS = 20  # the learning rate rises linearly over these
UNTIMED_STEPS = 2  # not part of the reported speed
UNEDITED = "lax accelerated"  # the training that is written with jax.lax, accelerated
BETA_1, BETA_2, EPSILON = 0.9, 0.95, 1e-8  # Adam


@dataclass(frozen=True)
class Settings:
    """Model and training; each field is a command-line option.

    Attributes:
        steps: Training steps.
        layers: Layers of the transformer.
        width: Width of the activations between layers. The MLP is three times as wide.
        heads: Attention heads.
        sequence: Bytes per sequence.
        batch: Sequences per data-parallel replica and step.
        dtype: Dtype of the computation. Parameters and optimizer state are float32.
        attention: Implementation that `jax.nn.dot_product_attention` uses.
        data: Number of data-parallel replicas.
        rate: Learning rate after the warm-up.
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
    rate: float


CPU = Settings(60, 2, 128, 4, 128, 4, dtype="float32", attention="xla", data=2, rate=2e-3)
GPU = Settings(60, 4, 4096, 32, 2048, 1, dtype="bfloat16", attention="cudnn", data=1, rate=1e-4)
CHOICES = {"dtype": ("float32", "bfloat16"), "attention": ("xla", "cudnn")}


# The operations that are compared. Activations are [batch, sequence, width].


class Operations(NamedTuple):
    """The functions through which ranks exchange data."""

    all_gather_matmul: Callable[[jax.Array, list[jax.Array]], list[jax.Array]]
    matmul_reduce_scatter: Callable[[jax.Array, jax.Array], jax.Array]
    psum: Callable[[Any, Any], Any]


OURS = Operations(
    partial(jax_intranode.all_gather_matmul, axis_name="model", gather_axis=1),
    partial(jax_intranode.matmul_reduce_scatter, axis_name="model", scatter_axis=1),
    jax_intranode.psum,
)


def lax_all_gather_matmul(x: jax.Array, ws: list[jax.Array]) -> list[jax.Array]:
    """What `all_gather_matmul` computes, in jax.lax."""
    gathered = lax.all_gather(x, "model", axis=1, tiled=True)
    return [gathered @ w for w in ws]


def lax_matmul_reduce_scatter(x: jax.Array, w: jax.Array) -> jax.Array:
    """What `matmul_reduce_scatter` computes, in jax.lax."""
    return lax.psum_scatter(x @ w, "model", scatter_dimension=1, tiled=True)


LAX = Operations(lax_all_gather_matmul, lax_matmul_reduce_scatter, lax.psum)


# The transformer.


class Replicated(NamedTuple):
    """The parameters of which every rank has a whole copy; norms are stacked over layers."""

    embedding: Any
    norm_1: Any
    norm_2: Any
    norm: Any
    unembedding: Any


class Sharded(NamedTuple):
    """The parameters that are sharded over "model", stacked over layers."""

    query: Any
    key: Any
    value: Any
    output: Any
    gate: Any
    up: Any
    down: Any


class Params(NamedTuple):
    """All parameters."""

    replicated: Replicated
    sharded: Sharded


COLUMNS, ROWS = P(None, None, "model"), P(None, "model", None)
PARAM_SPECS = Params(
    Replicated(*[P()] * len(Replicated._fields)),
    Sharded(
        query=COLUMNS, key=COLUMNS, value=COLUMNS, output=ROWS, gate=COLUMNS, up=COLUMNS, down=ROWS
    ),
)


def initial_params(settings: Settings, key: jax.Array) -> Params:
    """Returns random parameters."""
    layers, width, inner = settings.layers, settings.width, 3 * settings.width
    keys = iter(jax.random.split(key, len(Sharded._fields) + 1))

    def matrices(rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        return jax.random.normal(next(keys), (layers, rows, columns)) * scale * rows**-0.5

    residual = (2 * layers) ** -0.5  # keeps the residual stream's size independent of the depth
    return Params(
        Replicated(
            embedding=jax.random.normal(next(keys), (VOCABULARY, width)),
            norm_1=jnp.ones((layers, width)),
            norm_2=jnp.ones((layers, width)),
            norm=jnp.ones(width),
            unembedding=jnp.zeros((width, VOCABULARY)),
        ),
        Sharded(
            query=matrices(width, width),
            key=matrices(width, width),
            value=matrices(width, width),
            output=matrices(width, width, residual),
            gate=matrices(width, inner),
            up=matrices(width, inner),
            down=matrices(inner, width, residual),
        ),
    )


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalizes each position by itself, so ranks need nothing from each other."""
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * inverse).astype(x.dtype) * scale


def rotary(x: jax.Array) -> jax.Array:
    """Rotary position embedding of [batch, sequence, heads, channels]."""
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
        rotary(query),
        rotary(key),
        value,
        is_causal=True,
        implementation=settings.attention,  # type: ignore[arg-type]
    )
    return mixed.reshape(*mixed.shape[:2], -1)


def forward(settings: Settings, ops: Operations, params: Params, tokens: jax.Array) -> jax.Array:
    """Returns the logits of this rank's part of the sequences."""
    whole, sharded = jax.tree.map(lambda p: p.astype(settings.dtype), params)

    def layer(x: jax.Array, params: tuple[jax.Array, jax.Array, Sharded]) -> tuple[jax.Array, None]:
        norm_1, norm_2, w = params
        q, k, v = ops.all_gather_matmul(rms_norm(x, norm_1), [w.query, w.key, w.value])
        x = x + ops.matmul_reduce_scatter(attention(settings, q, k, v), w.output)
        gate, up = ops.all_gather_matmul(rms_norm(x, norm_2), [w.gate, w.up])
        return x + ops.matmul_reduce_scatter(jax.nn.silu(gate) * up, w.down), None

    x, _ = lax.scan(layer, whole.embedding[tokens], (whole.norm_1, whole.norm_2, sharded))
    return (rms_norm(x, whole.norm) @ whole.unembedding).astype(jnp.float32)


# Training.


class State(NamedTuple):
    """What a training step updates: parameters, Adam's two moments, the number of steps."""

    params: Params
    mean: Params
    square: Params
    count: Any


STATE_SPECS = State(PARAM_SPECS, PARAM_SPECS, PARAM_SPECS, P())
TOKENS = P("data", "model")


def initial_state(settings: Settings, mesh: Mesh) -> State:
    """Returns the state before the first step, sharded over the mesh."""

    def make(key: jax.Array) -> State:
        params = initial_params(settings, key)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return State(params, zeros, zeros, jnp.zeros((), jnp.int32))

    shardings = jax.tree.map(partial(NamedSharding, mesh), STATE_SPECS)
    return jax.jit(make, out_shardings=shardings)(jax.random.key(0))


def adam(state: State, grads: Params, peak_rate: float) -> State:
    """Returns the state after one step of Adam."""
    count = state.count + 1
    t = count.astype(jnp.float32)
    mean = jax.tree.map(lambda m, g: m + (1 - BETA_1) * (g - m), state.mean, grads)
    square = jax.tree.map(lambda s, g: s + (1 - BETA_2) * (g * g - s), state.square, grads)
    rate = peak_rate * jnp.minimum(1, t / WARM_UP_STEPS) * jnp.sqrt(1 - BETA_2**t) / (1 - BETA_1**t)
    params = jax.tree.map(
        lambda p, m, s: p - rate * m / (jnp.sqrt(s) + EPSILON), state.params, mean, square
    )
    return State(params, mean, square, count)


def make_step(settings: Settings, mesh: Mesh, ops: Operations) -> Any:
    """Returns a jitted function: (state, tokens, next tokens) to (state, loss)."""
    tokens_per_step = settings.data * settings.batch * settings.sequence

    def local_loss(params: Params, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        """This rank's contribution to the loss."""
        log_probabilities = jax.nn.log_softmax(forward(settings, ops, params, tokens))
        chosen = jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)
        return -chosen.sum() / tokens_per_step

    @partial(jax.jit, donate_argnums=0)
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(STATE_SPECS, TOKENS, TOKENS),
        out_specs=(STATE_SPECS, P()),
    )
    def step(state: State, tokens: jax.Array, targets: jax.Array) -> tuple[State, jax.Array]:
        # Without these two lines JAX would insert psums of its own, which jax_intranode accelerates
        # only without an edit. With them, each rank gets the gradients of its own tokens.
        replicated = lax.pcast(state.params.replicated, ("data", "model"), to="varying")
        sharded = lax.pcast(state.params.sharded, "data", to="varying")
        loss, grads = jax.value_and_grad(local_loss)(Params(replicated, sharded), tokens, targets)
        # Every rank has seen a different part of the tokens, so gradients of replicated parameters
        # are summed over both axes. Ranks of "model" have different shards, so those are summed
        # over "data" only.
        loss, of_replicated = ops.psum((loss, grads.replicated), ("data", "model"))
        of_sharded = ops.psum(grads.sharded, "data")
        return adam(state, Params(of_replicated, of_sharded), settings.rate), loss

    return step


def make_batch(
    settings: Settings, mesh: Mesh, text: np.ndarray, index: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens of a step and, for each of them, the token that follows."""
    rng = np.random.default_rng(index)
    starts = rng.integers(len(text) - settings.sequence, size=settings.data * settings.batch)
    windows = text[starts[:, None] + np.arange(settings.sequence + 1)].astype(np.int32)

    def put(values: np.ndarray) -> jax.Array:
        sharding = NamedSharding(mesh, TOKENS)
        return jax.make_array_from_callback(values.shape, sharding, values.__getitem__)

    return put(windows[:, :-1]), put(windows[:, 1:])


class Run(NamedTuple):
    """The loss and the duration, in seconds, of each step of a training."""

    losses: list[float]
    seconds: list[float]


def train(
    settings: Settings, mesh: Mesh, text: np.ndarray, steps: dict[str, Any], states: list[State]
) -> list[Run]:
    """Trains with each of the step functions in turns and prints their losses."""
    runs = [Run([], []) for _ in steps]
    shown = {round(k * (settings.steps - 1) / 10) for k in range(11)}
    print_row("loss at step", *steps)
    for index in range(settings.steps):
        batch = make_batch(settings, mesh, text, index)
        order = list(enumerate(steps.values()))
        # Alternate the order: a GPU's clocks depend on what ran before.
        for k, step in order if index % 2 == 0 else reversed(order):
            start = time.perf_counter()
            states[k], loss = jax.block_until_ready(step(states[k], *batch))
            runs[k].seconds.append(time.perf_counter() - start)
            runs[k].losses.append(float(loss))
        if index in shown:
            print_row(str(index), *(f"{run.losses[-1]:.5f}" for run in runs))
    return runs


# The command.


def say(*text: Any) -> None:
    """Prints, from one of the processes."""
    if jax.process_index() == 0:
        print(*text, flush=True)


def print_row(*cells: str) -> None:
    """Prints a row of a table."""
    say(f"{cells[0]:<18}" + "".join(f"{cell:>16}" for cell in cells[1:]))


def compile_step(name: str, step: Any, *args: Any) -> Any:
    """Returns the compiled function and prints how long compiling took."""
    unedited = jax_intranode.accelerate() if name == UNEDITED else contextlib.nullcontext()
    start = time.perf_counter()
    with unedited:
        compiled = step.lower(*args).compile()
    say(f"compiled the training step with {name} in {time.perf_counter() - start:.1f} s")
    return compiled


def seconds_per_step(run: Run) -> float:
    """Returns the median duration of a step, without the first ones."""
    return statistics.median(run.seconds[UNTIMED_STEPS:] or run.seconds)


def report(settings: Settings, runs: list[Run]) -> None:
    """Prints the speed of the trainings and how far their losses differ."""
    tokens = settings.data * settings.batch * settings.sequence
    ours, lax, unedited = map(seconds_per_step, runs)
    print_row(
        "tokens per second", *(f"{tokens / seconds:.0f}" for seconds in (ours, lax, unedited))
    )
    say(f"jax_intranode / jax.lax: {lax / ours:.2f} x the tokens per second")
    say(f"jax.lax, accelerated / jax.lax: {lax / unedited:.2f} x the tokens per second")
    losses = [run.losses for run in runs]
    difference = max(max(step) - min(step) for step in zip(*losses, strict=True))
    say(f"largest difference of the losses: {difference:.5f} ({settings.dtype} rounding)\n")


def print_operations(explanation: jax_intranode.Explanation) -> None:
    """Prints what the collectives of a training step run as."""
    say("Collectives of a training step, and the algorithms that run them ('lax': jax.lax does):")
    counts = Counter((call.operation, call.algorithm) for call in explanation)
    for (operation, algorithm), count in counts.items():
        say(f"{operation:<22} {count:>2} x {algorithm}")
    say("jax_intranode.explain(step)(state, tokens, targets) lists each call with the reason.")


def write_json(settings: Settings, mesh: Mesh, runs: list[Run], file: Path) -> None:
    """Writes the settings and the median duration of a step, from which tools make tables."""
    names = ("ours", "lax", "unedited")
    result = {
        "example": "tensor_parallel_transformer",
        "jax": jax.__version__,
        "device": mesh.devices.flat[0].device_kind,
        "mesh": dict(mesh.shape),
        "processes": jax.process_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": asdict(settings),
        "seconds_per_step": dict(zip(names, map(seconds_per_step, runs), strict=True)),
        "losses": {name: run.losses for name, run in zip(names, runs, strict=True)},
    }
    file.write_text(json.dumps(result, indent=1) + "\n")


def plot(runs: list[Run], names: list[str], file: Path) -> None:
    """Draws the losses, and below them the ratio of the speeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), dpi=150, layout="constrained")
    top, bottom = figure.subplots(2, sharex=True)
    for run, name, style in zip(runs, names, ("-", "--", ":"), strict=True):
        top.plot(run.losses, style, label=name)
    top.set_ylabel("loss (nats per byte)")
    top.legend()
    bottom.plot(np.divide(runs[1].seconds, runs[0].seconds), ".", label="each step")
    ratio = seconds_per_step(runs[1]) / seconds_per_step(runs[0])
    bottom.axhline(ratio, label=f"ratio of the medians: {ratio:.2f}")
    bottom.axhline(1, color="grey", linestyle=":")
    bottom.set(xlabel="step", ylabel=f"tokens/s: {names[0]} / {names[1]}", ylim=(0, None))
    bottom.legend()
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(file)


def positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a parser of positive numbers of a type."""

    def parse(text: str) -> Any:
        number = kind(text)
        if number <= 0:
            raise argparse.ArgumentTypeError(f"{number} is not positive")
        return number

    return parse


def parse_options() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Returns the parser and the options; an option that is None takes the platform's default."""
    parser = argparse.ArgumentParser(
        description="Trains a tensor-parallel transformer with jax_intranode and with jax.lax.",
        epilog=f"Defaults on GPUs: {GPU}. On CPUs: {CPU}.",
    )
    for field in fields(Settings):
        if field.name in CHOICES:
            parser.add_argument(f"--{field.name}", choices=CHOICES[field.name])
        else:
            kind = float if field.name == "rate" else int
            parser.add_argument(f"--{field.name}", type=positive(kind), metavar="N")
    devices_help = "default: all GPUs, or 4 CPU devices"
    parser.add_argument("--devices", type=positive(int), metavar="N", help=devices_help)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw losses and speed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings and speed")
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="one process per GPU under Slurm or Open MPI: calls jax.distributed.initialize()",
    )
    return parser, parser.parse_args()


def choose(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> tuple[Settings, list[jax.Device]]:
    """Returns the settings and the devices; ends the program if they do not fit each other."""
    devices = jax.devices()
    if jax.default_backend() == "cpu" or len(devices) < 2:
        devices = jax.devices("cpu")
    size = options.devices or max(n for n in (1, 2, 4, 8) if n <= len(devices))
    if size > len(devices):
        parser.error(f"--devices is {size}; there are {len(devices)}")
    defaults = CPU if devices[0].platform == "cpu" else GPU
    given = {field.name: getattr(options, field.name) for field in fields(Settings)}
    chosen = asdict(defaults) | {name: v for name, v in given.items() if v is not None}
    if options.data is None and size % (2 * chosen["data"]) != 0:
        chosen["data"] = 1  # few devices: shard the model rather than replicate it
    channels = chosen["width"] // chosen["heads"]
    if options.attention is None and (
        chosen["dtype"] == "float32" or channels % 8 != 0 or channels > 128
    ):
        chosen["attention"] = "xla"  # cuDNN does not support these
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
    return settings, devices[:size]


def main() -> None:
    """Trains in all three ways and prints losses, tokens per second and the algorithms."""
    parser, options = parse_options()
    if options.distributed:
        jax.distributed.initialize()
    else:
        # Has no effect on GPUs. Must come before JAX's first use.
        jax.config.update("jax_num_cpu_devices", options.devices or 4)
    settings, devices = choose(parser, options)
    mesh = jax.make_mesh(
        (settings.data, len(devices) // settings.data),
        ("data", "model"),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=devices,
    )
    say(f"jax {jax.__version__}, {devices[0].device_kind}, mesh {dict(mesh.shape)}\n{settings}\n")

    text = np.frombuffer("\n".join(topics.topics.values()).encode(), np.uint8)
    batch = make_batch(settings, mesh, text, 0)
    jitted = {
        "jax_intranode": make_step(settings, mesh, OURS),
        "jax.lax": make_step(settings, mesh, LAX),
        UNEDITED: make_step(settings, mesh, LAX),
    }
    states = [initial_state(settings, mesh) for _ in jitted]
    steps = {name: compile_step(name, step, states[0], *batch) for name, step in jitted.items()}
    explanation = jax_intranode.explain(jitted["jax_intranode"])(states[0], *batch)
    say()
    runs = train(settings, mesh, text, steps, states)
    report(settings, runs)
    print_operations(explanation)
    if options.plot and jax.process_index() == 0:
        plot(runs, list(steps), options.plot)
        say(f"wrote {options.plot}")
    if options.json and jax.process_index() == 0:
        write_json(settings, mesh, runs, options.json)
        say(f"wrote {options.json}")


if __name__ == "__main__":
    main()
