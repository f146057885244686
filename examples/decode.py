"""Decodes with a tensor-parallel transformer, with jax_intranode and with jax.lax.

    python examples/decode.py
    python examples/decode.py --size 8B --batch 16
    python examples/decode.py --weights FOLDER --prompt "The capital of France is"

A decoder-only model with a key-value cache extends each sequence of a batch by the most likely
token, again and again. Attention heads and MLP columns are sharded over "model". In each layer,
attention and MLP end in a sum over the ranks, to which the residual is added and which is
normalized: for a few sequences that is a few KB, and latency is all that counts.

There are three decoders of the same model:

- jax.lax: `lax.psum`, and a norm that XLA compiles;
- jax_intranode: `psum_residual_rms_norm`, one kernel for all of it;
- jax.lax, accelerated: the first one under `jax_intranode.accelerate()`, without an edit. This is
  what `python -m jax_intranode run` does to a program.

They must find the same tokens. A fourth loop leaves out sums and norms: no decoder can be faster.
Its tokens mean nothing.

Layers are unrolled, and each step donates its cache to the next one. So XLA puts a whole step into
a CUDA graph and replays it. The program prints how often XLA called into jax_intranode during the
timed steps: never, if all was replayed.

Weights are random, or those of a Llama model in safetensors (`pip install safetensors`). A prompt
in words also needs `pip install tokenizers`.

The program uses all GPUs if there are at least two, and otherwise four CPU devices and a much
smaller model.
"""

import argparse
import contextlib
import datetime
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode

OURS, LAX, UNEDITED = "jax_intranode", "jax.lax", "lax accelerated"
BOUND = "no sums or norms"


@dataclass(frozen=True)
class Model:
    """The shape of a model, with the names that a Llama model's config.json has for them."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500_000.0

    @property
    def channels(self) -> int:
        """Channels of an attention head."""
        return self.hidden_size // self.num_attention_heads


SIZES = {
    "tiny": Model(2, 256, 768, 8, 8, 512),
    "8B": Model(32, 4096, 14336, 32, 8, 128_256),
    "70B": Model(80, 8192, 28672, 64, 8, 128_256),
}


# What is compared: a sum over the ranks, the residual, and a norm.


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Normalizes each token by itself."""
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return (wide * inverse).astype(x.dtype) * weight


