"""Compares auto-sharded programs without and with install(auto=True), collective by collective.

    python tools/auto_corpus.py                       # the programs, on 8 CPU devices
    python tools/auto_corpus.py --einsums 1000        # and random einsums
    python tools/auto_corpus.py --made 100            # and programs made of random parts
    python tools/auto_corpus.py --topology 8          # compiled for 8 GPUs; needs none
    python tools/auto_corpus.py --only dense --table  # those whose name has this; rows for a page

Each program is compiled in four ways:

- as JAX lowers it;
- with the rewriting on, but nothing that may be replaced: the text must be the same;
- after propagation alone: the same collectives, with the same groups and shapes;
- rewritten: what XLA still does must be among what it did. Shardings of results, aliases and
  layouts must be the same, and the results, on CPU devices.

Collectives are counted by arrays, because XLA combines them. Prints a line per program and exits
with 1 if one differs. For GPUs our calls are compiled as calls that do nothing, as no GPU is there.
XLA compiles for GPUs where jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-nvvm and nvidia-cuda-nvcc are
installed, in the versions that fit jaxlib.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import logging
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.mlir import ir
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.jax_private import hlo
from jax_intranode._src.rewrite.auto import modules, rewriting
from jax_intranode._src.selection import table

sys.path.insert(0, str(Path(__file__).resolve().parent))
import compare_lowered

# A function and its arguments, and how many of them are donated.
Built = tuple[Callable[..., Any], tuple[Any, ...], int]

WIDTH, HEADS, LAYERS, ROWS = 32, 8, 2, 16
# Triton's kernels take most of the time of a compilation, and only collectives are looked at.
WITHOUT_KERNELS = {"xla_gpu_enable_triton_gemm": False}
# What XLA knows of an H100 when it compiles (GpuTargetConfigProto).
H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  threads_per_warp: 32
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_memory_size: 84942979072
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
}
"""
RUNS = True  # False: programs are compiled only, and their arguments have no values


@dataclasses.dataclass(frozen=True)
class Sharded:
    """An argument: a value, and how it is sharded."""

    value: Any
    spec: tuple[Any, ...]


jax.tree_util.register_dataclass(Sharded, ["value"], ["spec"])


def normal(seed: int, shape: tuple[int, ...], *spec: Any) -> Sharded:
    """An argument of random numbers."""
    if not RUNS:
        return Sharded(jax.ShapeDtypeStruct(shape, np.float32), spec)
    return Sharded(np.random.default_rng(seed).standard_normal(shape, np.float32) / 4, spec)


def is_explicit(mesh: Mesh) -> bool:
    """Whether the axes of a mesh are Explicit. Then its programs need no `auto=True`."""
    return AxisType.Explicit in mesh.axis_types


def constrained(mesh: Mesh, x: Any, *spec: Any) -> Any:
    """x, sharded like this."""
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


# The programs, each over a mesh with the axes "data" and "model".

FULL: tuple[Any, ...] = ()
TENSOR: dict[str, Any] = {"qkv": (None, None, "model"), "out": ("model",)}
TENSOR |= {"up": (None, "model"), "down": ("model",)}
FSDP: dict[str, Any] = dict.fromkeys(TENSOR, ("data",)) | {"qkv": (None, "data")}
BOTH = {"qkv": (None, "data", "model"), "out": ("model", "data")}
BOTH |= {"up": ("data", "model"), "down": ("model", "data")}
REPLICATED = dict.fromkeys(TENSOR, FULL)
SEQUENCE = ("data", "model")
OVER_ALL = dict.fromkeys(TENSOR, (SEQUENCE,)) | {"qkv": (None, SEQUENCE)}