def sum_and_norm(
    partial_sum: jax.Array, residual: jax.Array, weight: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Sums over "model" and adds the residual: (the norm of that, that)."""
    residual = residual + lax.psum(partial_sum, "model")
    return rms_norm(residual, weight, eps), residual


def fused_sum_and_norm(
    partial_sum: jax.Array, residual: jax.Array, weight: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """`sum_and_norm` in one kernel."""
    return jax_intranode.psum_residual_rms_norm(partial_sum, residual, weight, "model", eps=eps)


def no_sum_or_norm(
    partial_sum: jax.Array, residual: jax.Array, weight: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """What is left without communication: for the bound."""
    residual = residual + partial_sum
    return residual, residual


class Decoder(NamedTuple):
    """One way to decode."""

    sum_and_norm: Callable[..., tuple[jax.Array, jax.Array]]
    norm: Callable[[jax.Array, jax.Array, float], jax.Array]
    all_gather: Callable[..., jax.Array]
    unedited: bool = False


DECODERS = {
    LAX: Decoder(sum_and_norm, rms_norm, lax.all_gather),
    OURS: Decoder(fused_sum_and_norm, rms_norm, jax_intranode.all_gather),
    UNEDITED: Decoder(sum_and_norm, rms_norm, lax.all_gather, unedited=True),
    BOUND: Decoder(no_sum_or_norm, lambda x, weight, eps: x, lambda x, *_, **__: x[None]),
}


# The model. Activations are [batch, tokens, hidden]; a cache is [batch, tokens, heads, channels].


class Layer(NamedTuple):
    """The parameters of a layer, or one value for each of them."""

    norm_1: Any
    query: Any
    key: Any
    value: Any
    output: Any
    norm_2: Any
    gate: Any
    up: Any
    down: Any


class Params(NamedTuple):
    """All parameters."""

    embedding: Any
    layers: tuple[Layer, ...]
    norm: Any
    unembedding: Any


COLUMNS, ROWS = P(None, "model"), P("model", None)
LAYER_SPECS = Layer(P(), COLUMNS, COLUMNS, COLUMNS, ROWS, P(), COLUMNS, COLUMNS, ROWS)
# The names of the matrices in a Llama model's files, which hold them transposed.
NAMES = Layer(
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def param_specs(model: Model) -> Params:
    """Returns how the parameters are sharded."""
    return Params(P(), (LAYER_SPECS,) * model.num_hidden_layers, P(), COLUMNS)


def rotary(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding of [batch, tokens, heads, channels]."""
    channels = x.shape[-1]
    frequencies = theta ** (-2 * jnp.arange(channels // 2) / channels)
    angles = positions[:, None, None] * frequencies
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(
    model: Model, w: Layer, x: jax.Array, cache: tuple[jax.Array, jax.Array], start: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Attention of this rank's heads: (its part of the result, the cache with the new tokens)."""
    batch, tokens, _ = x.shape
    query, key, value = (
        (x @ matrix).reshape(batch, tokens, -1, model.channels)
        for matrix in (w.query, w.key, w.value)
    )
    positions = start + jnp.arange(tokens)
    query, key = (rotary(v, positions, model.rope_theta) for v in (query, key))
    keys, values = (
        lax.dynamic_update_slice_in_dim(old, new, start, axis=1)
        for old, new in zip(cache, (key, value), strict=True)
    )
    seen = jnp.arange(keys.shape[1]) <= positions[:, None]
    mixed = jax.nn.dot_product_attention(query, keys, values, mask=seen[None, None])
    return mixed.reshape(batch, tokens, -1) @ w.output, (keys, values)


def forward(
    model: Model, decoder: Decoder, params: Params, caches: Any, tokens: jax.Array, start: jax.Array
) -> tuple[jax.Array, Any]:
    """Returns the most likely next token of each sequence, and the caches."""
    eps = model.rms_norm_eps
    norms = [layer.norm_1 for layer in params.layers[1:]] + [params.norm]
    residual = params.embedding[tokens]
    x = decoder.norm(residual, params.layers[0].norm_1, eps)
    after = []
    for w, cache, next_norm in zip(params.layers, caches, norms, strict=True):
        mixed, cache = attention(model, w, x, cache, start)
        after.append(cache)
        x, residual = decoder.sum_and_norm(mixed, residual, w.norm_2, eps)
        inner = jax.nn.silu(x @ w.gate) * (x @ w.up)
        x, residual = decoder.sum_and_norm(inner @ w.down, residual, next_norm, eps)
    # Each rank has the logits of its part of the vocabulary. The best of each are gathered.
    logits = (x[:, -1] @ params.unembedding).astype(jnp.float32)
    first = lax.axis_index("model") * logits.shape[-1]
    best = jnp.stack([logits.max(-1), (first + logits.argmax(-1)).astype(jnp.float32)])
    best_of_ranks = decoder.all_gather(best, "model")
    rank = best_of_ranks[:, 0].argmax(0)
    token = jnp.take_along_axis(best_of_ranks[:, 1], rank[None], axis=0)[0]
    return token.astype(jnp.int32), tuple(after)


class State(NamedTuple):
    """What a step changes. It is donated, so that each step finds it at the same address."""

    caches: Any  # of each layer: (keys, values)
    tokens: Any  # [batch, length]
    position: Any  # number of tokens that the caches have


def state_specs(model: Model) -> State:
    """Returns how the state is sharded."""
    return State(((P(None, None, "model"),) * 2,) * model.num_hidden_layers, P(), P())


def initial_state(model: Model, mesh: Mesh, prompt: np.ndarray, length: int, dtype: str) -> State:
    """Returns the state before the prompt [batch, tokens] has been read."""
    batch, given = prompt.shape
    cache = (batch, length, model.num_key_value_heads, model.channels)

    def make() -> State:
        caches = tuple(
            (jnp.zeros(cache, dtype), jnp.zeros(cache, dtype))
            for _ in range(model.num_hidden_layers)
        )
        tokens = jnp.zeros((batch, length), jnp.int32).at[:, :given].set(prompt)
        return State(caches, tokens, jnp.int32(0))

    shardings = jax.tree.map(partial(NamedSharding, mesh), state_specs(model))
    return jax.jit(make, out_shardings=shardings)()


def make_step(model: Model, mesh: Mesh, decoder: Decoder, count: int) -> Any:
    """Returns a jitted function (params, state) to state: reads `count` tokens, finds one."""

    def step(params: Params, state: State) -> State:
        at = state.position
        tokens = lax.dynamic_slice_in_dim(state.tokens, at, count, axis=1)
        token, caches = forward(model, decoder, params, state.caches, tokens, at)
        found = lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], at + count, axis=1)
        return State(caches, found, at + count)

    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(param_specs(model), state_specs(model)),
        out_specs=state_specs(model),
        check_vma=False,  # all ranks choose the same token, which the types can't tell
    )
    return jax.jit(sharded, donate_argnums=1)


# Weights.


def random_params(model: Model, mesh: Mesh, dtype: str) -> Params:
    """Returns random parameters."""
    hidden, inner, heads = model.hidden_size, model.intermediate_size, model.num_key_value_heads
    wide, narrow = (hidden, hidden), (hidden, heads * model.channels)
    layer = Layer(
        (hidden,), wide, narrow, narrow, wide, (hidden,), (hidden, inner), (hidden, inner),
        (inner, hidden),
    )  # fmt: skip
    shapes = Params(
        (model.vocab_size, hidden),
        (layer,) * model.num_hidden_layers,
        (hidden,),
        (hidden, model.vocab_size),
    )

    def make(name: int, shape: tuple[int, ...], spec: P) -> jax.Array:
        def values() -> jax.Array:
            if len(shape) == 1:
                return jnp.ones(shape, dtype)
            key = jax.random.fold_in(jax.random.key(0), name)
            return jax.random.normal(key, shape, dtype) * shape[0] ** -0.5

        return jax.jit(values, out_shardings=NamedSharding(mesh, spec))()

    def is_shape(node: Any) -> bool:
        return type(node) is tuple and isinstance(node[0], int)

    leaves, tree = jax.tree.flatten(shapes, is_leaf=is_shape)
    specs = jax.tree.leaves(param_specs(model), is_leaf=lambda node: isinstance(node, P))
    made = [make(k, *leaf) for k, leaf in enumerate(zip(leaves, specs, strict=True))]
    return jax.tree.unflatten(tree, made)


def read_model(folder: Path) -> Model:
    """Returns the shape of the model in a folder."""
    found = json.loads((folder / "config.json").read_text())
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise SystemExit(
            f"{folder / 'config.json'}: this example has no rope_type {rope['rope_type']}"
        )
    found |= {name: value for name, value in rope.items() if name == "rope_theta"}
    return Model(**{name: found[name] for name in Model.__dataclass_fields__ if name in found})


def read_params(folder: Path, model: Model, mesh: Mesh, dtype: str) -> Params:
    """Returns the parameters in a folder's safetensors files, which have a Llama model's names."""
    from safetensors import safe_open

    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        opened = safe_open(path, framework="flax")
        files |= {name: opened for name in opened.keys()}  # noqa: SIM118

    def read(name: str, spec: P) -> jax.Array:
        if name not in files:
            raise SystemExit(f"{folder} has no {name}")
        array = files[name].get_tensor(name).astype(dtype)
        turned = array.T if array.ndim == 2 and "embed_tokens" not in name else array
        return jax.device_put(turned, NamedSharding(mesh, spec))

    def layer(i: int) -> Layer:
        return jax.tree.map(
            lambda name, spec: read(f"model.layers.{i}.{name}.weight", spec), NAMES, LAYER_SPECS
        )

    layers = tuple(layer(i) for i in range(model.num_hidden_layers))
    embedding = read("model.embed_tokens.weight", P())
    if "lm_head.weight" in files:
        unembedding = read("lm_head.weight", COLUMNS)
    else:  # they share one matrix
        unembedding = jax.device_put(embedding.T, NamedSharding(mesh, COLUMNS))
    return Params(embedding, layers, read("model.norm.weight", P()), unembedding)


# Decoding.


class Loop:
    """A decoder at work."""

    def __init__(
        self, model: Model, mesh: Mesh, name: str, params: Params, state: State, given: int
    ):
        self.name, self.params, self.state = name, params, state
        self.seconds: list[float] = []
        decoder = DECODERS[name]
        unedited = jax_intranode.accelerate() if decoder.unedited else contextlib.nullcontext()
        with unedited:
            self.prefill, self.step = (
                make_step(model, mesh, decoder, count).lower(params, state).compile()
                for count in (given, 1)
            )

    def start(self, steps: int) -> None:
        """Reads the prompt. XLA runs a program before it captures it, so some steps follow."""
        self.state = self.prefill(self.params, self.state)
        self.run(steps)

    def run(self, steps: int) -> float:
        """Finds a token for each sequence, `steps` times; returns the seconds that it took."""
        jax.block_until_ready(self.state)
        start = time.perf_counter()
        for _ in range(steps):
            self.state = self.step(self.params, self.state)
        jax.block_until_ready(self.state)
        return time.perf_counter() - start

    def tokens(self) -> np.ndarray:
        """The tokens [batch, length], those of the prompt included."""
        return np.asarray(self.state.tokens.addressable_data(0))


def decode(loops: list[Loop], rounds: int, steps: int) -> dict[str, int]:
    """Lets the decoders take turns; returns how often XLA called handlers meanwhile, by decoder."""
    for loop in loops:
        loop.start(steps)
    calls = dict.fromkeys((loop.name for loop in loops), 0)
    for k in range(rounds):
        # Alternate the order: a GPU's clocks depend on what ran before.
        for loop in loops if k % 2 == 0 else reversed(loops):
            before = jax_intranode.stats().handler_calls
            loop.seconds.append(loop.run(steps))
            calls[loop.name] += jax_intranode.stats().handler_calls - before
    return calls


# The command.


def say(*text: Any) -> None:
    """Prints, from one of the processes."""
    if jax.process_index() == 0:
        print(*text, flush=True)


def report(loops: list[Loop], calls: dict[str, int], options: argparse.Namespace) -> dict[str, Any]:
    """Prints tokens per second and whether the tokens agree; returns them for a file."""
    steps = options.rounds * options.steps
    speed = {
        loop.name: options.batch * options.steps / statistics.median(loop.seconds) for loop in loops
    }
    say(f"{'':<18}{'tokens/s':>12}{'ms a step':>12}{'/ jax.lax':>12}{'handler calls':>16}")
    for name, tokens in speed.items():
        milliseconds = f"{1e3 * options.batch / tokens:.3f}"
        ratio = f"{tokens / speed[LAX]:.2f}"
        say(f"{name:<18}{tokens:>12.0f}{milliseconds:>12}{ratio:>12}{calls[name]:>16}")
    say(f"handler calls: of XLA to jax_intranode during {steps} steps")
    tokens = {loop.name: loop.tokens() for loop in loops}
    same = {name: int((tokens[name] == tokens[LAX]).all(-1).sum()) for name in (OURS, UNEDITED)}
    for name, count in same.items():
        say(f"{name}: {count} of {options.batch} sequences have the same tokens as with {LAX}")
    return {
        "tokens_per_second": speed,
        "handler_calls": calls,
        "same_sequences": same,
        "tokens": tokens[LAX].tolist(),
    }


def read_prompt(options: argparse.Namespace, model: Model) -> np.ndarray:
    """Returns the tokens of the prompt, [batch, tokens]."""
    if options.prompt is None:
        shape = (options.batch, options.prompt_tokens)
        return np.random.default_rng(0).integers(model.vocab_size, size=shape, dtype=np.int32)
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(options.weights / "tokenizer.json")).encode(options.prompt).ids
    return np.tile(np.array(ids, np.int32), (options.batch, 1))


def say_text(options: argparse.Namespace, tokens: np.ndarray) -> None:
    """Prints the first sequence in words."""
    from tokenizers import Tokenizer

    say(Tokenizer.from_file(str(options.weights / "tokenizer.json")).decode(tokens[0].tolist()))


def positive(text: str) -> int:
    """Parses a positive number."""
    if int(text) <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


def parse_options() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Returns the parser and the options."""
    parser = argparse.ArgumentParser(
        description="Decodes with a tensor-parallel model, with jax_intranode and with jax.lax."
    )
    add = parser.add_argument
    add("--size", choices=SIZES, help="shape of the model (default: 8B on GPUs, tiny on CPUs)")
    add("--layers", type=positive, metavar="N", help="fewer or more layers than the size has")
    add("--weights", type=Path, metavar="FOLDER", help="a Llama model: config.json, *.safetensors")
    add("--prompt", metavar="TEXT", help="needs --weights with a tokenizer.json")
    add("--prompt-tokens", type=positive, default=16, metavar="N", help="of a random prompt")
    add("--batch", type=positive, default=1, metavar="N", help="number of sequences (default 1)")
    add("--rounds", type=positive, default=8, metavar="N", help="timed rounds (default 8)")
    add("--steps", type=positive, default=16, metavar="N", help="steps a round (default 16)")
    add("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16; float32 on CPUs")
    add("--devices", type=positive, metavar="N", help="default: all GPUs, or 4 CPU devices")
    add("--json", type=Path, metavar="FILE", help="write settings and speed")
    add(
        "--distributed",
        action="store_true",
        help="one process per GPU under Slurm or Open MPI: calls jax.distributed.initialize()",
    )
    return parser, parser.parse_args()


def choose(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[Model, Mesh, str]:
    """Returns the model, the mesh and the dtype; ends the program if they do not fit each other."""
    devices = jax.devices()
    if jax.default_backend() == "cpu" or len(devices) < 2:
        devices = jax.devices("cpu")
    size = options.devices or max(n for n in (1, 2, 4, 8) if n <= len(devices))
    if size > len(devices):
        parser.error(f"--devices is {size}; there are {len(devices)}")
    on_cpu = devices[0].platform == "cpu"
    if options.prompt is not None and options.weights is None:
        parser.error("--prompt needs --weights, for the tokenizer")
    if options.weights is not None:
        model = read_model(options.weights)
    else:
        model = SIZES[options.size or ("tiny" if on_cpu else "8B")]
    if options.layers is not None:
        model = replace(model, num_hidden_layers=options.layers)
    for name in ("num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(model, name) % size != 0:
            parser.error(f"{name} is {getattr(model, name)}; {size} devices can't share it equally")
    mesh = jax.make_mesh((size,), ("model",), axis_types=(AxisType.Auto,), devices=devices[:size])
    return model, mesh, options.dtype or ("float32" if on_cpu else "bfloat16")


def main() -> None:
    """Decodes in all ways and prints tokens per second."""
    parser, options = parse_options()
    if options.distributed:
        jax.distributed.initialize()
    else:
        # Has no effect on GPUs. Must come before JAX's first use.
        jax.config.update("jax_num_cpu_devices", options.devices or 4)
    model, mesh, dtype = choose(parser, options)
    device = mesh.devices.flat[0].device_kind
    say(f"jax {jax.__version__}, {mesh.size} x {device}, {dtype}, batch {options.batch}\n{model}\n")

    prompt = read_prompt(options, model)
    if options.weights is not None:
        params = read_params(options.weights, model, mesh, dtype)
    else:
        params = random_params(model, mesh, dtype)
    given = prompt.shape[1]
    length = given + 1 + (options.rounds + 1) * options.steps
    loops = []
    for name in DECODERS:
        start = time.perf_counter()
        state = initial_state(model, mesh, prompt, length, dtype)
        loops.append(Loop(model, mesh, name, params, state, given))
        say(f"compiled {name} in {time.perf_counter() - start:.1f} s")
    say()
    result = report(loops, decode(loops, options.rounds, options.steps), options)
    if options.prompt is not None:
        say_text(options, loops[0].tokens())
    if options.json is not None and jax.process_index() == 0:
        settings = {"batch": options.batch, "dtype": dtype, "prompt_tokens": given}
        found = {
            "example": "decode",
            "jax": jax.__version__,
            "device": device,
            "devices": mesh.size,
            "processes": jax.process_count(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "settings": settings | asdict(model),
        }
        options.json.write_text(json.dumps(found | result, indent=1) + "\n")
        say(f"wrote {options.json}")


if __name__ == "__main__":
    main()