def weights(specs: dict[str, Any], layers: int = LAYERS) -> list[dict[str, Sharded]]:
    """The weights of layers."""
    shapes = {"qkv": (3, WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return [
        {n: normal(7 * i + j, shapes[n], *specs[n]) for j, n in enumerate(shapes)}
        for i in range(layers)
    ]


def norm(x: Any) -> Any:
    """RMSNorm."""
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def attention(w: Any, x: Any) -> Any:
    """Causal self-attention. x is [batch, sequence, width]."""
    qkv = jnp.einsum("bsd,cde->cbse", norm(x), w["qkv"]).reshape(3, *x.shape[:2], HEADS, -1)
    mixed = jax.nn.dot_product_attention(*qkv, is_causal=True)
    return mixed.reshape(x.shape) @ w["out"]


def layer(w: Any, x: Any, within: Callable[[Any], Any] = lambda x: x) -> Any:
    """Attention and an MLP. `within` shards what is between layers."""
    x = within(x + attention(w, x))
    return within(x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"])


def transformer(
    specs: dict[str, Any], of_x: Any, between: Any = None, layers: int = LAYERS
) -> Callable[[Mesh], Built]:
    """A step of gradient descent."""

    def build(mesh: Mesh) -> Built:
        within = (lambda x: constrained(mesh, x, *between)) if between else lambda x: x

        def loss(p: Any, x: Any) -> Any:
            for w in p:
                x = layer(w, x, within)
            return (x**2).mean()

        def step(p: Any, x: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(p, x)
            return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradients), value

        return step, (weights(specs, layers), normal(99, (ROWS, 8, WIDTH), *of_x)), 1

    return build


def forward(specs: dict[str, Any], of_x: Any) -> Callable[[Mesh], Built]:
    """Layers without gradients."""

    def build(mesh: Mesh) -> Built:
        def f(p: Any, x: Any) -> Any:
            return functools.reduce(lambda x, w: layer(w, x), p, x)

        return f, (weights(specs), normal(99, (ROWS, 8, WIDTH), *of_x)), 0

    return build


def scanned(mesh: Mesh) -> Built:
    """Layers in a scan, computed again in the backward pass."""
    layers = weights(BOTH, 3)

    def loss(p: Any, x: Any) -> Any:
        one = jax.checkpoint(lambda x, w: (layer(w, x), None))
        return (lax.scan(one, x, p)[0] ** 2).mean()

    p = {
        n: normal(i, (3, *w.value.shape), None, *w.spec)
        for i, (n, w) in enumerate(layers[0].items())
    }
    return jax.value_and_grad(loss), (p, normal(99, (ROWS, 8, WIDTH), "data")), 0


def second_derivative(mesh: Mesh) -> Built:
    """The gradient of the norm of a gradient."""

    def loss(w: Any, x: Any) -> Any:
        return (jnp.tanh(x @ w["up"]) @ w["down"]).sum()

    def of_gradient(w: Any, x: Any) -> Any:
        return sum((g**2).sum() for g in jax.tree.leaves(jax.grad(loss)(w, x)))

    (w,) = weights(TENSOR, 1)
    x = normal(99, (ROWS, WIDTH), "data")
    return jax.grad(of_gradient), ({n: w[n] for n in ("up", "down")}, x), 0


def control_flow(mesh: Mesh) -> Built:
    """A loop, a branch and a map over matmuls."""

    def f(w: Any, x: Any) -> Any:
        def once(x: Any) -> Any:
            return jnp.tanh(x @ w["up"]) @ w["down"]

        x = lax.while_loop(lambda s: s[1] < 3, lambda s: (norm(once(s[0])), s[1] + 1), (x, 0))[0]
        x = lax.cond(x.sum() > 0, once, lambda x: x * 2, x)
        return jax.vmap(once, in_axes=1, out_axes=1)(x.reshape(4, -1, WIDTH))

    (w,) = weights(TENSOR, 1)
    return f, (w, normal(99, (ROWS, WIDTH), "data")), 0


def experts(mesh: Mesh) -> Built:
    """A shard_map over "data" alone, whose matmuls XLA partitions over "model"."""
    count = mesh.shape["data"]

    def body(w: Any, x: Any) -> Any:
        return lax.psum(jax.nn.gelu(x @ w["up"][0]) @ w["down"][0], "data")

    f = jax.shard_map(
        body, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), axis_names={"data"}
    )
    w = {"up": normal(0, (count, WIDTH, 4 * WIDTH), "data", None, "model")}
    w["down"] = normal(1, (count, 4 * WIDTH, WIDTH), "data", "model")
    gradient = jax.value_and_grad(lambda w, x: (f(w, x) ** 2).mean())
    return gradient, (w, normal(2, (ROWS, WIDTH))), 0


def of_kernels(tree: Any, model: str = "model") -> Any:
    """Shards the matrices of a library's model: wide ones by columns, tall ones by rows."""

    def one(x: Any) -> Any:
        if not hasattr(x, "ndim") or not jnp.issubdtype(x.dtype, jnp.floating):
            return Sharded(np.asarray(x), ())
        tall = x.ndim > 1 and x.shape[0] > x.shape[-1]
        spec = (
            ()
            if x.ndim < 2 or x.size < 64
            else (model,)
            if tall
            else (*(None,) * (x.ndim - 1), model)
        )
        if spec and x.shape[spec.index(model)] % 8:
            spec = ()
        return Sharded(np.asarray(x), spec)

    return jax.tree.map(one, tree)


def nnx_model(make: Callable[[Any, Any], Any], shape: tuple[int, ...]) -> Callable[[Mesh], Built]:
    """A step of Adam on a model of flax NNX."""

    def build(mesh: Mesh) -> Built:
        import optax
        from flax import nnx

        graph, state = nnx.split(make(nnx, nnx.Rngs(0)))
        state = nnx.to_pure_dict(state)
        # Adam divides by the size of a gradient, and that of keys' biases is rounding alone.
        optimizer = optax.adamw(1e-2, eps=1e-4)

        def loss(state: Any, x: Any) -> Any:
            return (nnx.merge(graph, state)(x) ** 2).mean()

        def step(state: Any, moments: Any, x: Any) -> Any:
            value, gradients = jax.value_and_grad(loss, allow_int=True)(state, x)
            updates, moments = optimizer.update(gradients, moments, state)
            return optax.apply_updates(state, updates), moments, value

        moments = optimizer.init(state)
        return step, (of_kernels(state), of_kernels(moments), normal(9, shape, "data")), 2

    return build


def nnx_mlp(nnx: Any, rngs: Any) -> Any:
    return nnx.Sequential(
        nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs),
        nnx.gelu,
        nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs),
        nnx.LayerNorm(WIDTH, rngs=rngs),
    )


def nnx_transformer(nnx: Any, rngs: Any) -> Any:
    class Block(nnx.Module):
        def __init__(self) -> None:
            self.first = nnx.RMSNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                HEADS, WIDTH, decode=False, deterministic=True, rngs=rngs
            )
            self.mlp = nnx_mlp(nnx, rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.first(x))
            return x + self.mlp(x)

    return Block()


def equinox_mlp(mesh: Mesh) -> Built:
    """A step of SGD with momentum on an MLP of equinox, mapped over a batch."""
    import equinox
    import optax

    model = equinox.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 2, key=jax.random.key(0))
    arrays, static = equinox.partition(model, equinox.is_array)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def loss(arrays: Any, x: Any) -> Any:
        return (jax.vmap(equinox.combine(arrays, static))(x) ** 2).mean()

    def step(arrays: Any, moments: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(arrays, x)
        updates, moments = optimizer.update(gradients, moments)
        return optax.apply_updates(arrays, updates), moments, value

    moments = optimizer.init(arrays)
    x = normal(9, (ROWS, WIDTH), "data")
    return step, (of_kernels(arrays), of_kernels(moments), x), 2


PROGRAMS: dict[str, Callable[[Mesh], Built]] = {
    "dense, tensor parallel, forward": forward(TENSOR, ("data",)),
    "dense, tensor parallel": transformer(TENSOR, FULL),
    "dense, tensor and data parallel": transformer(TENSOR, ("data",)),
    "dense, sequence parallel": transformer(TENSOR, SEQUENCE, SEQUENCE),
    "dense, FSDP": transformer(FSDP, ("data",)),
    "dense, FSDP over all devices": transformer(OVER_ALL, (SEQUENCE,)),
    "dense, FSDP in groups": transformer(FSDP, (SEQUENCE,)),
    "dense, data parallel": transformer(REPLICATED, ("data",)),
    "dense, FSDP and tensor parallel": transformer(BOTH, ("data",)),
    "dense, FSDP and sequence parallel": transformer(BOTH, SEQUENCE, SEQUENCE),
    "dense, scan and remat": scanned,
    "second derivative": second_derivative,
    "while, cond and vmap": control_flow,
    "experts, partly manual": experts,
    "flax NNX MLP, adamw": nnx_model(nnx_mlp, (ROWS, WIDTH)),
    "flax NNX transformer, adamw": nnx_model(nnx_transformer, (ROWS, 8, WIDTH)),
    "equinox MLP, sgd": equinox_mlp,
}


def random_spec(random: Any, names: tuple[str, ...], rank: int) -> tuple[Any, ...]:
    """Places each axis somewhere, or nowhere."""
    entries: list[Any] = [None] * rank
    for axis in names:
        if rank and random.random() < 0.7:
            place = random.integers(rank)
            entries[place] = axis if entries[place] is None else (entries[place], axis)
    return tuple(entries)


def random_einsum(seed: int) -> Callable[[Mesh], Built]:
    """An einsum of two arrays, whose operands and result have random shardings.

    Over Explicit axes JAX refuses some, in whose place another one is made.
    """

    def build(mesh: Mesh) -> Built:
        random = np.random.default_rng(seed)
        explicit = is_explicit(mesh)
        while True:
            letters = "abcde"[: random.integers(3, 6)]
            terms = [
                "".join(random.permutation(list(letters))[: random.integers(2, 4)]) for _ in "xw"
            ]
            known = sorted(set("".join(terms)))
            result = "".join(letter for letter in known if random.random() < 0.6)
            shape = {letter: 8 * int(random.integers(1, 3)) for letter in known}
            x, w = (
                normal(
                    seed,
                    tuple(shape[c] for c in term),
                    *random_spec(random, mesh.axis_names, len(term)),
                )
                for term in terms
            )
            out = random_spec(random, mesh.axis_names, len(result))

            def f(x: Any, w: Any, terms: Any = terms, result: Any = result, out: Any = out) -> Any:
                subscripts = f"{','.join(terms)}->{result}"
                if explicit:
                    return jnp.einsum(subscripts, x, w, out_sharding=P(*out))
                return constrained(mesh, jnp.einsum(subscripts, x, w), *out)

            if explicit:
                try:
                    with jax.set_mesh(mesh):
                        jax.eval_shape(f, *placed((x, w), mesh, runs=False))
                except (TypeError, ValueError, NotImplementedError):
                    continue
            return f, (x, w), 0

    return build


def made_program(seed: int) -> Callable[[Mesh], Built]:
    """A program of random parts, and perhaps its gradient, or the gradient of that."""

    def build(mesh: Mesh) -> Built:
        random = np.random.default_rng(seed)
        parts = ["dot", "mlp", "norm", "scan", "cond", "remat", "while", "vmap", "constraint"]
        parts += ["jit", "mean"]
        chosen = [str(random.choice(parts)) for _ in range(random.integers(2, 6))]
        specs = [random_spec(random, mesh.axis_names, 2) for _ in range(3 * len(chosen) + 1)]

        def mlp(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w["up"]) @ w["down"] + x

        def f(p: Any, x: Any) -> Any:
            for i, (part, w) in enumerate(zip(chosen, p, strict=True)):
                one = functools.partial(mlp, w=w)
                if part == "dot":
                    x = x @ w["square"]
                elif part == "norm":
                    x = norm(x)
                elif part == "scan":
                    x = lax.scan(lambda x, _, one=one: (one(x), None), x, None, length=2)[0]
                elif part == "cond":
                    x = lax.cond(x.sum() > 0, one, lambda x: x - 1, x)
                elif part == "remat":
                    x = jax.checkpoint(one)(x)
                elif part == "while":
                    x = lax.fori_loop(0, 2, lambda _, x, one=one: norm(one(x)), x)
                elif part == "vmap":
                    rows = x.reshape(2, -1, WIDTH)
                    x = jax.vmap(one)(rows).reshape(x.shape)
                elif part == "constraint":
                    x = constrained(mesh, x, *specs[i])
                elif part == "mean":
                    x = x - x.mean(0)
                else:
                    x = jax.jit(one)(x) if part == "jit" else one(x)
            return x

        def of(i: int, *shape: int) -> Sharded:
            return normal(seed + i, shape, *specs[i])

        p = [
            {
                "up": of(3 * i, WIDTH, 2 * WIDTH),
                "down": of(3 * i + 1, 2 * WIDTH, WIDTH),
                "square": of(3 * i + 2, WIDTH, WIDTH),
            }
            for i in range(len(chosen))
        ]
        x = of(3 * len(chosen), ROWS, WIDTH)
        how = random.integers(4)
        if how == 0:
            return f, (p, x), 0

        def loss(p: Any, x: Any) -> Any:
            return (f(p, x) ** 2).mean()

        if how == 1:
            return jax.value_and_grad(loss), (p, x), 0
        if how == 2 or "while" in chosen:

            def step(p: Any, x: Any) -> Any:
                return jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.jacrev(loss)(p, x))

            return step, (p, x), 1
        return jax.grad(lambda p, x: (jax.grad(loss, 1)(p, x) ** 2).sum()), (p, x), 0

    return build


# How they are compared.


@contextlib.contextmanager
def all_sizes() -> Iterator[None]:
    """Lets the table's rows hold for all sizes."""
    of_table = table.rows_and_source

    def rows_and_source(
        hardware: str, mode: str, operation: str, packets: str, world_size: int, tuned: Any
    ) -> tuple[tuple[table.Row, ...] | None, str]:
        where = hardware, mode, operation, packets, world_size
        shipped = table.rows(*where) or of_table(*where, tuned)[0]
        rows = shipped and (dataclasses.replace(shipped[-1], nbytes=1 << 30, measured=True),)
        return rows, "(any size)"

    with mock.patch.object(table, "rows_and_source", rows_and_source):
        yield


class Warned(logging.Handler):
    """Keeps what the package warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Different(Exception):
    """A program differs in a way in which it must not."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a comparison found.

    Attributes:
        before: the kinds of XLA's collectives, counted by arrays.
        after: those that are left.
        ours: operations of this package.
        exact: whether all results were equal to the bit; None if nothing ran.
        seconds: how long JAX lowered it without and with the rewriting.
        compile_seconds: how long XLA compiled it.
        beside: the work beside XLA's collectives (`work_beside`).
    """

    before: Counter[str]
    after: Counter[str]
    ours: Counter[str]
    exact: bool | None
    seconds: tuple[float, float]
    compile_seconds: tuple[float, float]
    beside: tuple[int, int]


@contextlib.contextmanager
def propagated_alone() -> Iterator[None]:
    """XLA gets the propagated program, and nothing is replaced."""
    with mock.patch.object(rewriting, "propagated_only", True):
        yield


def accelerated(mesh: Mesh) -> Any:
    """The context in which programs over a mesh are rewritten."""
    return jax_intranode.accelerate(auto=not is_explicit(mesh))


class Compiled:
    """A program, lowered and compiled."""

    def __init__(self, build: Callable[[Mesh], Built], mesh: Mesh, arguments: Any, on: bool):
        # A new function each time, of which JAX has cached nothing.
        f, _, donated = build(mesh)
        context = accelerated(mesh) if on else contextlib.nullcontext()
        with context:
            start = time.perf_counter()
            self.lowered = jitted(f, donated).lower(*arguments)
            self.lowering = time.perf_counter() - start
            start = time.perf_counter()
            self.program = self.lowered.compile(None if RUNS else WITHOUT_KERNELS)
            self.compiling = time.perf_counter() - start
        self.text = self.program.as_text() or ""
        leaves = hlo.leaves_of(self.text, mesh_size(arguments))
        if leaves is None:
            raise Different("a collective is not understood")
        # On GPUs XLA orders and splits dimensions as its layouts need, which it chooses later.
        if mesh.devices.flat[0].platform == "gpu":
            leaves = [dataclasses.replace(leaf, shape=(math.prod(leaf.shape),)) for leaf in leaves]
        self.leaves = Counter(leaves)

    def aliases(self) -> list[str]:
        """Which results take the place of which arguments."""
        return re.findall(r"input_output_alias=.*?\) }", self.text)

    def formats(self) -> Any:
        """Shardings and layouts of the results."""
        return jax.tree.leaves(self.program.output_formats)


def jitted(f: Callable[..., Any], donated: int) -> Any:
    return jax.jit(f, donate_argnums=tuple(range(donated)), keep_unused=True)


def mesh_size(arguments: Any) -> int:
    return int(jax.tree.leaves(arguments)[0].sharding.mesh.size)


def placed(arguments: Any, mesh: Mesh, runs: bool) -> Any:
    """Arguments as arrays on a mesh; as their types, if they do not run."""

    def one(x: Sharded) -> Any:
        sharding = NamedSharding(mesh, P(*x.spec))
        if runs:
            return jax.device_put(x.value, sharding)
        return jax.ShapeDtypeStruct(x.value.shape, x.value.dtype, sharding=sharding)

    return jax.tree.map(one, arguments, is_leaf=lambda x: isinstance(x, Sharded))


def compare(build: Callable[[Mesh], Built], mesh: Mesh, runs: bool) -> Outcome:
    """Compiles a program in all ways.

    Raises:
        Different: it differs.
    """
    with jax.set_mesh(mesh) if is_explicit(mesh) else contextlib.nullcontext():
        return _compare(build, mesh, runs)


def _compare(build: Callable[[Mesh], Built], mesh: Mesh, runs: bool) -> Outcome:
    built = build(mesh)
    warned = Warned()
    logging.getLogger("jax_intranode").handlers = [warned]

    arguments = placed(built[1], mesh, runs)
    plain = Compiled(build, mesh, arguments, on=False)
    with mock.patch.object(rewriting._Rewriting, "_accepted", lambda self, members: []):
        with accelerated(mesh):
            unchanged = jitted(*build(mesh)[::2]).lower(*arguments)
        if unchanged.as_text() != plain.lowered.as_text():
            raise Different("the text changes although nothing is replaced")
    with propagated_alone():
        alone = Compiled(build, mesh, arguments, on=True)
    if alone.leaves != plain.leaves:
        raise Different(f"propagated alone: {difference(plain.leaves, alone.leaves)}")
    ours = Compiled(build, mesh, arguments, on=True)
    if more := added(plain.leaves, ours.leaves):
        raise Different(f"rewritten: more {shown(more)}; before {shown(plain.leaves)}")
    for compiled in (alone, ours):
        for found, wanted in zip(compiled.formats(), plain.formats(), strict=True):
            rank = len(wanted.layout.major_to_minor) if wanted.layout else 0
            if (
                not found.sharding.is_equivalent_to(wanted.sharding, rank)
                or found.layout != wanted.layout
            ):
                raise Different(f"a result is {found}, and not {wanted}")
    if warned.texts:
        raise Different(warned.texts[0])
    if ours.aliases() != plain.aliases():
        raise Different("other aliases")
    exact = None
    if runs:
        copies = jax.tree.map(jnp.copy, arguments)
        wanted, found = plain.program(*arguments), ours.program(*copies)
        pairs = list(zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True))
        exact = all(np.array_equal(w, v, equal_nan=True) for w, v in pairs)
        for w, v in pairs:
            # The sums of values of about 1 that are 0 but for rounding, such as the gradients of
            # the biases of attention's keys, differ by 1e-7.
            size = max(float(np.abs(w).max(initial=0)), 1e-2)
            if not np.allclose(w, v, rtol=1e-3, atol=1e-4 * size, equal_nan=True):
                raise Different(f"results differ by {np.abs(w - v).max()} of {size}")
    calls = Counter(re.findall(r"@jax_intranode_(?:stub_)?(\w+)\(", ours.lowered.as_text()))
    kinds = [Counter(leaf.kind for leaf in c.leaves.elements()) for c in (plain, ours)]
    return Outcome(
        *kinds,
        calls,
        exact,
        (plain.lowering, ours.lowering),
        (plain.compiling, ours.compiling),
        (work_beside(plain.text), work_beside(ours.text)),
    )


def work_beside(text: str) -> int:
    """How many matmuls and fusions stand between the start and the end of XLA's collectives."""
    started: dict[str, int] = {}
    count = found = 0
    for line in text.splitlines():
        if match := re.match(r"\s*%?(\S+) = .*? [\w-]+-start\(", line):
            started[match[1]] = count
        elif match := re.match(r"\s*%?\S+ = .*? [\w-]+-done\(%?([^),]+)", line):
            found += count - started.pop(match[1], count)
        elif " fusion(" in line or "custom_call_target=" in line or " dot(" in line:
            count += 1
    return found


def added(before: Counter[Any], after: Counter[Any]) -> Counter[Any]:
    """The collectives that are new.

    XLA sums several arrays as one, flattened. So all-reduces of one dimension are not new where
    others, with as many elements together, are gone.
    """
    more = after - before
    gone = Counter[Any]()
    for leaf, count in (before - after).items():
        gone[leaf.kind, leaf.groups, leaf.dtype] += count * math.prod(leaf.shape)
    for leaf, count in [*more.items()]:
        if leaf.kind == "all-reduce" and len(leaf.shape) == 1:
            gone[leaf.kind, leaf.groups, leaf.dtype] -= count * leaf.shape[0]
            if gone[leaf.kind, leaf.groups, leaf.dtype] >= 0:
                del more[leaf]
    return more


def difference(before: Counter[Any], after: Counter[Any]) -> str:
    return f"more {shown(after - before)}, less {shown(before - after)}"


def shown(leaves: Counter[Any]) -> str:
    found = Counter(f"{leaf.kind} {leaf.dtype}{list(leaf.shape)}" for leaf in leaves.elements())
    return ", ".join(f"{count} {what}" for what, count in found.items()) or "none"


# Programs for GPUs, compiled where there is one: our calls are renamed to a handler without effect.


class _Extension(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p)]
    _fields_ += [("metadata", ctypes.c_void_p)]


class _CallFrame(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("extension", ctypes.POINTER(_Extension))]


class _Metadata(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("version_size", ctypes.c_size_t)]
    _fields_ += [("extension", ctypes.c_void_p), ("major", ctypes.c_int), ("minor", ctypes.c_int)]


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
def _no_effect(frame: Any) -> None:
    """An FFI handler that says its version when XLA asks, and does nothing else."""
    extension = frame.contents.extension
    if extension and extension.contents.type == 1:  # XLA_FFI_Extension_Metadata
        metadata = ctypes.cast(extension.contents.metadata, ctypes.POINTER(_Metadata)).contents
        metadata.major, metadata.minor = 0, 1


STUB = "jax_intranode_stub_"


@contextlib.contextmanager
def stubs(platform: str) -> Iterator[None]:
    """Our calls in rewritten programs become calls of `_no_effect`."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    capsule = new(ctypes.cast(_no_effect, ctypes.c_void_p), b"xla._CUSTOM_CALL_TARGET", None)
    registered: set[str] = set()
    finish = rewriting._Rewriting._finish

    def renamed(self: Any) -> str | None:
        reason = finish(self)
        if reason is not None:
            return reason
        for operation in modules.walk(self._outcome.module.operation):
            if operation.name == "stablehlo.custom_call":
                target = ir.StringAttr(operation.attributes["call_target_name"]).value
                if target.startswith("jax_intranode_"):
                    new_name = STUB + target.removeprefix("jax_intranode_")
                    operation.attributes["call_target_name"] = ir.StringAttr.get(new_name)
                    if new_name not in registered:
                        jax.ffi.register_ffi_target(new_name, capsule, platform=platform)
                        registered.add(new_name)
        return None

    with mock.patch.object(rewriting._Rewriting, "_finish", renamed):
        yield


def devices_of(arguments: argparse.Namespace) -> list[Any]:
    """The devices that programs are compiled for."""
    if not arguments.topology:
        return jax.devices()
    from jax.experimental import topologies

    topology = f"1x1x{arguments.topology}"
    return list(
        topologies.get_topology_desc(
            "h100", platform="cuda", topology=topology, target_config=H100
        ).devices
    )


def meshes_of(devices: list[Any], kind: AxisType = AxisType.Auto) -> list[Mesh]:
    """The meshes of random programs."""
    count = len(devices)
    shapes = [(count,), *((2, count // 2), (count // 2, 2) if count > 4 else (2, count // 2))]
    shapes = [shape for shape in shapes if 0 not in shape]
    return [
        Mesh(
            np.array(devices, dtype=object).reshape(shape),
            ("model", "other")[: len(shape)][::-1] if len(shape) == 1 else ("data", "model"),
            axis_types=(kind,) * len(shape),
        )
        for shape in dict.fromkeys(shapes)
    ]


def all_programs(
    arguments: argparse.Namespace, devices: list[Any]
) -> Iterator[tuple[str, Any, Mesh]]:
    """The programs that were asked for, each with its mesh."""
    count = len(devices)
    shape = (2, count // 2) if count > 2 else (1, 2)
    axes = ("data", "model"), (AxisType.Auto,) * 2
    mesh = Mesh(np.array(devices, dtype=object).reshape(shape), axes[0], axis_types=axes[1])
    swapped = Mesh(
        np.array(devices, dtype=object).reshape(shape[::-1]), axes[0], axis_types=axes[1]
    )
    for name, build in PROGRAMS.items():
        only_data = any(word in name for word in ("FSDP", "data parallel")) and count == 2
        yield name, build, swapped if only_data else mesh
    meshes = meshes_of(devices)
    for seed in range(arguments.made):
        yield f"made {seed}", made_program(seed), meshes[seed % len(meshes)]
    for seed in range(arguments.einsums):
        yield f"einsum {seed}", random_einsum(seed), meshes[seed % len(meshes)]
    meshes = meshes_of(devices, AxisType.Explicit)
    for seed in range(arguments.einsums):
        yield f"explicit einsum {seed}", random_einsum(seed), meshes[seed % len(meshes)]


def row(name: str, found: Outcome) -> str:
    """A row of the table in docs/unedited.md."""

    def kinds(counts: Counter[str]) -> str:
        return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "none"

    return f"| {name} | {kinds(found.before)} | {kinds(found.after)} | {kinds(found.ours)} |"


def main() -> int:
    """Compares all programs."""
    global RUNS, WIDTH, ROWS
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--einsums", type=int, default=0, help="how many random einsums")
    parser.add_argument("--made", type=int, default=0, help="how many programs of random parts")
    parser.add_argument("--topology", type=int, help="compile for this many GPUs, and run nothing")
    parser.add_argument("--width", type=int, default=WIDTH, help="features of the dense programs")
    parser.add_argument("--rows", type=int, default=ROWS, help="their batch")
    parser.add_argument("--only", default="", help="programs whose name has this")
    parser.add_argument("--table", action="store_true", help="print rows of a table")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    devices = devices_of(arguments)
    RUNS, WIDTH, ROWS = not arguments.topology, arguments.width, arguments.rows
    failed, total, exact = [], 0, 0
    before, after = Counter[str](), Counter[str]()
    with contextlib.ExitStack() as stack:
        if arguments.topology:
            stack.enter_context(compare_lowered.without_rendezvous())
            stack.enter_context(stubs("CUDA"))
        else:
            stack.enter_context(all_sizes())
        for name, build, mesh in all_programs(arguments, devices):
            if arguments.only not in name:
                continue
            total += 1
            try:
                found = compare(build, mesh, RUNS)
            except Exception as error:
                failed.append(name)
                what = "" if isinstance(error, Different) else f"{type(error).__name__}: "
                print(f"FAILED {name} on {dict(mesh.shape)}: {what}{error}"[:2000], flush=True)
                continue
            before.update(found.before)
            after.update(found.after)
            exact += found.exact is True
            if arguments.table:
                print(row(name, found), flush=True)
            elif "einsum" not in name:
                print(
                    f"{name}: {dict(found.before)} -> {dict(found.after)}, "
                    f"ours {dict(found.ours)}, exact {found.exact}, "
                    f"lowered in {found.seconds[0]:.2f} -> {found.seconds[1]:.2f} s, "
                    f"compiled in {found.compile_seconds[0]:.2f} -> "
                    f"{found.compile_seconds[1]:.2f} s, operations beside XLA's collectives "
                    f"{found.beside[0]} -> {found.beside[1]}",
                    flush=True,
                )
    print(f"{total - len(failed)} of {total} programs are as they must be", end="")
    print(f", {exact} equal to the bit" if RUNS else "", end="")
    print(f"; XLA's collectives: {dict(before)} before, {dict(after)} after")
    return 1 if failed or not total else 0


if __name__ == "__main__":
    sys.exit(main())
