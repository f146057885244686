"""Programs that are timed as a whole with our collectives and with lax's: decoding and training.

A builder takes a library (`jax_intranode` or `jax.lax`) and a mesh of 1, 2, 4 or 8 devices with one
axis "x". It returns a jitted function, which can be called and lowered, and its arguments. The
function's result has the structure, shapes, dtypes and shardings of the arguments, so that calls
can be chained: ``args = f(*args)``. Values stay finite in long chains. Arguments depend on the mesh
only, and each process makes the shards of its own devices.

`train_step` and `train_step_sequence_parallel` are small transformers with psum, or psum_scatter
and all_gather, between plain matmuls, and a data-parallel pmean of a tree of gradients.
`transformer` is the same step with collective matmuls, in a size at which these overlap.

Programs whose name begins with `auto_` call no library: XLA's partitioner adds their collectives.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bench_programs.without import without_communication as local

Program = tuple[Callable[..., Any], tuple[Any, ...]]


# Used by all programs.


def _sizes(mesh: Mesh, of_platform: dict[str, Any]) -> Any:
    """Returns the sizes for the mesh's platform.

    Raises:
        ValueError: the sizes can't be divided among the devices of this mesh.
    """
    if mesh.axis_names != ("x",) or mesh.size not in (1, 2, 4, 8):
        raise ValueError(
            f"these programs need a mesh of 1, 2, 4 or 8 devices with the axis 'x', not {mesh}"
        )
    return of_platform[mesh.devices.flat[0].platform]


def _random(
    mesh: Mesh,
    spec: P,
    shape: Sequence[int],
    seed: int,
    scale: float = 1,
    dtype: Any = jnp.bfloat16,
    copies: int = 0,
) -> jax.Array:
    """Returns an array of random numbers, whose standard deviation is `scale`.

    Large shards repeat a million of them.

    Args:
        copies: the array is a stack of so many arrays with the same numbers.
    """
    stack = (copies,) if copies else ()

    def shard(index: Any) -> Any:
        parts = [range(*part.indices(size)) for part, size in zip(index, whole, strict=True)]
        # Devices with the same part get the same numbers.
        generator = np.random.default_rng([seed, *(part.start for part in parts[len(stack) :])])
        own = [len(part) for part in parts]
        numbers = generator.standard_normal(min(math.prod(own), 1_000_003), np.float32)
        one = np.resize((scale * numbers).astype(dtype), own[len(stack) :])
        return np.broadcast_to(one, own)

    whole = (*stack, *shape)
    return jax.make_array_from_callback(whole, NamedSharding(mesh, spec), shard)


def _rms_norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def _sum_and_norm(lib: Any) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """A psum, a residual add and a norm: `lib.psum_residual_rms_norm` if `lib` has it."""
    if hasattr(lib, "psum_residual_rms_norm"):
        return lambda *arrays: lib.psum_residual_rms_norm(*arrays, "x", eps=1e-6)

    def composed(x: Any, residual: Any, weight: Any) -> Any:
        residual = residual + lib.psum(x, "x")
        return _rms_norm(residual) * weight, residual

    return composed


def _collective_matmuls(
    lib: Any, axis: str, dimension: int, overlapped: bool = True
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """An all-gather before matmuls with several matrices, and a reduce-scatter after a matmul.

    Uses `lib.all_gather_matmul` and `lib.matmul_reduce_scatter` if `lib` has them, otherwise
    `all_gather` and `psum_scatter` around matmuls.
    """
    if overlapped and hasattr(lib, "all_gather_matmul"):
        return (
            partial(lib.all_gather_matmul, axis_name=axis, gather_axis=dimension),
            partial(lib.matmul_reduce_scatter, axis_name=axis, scatter_dimension=dimension),
        )

    def enter(x: Any, ws: Any) -> Any:
        whole = lib.all_gather(x, axis, axis=dimension, tiled=True)
        return [whole @ w for w in ws]

    def leave(x: Any, w: Any) -> Any:
        return lib.psum_scatter(x @ w, axis, scatter_dimension=dimension, tiled=True)

    return enter, leave


@dataclass(frozen=True)
class ReturningWeights:
    """A jitted function that also returns its weights. jit alone would copy them."""

    jitted: Any

    def __call__(self, x: Any, *weights: Any) -> tuple[Any, ...]:
        return self.jitted(x, *weights), *weights

    def lower(self, *arguments: Any) -> Any:
        return self.jitted.lower(*arguments)


def _returning_shardings(step: Any, arguments: tuple[Any, ...]) -> Program:
    """A step whose results have the shardings of its arguments.

    jit may return an equivalent but different sharding, and then compile the next call again.
    """
    shardings = jax.tree.map(lambda argument: argument.sharding, arguments)
    return jax.jit(step, out_shardings=shardings), arguments


# Norms: psum, residual add and RMSNorm in a row, with nothing between.

_NORM_LAYERS = 32
# The rows of each program, and on GPUs the elements of a row.
_NORMS = {1: 8192, 6: 6144, 16: 8192, 64: 8192, 1024: 8192, 4096: 8192}


def _norms(lib: Any, mesh: Mesh, rows: int) -> Program:
    """The normalized rows are what the next layer sums, in bfloat16.

    Arguments: the rows of the first layer, the residual, and the weight.
    """
    hidden = _sizes(mesh, {"gpu": _NORMS[rows], "cpu": 64})
    norm = _sum_and_norm(lib)

    def body(x: Any, first: Any, weight: Any) -> Any:
        residual = first
        for _ in range(_NORM_LAYERS):
            x, residual = norm(x, residual, weight)
        return x, first, weight

    x, first = (_random(mesh, P(), (rows, hidden), seed) for seed in range(2))
    ones = jax.device_put(np.ones(hidden, jnp.bfloat16), NamedSharding(mesh, P()))
    specs = (P(),) * 3
    sharded = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    return jax.jit(sharded), (x, first, ones)


# Decoding: many small psums in a row, between matmuls that read the weights.


@dataclass(frozen=True)
class _DecodeSizes:
    batch: int
    hidden: int
    layers: int
    tokens: int


_DECODE = {
    "gpu": _DecodeSizes(batch=8, hidden=4096, layers=16, tokens=4),
    # A psum of 2 KB, which our kernels run on CPUs, too.
    "cpu": _DecodeSizes(batch=8, hidden=128, layers=4, tokens=2),
}


def _scanned(step: Callable[[Any, Any], Any], x: Any, items: Any) -> Any:
    return lax.scan(lambda carry, item: (step(carry, item), None), x, items)[0]


def _unrolled(step: Callable[[Any, Any], Any], x: Any, items: Any) -> Any:
    for item in items:
        x = step(x, item)
    return x


def _decode(lib: Any, mesh: Mesh, loop: Callable[..., Any]) -> Program:
    """Decodes some tokens through layers that are tensor-parallel MLPs.

    Arguments: the activations [batch, hidden], the layers' weights (stacked for a scan), and the
    output's weights, all in bfloat16. The psums are `lib`'s. The all_gather at the end of each
    token is always lax's, because our operations must work next to XLA's own collectives.
    """
    sizes = _sizes(mesh, _DECODE)
    hidden, count = sizes.hidden, sizes.layers

    def body(x: Any, layers: Any, output: Any) -> Any:
        def layer(x: Any, weights: Any) -> Any:
            columns, rows = weights
            return _rms_norm(x + lib.psum(jax.nn.gelu(x @ columns) @ rows, "x"))

        def token(x: Any, _: Any) -> Any:
            x = loop(layer, x, layers)
            return _rms_norm(lax.all_gather(x @ output, "x", axis=1, tiled=True))

        return loop(token, x, np.arange(sizes.tokens))

    def weights(*stacked: None) -> tuple[jax.Array, jax.Array]:
        """Those of a layer, or of all; the second matrix is small: a layer adds little."""
        columns, rows, copies = P(*stacked, None, "x"), P(*stacked, "x"), count * len(stacked)
        return (
            _random(mesh, columns, (hidden, 4 * hidden), 0, hidden**-0.5, copies=copies),
            _random(mesh, rows, (4 * hidden, hidden), 1, hidden**-0.5 / 4, copies=copies),
        )

    # All layers have the same numbers, in memory of their own.
    layers = weights(None) if loop is _scanned else [weights() for _ in range(count)]
    specs = jax.tree.map(lambda w: w.sharding.spec, layers)
    sharded = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P(), specs, P(None, "x")),
        out_specs=P(),
        check_vma=False,  # lax.all_gather returns a value that varies over "x"
    )
    x = _random(mesh, P(), (sizes.batch, hidden), 2)
    output = _random(mesh, P(None, "x"), (hidden, hidden), 3, hidden**-0.5)
    return ReturningWeights(jax.jit(sharded)), (x, layers, output)


# Decoding with layers of Llama's shape: attention over a cache, and a gated MLP.


@dataclass(frozen=True)
class _Llama:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int = 8
    length: int = 1024
    vocabulary: int = 128_256


_LLAMAS = {
    "8b": _Llama(hidden=4096, inner=14336, heads=32, kv_heads=8),
    "70b": _Llama(hidden=8192, inner=28672, heads=64, kv_heads=8),
}
_TINY_LLAMA = _Llama(hidden=64, inner=96, heads=8, kv_heads=8, layers=2, length=16, vocabulary=64)


def _few_rows(lib: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(w's columns divided, w's rows divided and the products summed) over "x", if `lib` has it."""
    if hasattr(lib, "matmul_all_reduce"):
        return (
            partial(lib.column_parallel_matmul, axis_name="x"),
            partial(lib.matmul_all_reduce, axis_name="x"),
        )
    return jnp.matmul, lambda x, w: lib.psum(x @ w, "x")


def _decode_llama(lib: Any, mesh: Mesh, model: str, batch: int, matmuls: str = "") -> Program:
    """A token through layers with unrolled calls, each a sum, a residual add and a norm, twice.

    With `matmuls` the library multiplies, too, and XLA computes the norms: "_sums" are the matmuls
    that end in a sum, "_matmuls" all. The caches are full, and
    are read only. At the end the ranks gather the best logits of their parts of the vocabulary, of
    which a little goes into the next call.

    Arguments: the activations [batch, hidden], for each layer its weights and its cache, and the
    weights of the logits, all in bfloat16.
    """
    sizes = _sizes(mesh, {"gpu": _LLAMAS[model], "cpu": _TINY_LLAMA})
    hidden, inner, channels = sizes.hidden, sizes.inner, sizes.hidden // sizes.heads
    columns, rows = P(None, "x"), P("x")
    cache = (batch, sizes.length, sizes.kv_heads, channels), P(None, None, "x")
    shapes = {
        **{"query": ((hidden, hidden), columns), "output": ((hidden, hidden), rows)},
        **{name: ((hidden, inner), columns) for name in ("gate", "up")},
        **{"down": ((inner, hidden), rows), "keys": cache, "values": cache},
    }
    norm, multiply = _sum_and_norm(lib), jnp.matmul
    if matmuls:
        of_columns, multiply_and_sum = _few_rows(lib)
        multiply = of_columns if matmuls == "_matmuls" else multiply

    def leave(x: Any, w: Any, residual: Any) -> tuple[Any, Any]:
        ones = jnp.ones(hidden, jnp.bfloat16)
        if not matmuls:
            return norm(x @ w, residual, ones)
        residual = residual + multiply_and_sum(x, w)
        return _rms_norm(residual) * ones, residual

    def body(first: Any, layers: Any, unembedding: Any) -> Any:
        x, residual = first, first
        for w in layers:
            query = multiply(x, w["query"]).reshape(batch, 1, -1, channels)
            mixed = jax.nn.dot_product_attention(query, w["keys"], w["values"])
            x, residual = leave(mixed.reshape(batch, -1), w["output"], residual)
            raised = jax.nn.silu(multiply(x, w["gate"])) * multiply(x, w["up"])
            x, residual = leave(raised, w["down"], residual)
        best = lib.all_gather(multiply(x, unembedding).max(-1), "x").max(0)
        return _rms_norm(x + 1e-3 * best[:, None])

    def random(seed: int, shape: Sequence[int], spec: P) -> jax.Array:
        return _random(mesh, spec, shape, seed, shape[0] ** -0.5 if len(shape) == 2 else 1)

    layers = [
        {name: random(len(shapes) * i + k, *shapes[name]) for k, name in enumerate(shapes)}
        for i in range(sizes.layers)
    ]
    unembedding = random(len(shapes) * sizes.layers, (hidden, sizes.vocabulary), columns)
    specs = [{name: spec for name, (_, spec) in shapes.items()}] * sizes.layers
    sharded = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), specs, columns), out_specs=P(), check_vma=False
    )
    x = _random(mesh, P(), (batch, hidden), 0)
    return ReturningWeights(jax.jit(sharded)), (x, layers, unembedding)


# Training: psums of activations, forward and backward, and a pmean of all gradients.


@dataclass(frozen=True)
class _Transformer:
    """Sizes of a transformer and its batch: `batch` sequences for each data-parallel replica."""

    batch: int
    sequence: int
    width: int
    heads: int
    inner: int
    layers: int
    vocabulary: int
    attention: Literal["xla", "cudnn"] = "xla"


_TRAIN = {
    # Activations have 4 MB and gradients 8 MB (5 MB on 8 devices), which our kernels accept.
    "gpu": _Transformer(
        batch=8, sequence=1024, width=256, heads=8, inner=1024, layers=4, vocabulary=1024
    ),
    # Activations have 1 KB, and many gradients at most 4 KB.
    "cpu": _Transformer(batch=2, sequence=8, width=32, heads=4, inner=64, layers=2, vocabulary=32),
}
_LARGE_TRAIN = {
    "gpu": _Transformer(1, 4096, 4096, 32, 16384, 4, vocabulary=256, attention="cudnn"),
    "cpu": _TRAIN["cpu"],
}
_LEARNING_RATE = 0.05


@dataclass(frozen=True)
class _Parameter:
    shape: tuple[int, ...]
    spec: P = P()  # noqa: RUF009


def _parameters(sizes: _Transformer) -> Any:
    """Returns the tree of the parameters, with the shape and the spec of each."""
    width, inner = sizes.width, sizes.inner
    of_heads = _Parameter((width, width), P(None, "tensor"))
    layer = {
        "norm_1": _Parameter((width,)),
        **dict.fromkeys(("query", "key", "value"), of_heads),
        "output": _Parameter((width, width), P("tensor")),
        "norm_2": _Parameter((width,)),
        "columns": _Parameter((width, inner), P(None, "tensor")),
        "columns_bias": _Parameter((inner,), P("tensor")),
        "rows": _Parameter((inner, width), P("tensor")),
        "rows_bias": _Parameter((width,)),
    }
    return {
        "embedding": _Parameter((sizes.vocabulary, width)),
        "layers": [layer] * sizes.layers,
        "norm": _Parameter((width,)),
        "logits": _Parameter((width, sizes.vocabulary)),
    }


def _varying(tree: Any, axis: str) -> Any:
    return jax.tree.map(lambda v: lax.pcast(v, axis, to="varying"), tree)


def _varying_summed_by(lib: Any, axis: str) -> Callable[[Any], Any]:
    """Returns a function that marks a tree as varying over an axis.

    Its backward pass sums the cotangent over the axis by `lib.psum` (Megatron's f). Without it JAX
    would insert a psum of its own.
    """

    @jax.custom_vjp
    def mark(tree: Any) -> Any:
        return _varying(tree, axis)

    mark.defvjp(lambda tree: (mark(tree), None), lambda _, ct: (lib.psum(ct, axis),))
    return mark


def _forward(
    sizes: _Transformer, params: Any, tokens: jax.Array, enter: Any, leave: Any
) -> jax.Array:
    """Returns the logits.

    Args:
        enter: products of an array with matrices that are split by columns over "tensor".
        leave: the product with a matrix that is split by rows.
    """
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    x = params["embedding"][tokens]
    for layer in params["layers"]:
        h = _rms_norm(x) * (1 + layer["norm_1"])
        qkv = enter(h, [layer[name] for name in ("query", "key", "value")])
        by_head = [v.reshape(*v.shape[:2], -1, sizes.width // sizes.heads) for v in qkv]
        # Causal attention of this rank's heads over the whole sequence.
        mixed = jax.nn.dot_product_attention(
            *by_head, is_causal=True, implementation=sizes.attention
        )
        x = x + leave(mixed.reshape(qkv[0].shape), layer["output"])
        (h,) = enter(_rms_norm(x) * (1 + layer["norm_2"]), [layer["columns"]])
        h = jax.nn.gelu(h + layer["columns_bias"])
        x = x + leave(h, layer["rows"]) + layer["rows_bias"]
    return (_rms_norm(x) * (1 + params["norm"])) @ params["logits"]


def _log_likelihoods(sizes: _Transformer, params: Any, tokens: jax.Array, *ways: Any) -> jax.Array:
    """Returns that of each token; what follows the tokens is as for `_forward`."""
    logits = _forward(sizes, params, tokens, *ways).astype(jnp.float32)
    wanted = (tokens + 1) % sizes.vocabulary
    return jnp.take_along_axis(jax.nn.log_softmax(logits), wanted[..., None], axis=-1)


def _training_arguments(
    mesh: Mesh, sizes: _Transformer, specs: Any, sequences: int, tokens_spec: P
) -> tuple[Any, ...]:
    """Returns the parameters with these specs, the tokens, and a loss."""
    parameters, tree = jax.tree.flatten(_parameters(sizes))
    # Biases begin at 0, and so do norms, whose scale is 1 + the parameter.
    params = [
        _random(mesh, spec, p.shape, k, sizes.width**-0.5 * (len(p.shape) > 1), jnp.float32)
        for k, (p, spec) in enumerate(zip(parameters, tree.flatten_up_to(specs), strict=True))
    ]
    shape = (sequences, sizes.sequence)
    tokens = np.random.default_rng(0).integers(sizes.vocabulary, size=shape, dtype=np.int32)
    by_batch = NamedSharding(mesh, tokens_spec)
    return (
        jax.tree.unflatten(tree, params),
        jax.make_array_from_callback(shape, by_batch, lambda index: tokens[index]),
        _random(mesh, P(), (), 0, 0, jnp.float32),
    )


def _train_step(
    lib: Any,
    mesh: Mesh,
    kind: str,
    of_platform: dict[str, _Transformer] = _TRAIN,
    replicas: int | None = None,
) -> Program:
    """One step of gradient descent of a data- and tensor-parallel transformer.

    `kind` says how activations are reduced over "tensor": "sums" by `lib.psum`; "sequence", with
    sequence parallelism, by `lib.psum_scatter` and `lib.all_gather`; "overlapped" by
    `lib.matmul_reduce_scatter` and `lib.all_gather_matmul` if `lib` has them. Gradients are
    averaged over "data" by `lib.pmean`: there are two replicas, or one on fewer than 4 devices.
    Parameters are float32, the computation is bfloat16.

    Arguments: the parameters, the tokens [sequences, sequence] (int32), and a loss (float32), which
    is not read. The result has the loss of the step's batch before the step.
    """
    sizes = _sizes(mesh, of_platform)
    sequence_parallel = kind != "sums"
    data = replicas or (2 if mesh.size >= 4 else 1)
    mesh = Mesh(mesh.devices.reshape(data, -1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    parameters, tree = jax.tree.flatten(_parameters(sizes))
    specs = jax.tree.unflatten(tree, [p.spec for p in parameters])
    tokens_spec = P("data", "tensor") if sequence_parallel else P("data")
    sum_backward = _varying_summed_by(lib, "tensor")

    def enter_whole(x: Any, ws: Any) -> Any:
        whole = sum_backward(x)
        return [whole @ w for w in ws]

    if sequence_parallel:
        enter, leave = _collective_matmuls(lib, "tensor", 1, overlapped=kind == "overlapped")
    else:
        enter, leave = enter_whole, lambda x, w: lib.psum(x @ w, "tensor")

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        if sequence_parallel:
            # A replicated parameter acts on the rank's own part of the sequence only, so its
            # gradient is a sum over the ranks.
            leaves = jax.tree.leaves(params)
            whole = [i for i, p in enumerate(parameters) if p.spec == P()]
            for i, leaf in zip(whole, sum_backward([leaves[i] for i in whole]), strict=True):
                leaves[i] = leaf
            params = jax.tree.unflatten(tree, leaves)
        chosen = _log_likelihoods(sizes, params, tokens, enter, leave)
        return -chosen.sum() / (sizes.batch * sizes.sequence)

    def body(params: Any, tokens: jax.Array) -> Any:
        # Parameters that are marked as varying get this replica's own gradients. JAX sums none.
        loss, grads = jax.value_and_grad(loss_of)(_varying(params, "data"), tokens)
        if sequence_parallel:
            loss = lib.psum(loss, "tensor")
        loss, grads = lib.pmean((loss, grads), "data")
        return jax.tree.map(lambda p, g: p - _LEARNING_RATE * g, params, grads), loss

    sharded = jax.shard_map(
        body, mesh=mesh, in_specs=(specs, tokens_spec), out_specs=(specs, P()), check_vma=True
    )

    def step(params: Any, tokens: jax.Array, loss: jax.Array) -> Any:
        del loss
        params, loss = sharded(params, tokens)
        return params, tokens, loss

    arguments = _training_arguments(mesh, sizes, specs, data * sizes.batch, tokens_spec)
    return _returning_shardings(step, arguments)


# Training a single MLP: matmuls and collectives of large activations.

# Sequence, width and inner width. On CPUs a rank has at most 1 KB of activations, which our kernels
# accept.
_MLP = {"gpu": (8192, 8192, 28672), "cpu": (32, 32, 64)}


def _mlp_block(lib: Any, mesh: Mesh) -> Program:
    """One step of gradient descent of a tensor- and sequence-parallel gated MLP, in bfloat16.

    The loss is half the mean square norm of the output's rows. It is not computed, only its
    gradient.

    Arguments: the activations [sequence, width], from which the step makes those of the next layer,
    and the weights gate and up [width, inner] and down [inner, width].
    """
    sequence, width, inner = _sizes(mesh, _MLP)
    enter, leave = _collective_matmuls(lib, "x", 0)

    def block(x: Any, gate: Any, up: Any, down: Any) -> Any:
        gated, raised = enter(x, [gate, up])
        return leave(jax.nn.silu(gated) * raised, down)

    def step(x: Any, *weights: Any) -> Any:
        y, backward = jax.vjp(block, x, *weights)
        dx, *grads = backward(y / sequence)
        x = _rms_norm(x + y - sequence * dx)
        return x, *(w - _LEARNING_RATE * grad for w, grad in zip(weights, grads, strict=True))

    columns, rows = P(None, "x"), P("x")
    specs = rows, columns, columns, rows
    # Scales such that activations and products have variance 1.
    arguments = (
        _random(mesh, rows, (sequence, width), 0),
        _random(mesh, columns, (width, inner), 1, width**-0.5),
        _random(mesh, columns, (width, inner), 2, width**-0.5),
        _random(mesh, rows, (inner, width), 3, inner**-0.5),
    )
    sharded = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=True)
    return _returning_shardings(sharded, arguments)


# Auto-sharded programs: plain jit, shardings of arguments, and sharding constraints.


def _auto_train_step(lib: Any, mesh: Mesh, kind: str) -> Program:
    """One step of gradient descent of the transformer in the size of `transformer`.

    `kind`: "tensor" and "sequence" split the matrices as `_train_step` does, and "sequence" also
    the activations between them; "data" splits the sequences, and "fsdp" the parameters, too.
    Attention is that of `transformer`, too: on GPUs XLA's takes most of a step.
    """
    del lib
    sizes = _sizes(mesh, _LARGE_TRAIN)
    splits_matrices, n = kind in ("tensor", "sequence"), mesh.size
    axis = "tensor" if splits_matrices else "data"
    mesh = Mesh(mesh.devices, (axis,), axis_types=(AxisType.Auto,))
    batch = None if splits_matrices else "data"
    columns = axis if splits_matrices else None
    between = axis if kind == "sequence" else None

    def placed(x: Any, *spec: Any) -> Any:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def enter(x: Any, ws: Any) -> Any:
        x = placed(x, batch)
        return [placed(x @ w, batch, None, columns) for w in ws]

    def leave(x: Any, w: Any) -> Any:
        return placed(x @ w, batch, between)

    def step(params: Any, tokens: jax.Array, _: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return -_log_likelihoods(sizes, params, tokens, enter, leave).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - _LEARNING_RATE * g, params, grads), tokens, loss

    def spec_of(p: _Parameter) -> P:
        return p.spec if splits_matrices else P("data" if kind == "fsdp" else None)

    specs = jax.tree.map(spec_of, _parameters(sizes))
    sequences = sizes.batch if splits_matrices else n * sizes.batch
    return _returning_shardings(step, _training_arguments(mesh, sizes, specs, sequences, P(batch)))


def _auto_decode(lib: Any, mesh: Mesh) -> Program:
    """A token through the tensor-parallel MLPs of `decode_unrolled`."""
    del lib
    sizes = _sizes(mesh, _DECODE)
    hidden = sizes.hidden
    mesh = Mesh(mesh.devices, ("x",), axis_types=(AxisType.Auto,))
    columns, rows = P(None, "x"), P("x")

    def step(x: Any, *layers: Any) -> Any:
        for up, down in layers:
            whole = jax.nn.gelu(x @ up) @ down
            x = _rms_norm(x + lax.with_sharding_constraint(whole, NamedSharding(mesh, P())))
        return x

    x = _random(mesh, P(), (sizes.batch, hidden), 2)
    layers = [
        (
            _random(mesh, columns, (hidden, 4 * hidden), 2 * k, hidden**-0.5),
            _random(mesh, rows, (4 * hidden, hidden), 2 * k + 1, hidden**-0.5 / 4),
        )
        for k in range(sizes.layers)
    ]
    return ReturningWeights(jax.jit(step)), (x, *layers)


# Halo exchange: the step of examples/halo_exchange.py.

_HALO_STEPS = 10


def _halo(lib: Any, mesh: Mesh) -> Program:
    """Diffusion on a grid that is periodic in its rows. Four permutes a step send edges of blocks.

    Argument: the grid. The mesh's devices become two rows, if there are more than two.
    """
    block = _sizes(mesh, {"gpu": 2048, "cpu": 32})
    rows = 2 if mesh.size > 2 else 1
    columns = mesh.size // rows
    grid = Mesh(
        mesh.devices.reshape(rows, columns), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2
    )
    down = [(r, (r + 1) % rows) for r in range(rows)]
    right = [(r, r + 1) for r in range(columns - 1)]
    up, left = ([(to, of) for of, to in perm] for perm in (down, right))

    def step(_: Any, u: Any) -> Any:
        above = lib.ppermute(u[-1:], "rows", down)
        below = lib.ppermute(u[:1], "rows", up)
        before = lib.ppermute(u[:, -1:], "columns", right)
        after = lib.ppermute(u[:, :1], "columns", left)
        padded = jnp.concatenate([above, u, below], 0)
        wide = jnp.concatenate([before, u, after], 1)
        around = padded[:-2] + padded[2:] + wide[:, :-2] + wide[:, 2:]
        return u + 0.2 * (around - 4 * u)

    def steps(u: Any) -> tuple[Any]:
        return (lax.fori_loop(0, _HALO_STEPS, step, u),)

    spec = P("rows", "columns")
    u = _random(grid, spec, (block * rows, block * columns), 0, dtype=jnp.float32)
    f = jax.shard_map(steps, mesh=grid, in_specs=spec, out_specs=(spec,))
    return _returning_shardings(f, (u,))


_SWAPS = 100


def _swaps(lib: Any, mesh: Mesh, neighbours: int, nbytes: int) -> Program:
    """Nothing but permutes: each rank sends an array to the next one, or one to each neighbour."""
    n = mesh.size
    perms = [[(r, (r + step) % n) for r in range(n)] for step in (1, -1)][:neighbours]

    def step(_: Any, us: Any) -> Any:
        return tuple(lib.ppermute(u, "x", perm) for u, perm in zip(us, perms, strict=True))

    def steps(*us: Any) -> Any:
        return lax.fori_loop(0, _SWAPS, step, us)

    line, specs = Mesh(mesh.devices.reshape(-1), ("x",)), (P("x"),) * neighbours
    us = tuple(_random(line, P("x"), (n * nbytes // 2,), k) for k in range(neighbours))
    f = jax.shard_map(steps, mesh=line, in_specs=specs, out_specs=specs)
    return _returning_shardings(f, us)


# A layer of experts: the layers of examples/mixture_of_experts.py.


@dataclass(frozen=True)
class _ExpertsSizes:
    tokens: int  # of a rank
    hidden: int
    wide: int
    experts: int  # of a rank
    choices: int


_EXPERTS = {"gpu": _ExpertsSizes(2048, 2048, 1024, 16, 8), "cpu": _ExpertsSizes(16, 16, 32, 4, 2)}


def _places(ids: Any, experts: int, room: int) -> Any:
    """Where each choice of each token goes in what a device sends by `all_to_all`.

    Each rank and expert has the same room; what has none gets a place behind the last one.
    """
    chosen = jax.nn.one_hot(ids.reshape(-1), experts, dtype=jnp.int32)
    number = (jnp.cumsum(chosen, axis=0) * chosen).sum(1) - 1
    return jnp.where(number < room, ids.reshape(-1) * room + number, experts * room)


def _dense_dispatch(lib: Any, x: Any, place: Any, experts: int, room: int) -> Any:
    """Sends tokens by `all_to_all`, and returns the rows of each expert of this rank."""
    n, choices = lax.axis_size("x"), len(place) // len(x)
    sent = jnp.zeros_like(x, shape=(experts * room, x.shape[1]))
    sent = sent.at[place].set(jnp.repeat(x, choices, axis=0), mode="drop")
    received = lib.all_to_all(sent.reshape(n, -1, x.shape[1]), "x", 0, 0)
    of_expert = received.reshape(n, experts // n, room, -1).swapaxes(0, 1)
    return of_expert.reshape(experts // n, n * room, -1)


def _dense_combine(lib: Any, results: Any, place: Any, weights: Any) -> Any:
    n, width = lax.axis_size("x"), results.shape[-1]
    of_device = results.reshape(len(results), n, -1, width).swapaxes(0, 1)
    back = lib.all_to_all(of_device.reshape(n, -1, width), "x", 0, 0)
    rows = back.reshape(-1, width).at[place].get(mode="fill", fill_value=0)
    products = rows.reshape(*weights.shape, width).astype(jnp.float32) * weights[..., None]
    return products.sum(1).astype(results.dtype)


def _experts(lib: Any, mesh: Mesh) -> Program:
    """Tokens through the chosen experts, a residual add and a norm.

    A library without `moe_dispatch` sends room for twice the mean of the tokens of an expert, and
    for 16 of them at least.
    """
    sizes, n = _sizes(mesh, _EXPERTS), mesh.size
    experts, choices = n * sizes.experts, sizes.choices
    room = max(16, -(-2 * sizes.tokens * choices // experts))

    def step(x: Any, router: Any, up: Any, down: Any) -> Any:
        scores = jnp.dot(x, router, preferred_element_type=jnp.float32)
        weights, ids = lax.top_k(jax.nn.softmax(scores), choices)
        if hasattr(lib, "moe_dispatch"):
            rows, counts, state = lib.moe_dispatch(x, ids, weights, "x", num_experts=experts)
            # XLA's ragged_dot would multiply all rows by the weights of all experts.
            first, number = (jnp.cumsum(counts) - counts)[:, None], jnp.arange(n * room)
            place = jnp.where(number < counts[:, None], first + number, len(rows))
            of_expert = rows.at[place].get(mode="fill", fill_value=0, unique_indices=True)
            results = jax.nn.gelu(of_expert @ up) @ down
            results = jnp.zeros_like(rows).at[place].set(results, mode="drop", unique_indices=True)
            result = lib.moe_combine(results, state)
        else:
            place = _places(ids, experts, room)
            of_expert = _dense_dispatch(lib, x, place, experts, room)
            result = _dense_combine(lib, jax.nn.gelu(of_expert @ up) @ down, place, weights)
        return _rms_norm(x + result), router, up, down

    h = sizes.hidden
    arguments = (
        _random(mesh, P("x"), (n * sizes.tokens, h), 0),
        _random(mesh, P(), (h, experts), 1, h**-0.5),
        _random(mesh, P("x"), (experts, h, sizes.wide), 2, h**-0.5),
        _random(mesh, P("x"), (experts, sizes.wide, h), 3, sizes.wide**-0.5),
    )
    specs = tuple(argument.sharding.spec for argument in arguments)
    f = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs)
    return _returning_shardings(f, arguments)


# Exchanges of experts that do nothing: 8 of 64, rows of 7168.

_EXCHANGES = 20


def _exchanges(lib: Any, mesh: Mesh, tokens: int, back: bool) -> Program:
    """Tokens to the ranks of their experts, and `back`, again and again. The experts do nothing.

    Nothing is dropped: the room is that of the fullest rank, or with `all_to_all` of the fullest
    expert.
    """
    hidden = _sizes(mesh, {"gpu": 7168, "cpu": 16})
    tokens = _sizes(mesh, {"gpu": tokens, "cpu": 64})
    n, experts, choices = mesh.size, 64, 8
    scores = np.random.default_rng(0).random((n, tokens, experts))
    of_ranks = np.argsort(scores)[..., :choices].astype(np.int32)
    counts = np.array([np.bincount(of.reshape(-1), minlength=experts) for of in of_ranks])
    capacity = int(counts.sum(0).reshape(n, -1).sum(1).max())

    def exchange(x: Any, ids: Any, weights: Any) -> Any:
        # The ids are computed, as by a router, so that each exchange also sends and sorts them.
        ids = ids + (0 * x[0, 0]).astype(ids.dtype)
        if hasattr(lib, "moe_dispatch"):
            rows, _, state = lib.moe_dispatch(
                x, ids, weights, "x", num_experts=experts, capacity=capacity
            )
            return lib.moe_combine(rows, state) if back else rows
        # Or XLA computes the places again for each element of the rows.
        place = lax.optimization_barrier(_places(ids, experts, int(counts.max())))
        rows = _dense_dispatch(lib, x, place, experts, int(counts.max()))
        return _dense_combine(lib, rows, place, weights) if back else rows[0]

    def steps(x: Any, ids: Any, weights: Any) -> Any:
        for _ in range(_EXCHANGES):  # not a loop, of which XLA would make no CUDA graph
            # Each rank has tokens for each expert, so both libraries have the same first row.
            x = x.at[0, :8].set(exchange(x, ids, weights)[0, :8])
        return x, ids, weights

    def placed(of_all: Any) -> Any:
        sharding = NamedSharding(mesh, P("x"))
        return jax.make_array_from_callback(of_all.shape, sharding, lambda part: of_all[part])

    weights = np.full((n * tokens, choices), 1 / choices, np.float32)
    arguments = (
        _random(mesh, P("x"), (n * tokens, hidden), 0),
        placed(of_ranks.reshape(-1, choices)),
        placed(weights),
    )
    f = jax.shard_map(steps, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    return _returning_shardings(f, arguments)


PROGRAMS: dict[str, Callable[[Any, Mesh], Program]] = {
    "decode_scanned": partial(_decode, loop=_scanned),
    "decode_unrolled": partial(_decode, loop=_unrolled),
    **{
        f"decode_{model}_{batch}{of}": partial(_decode_llama, model=model, batch=batch, matmuls=of)
        for model in _LLAMAS
        for batch in (1, 16)
        for of in ("", "_sums", "_matmuls")
    },
    "train_step": partial(_train_step, kind="sums"),
    "train_step_sequence_parallel": partial(_train_step, kind="sequence"),
    "transformer": partial(_train_step, kind="overlapped", of_platform=_LARGE_TRAIN),
    "mlp_block": _mlp_block,
    "halo": _halo,
    "mixture_of_experts": _experts,
    **{
        f"{name}_{tokens}": partial(_exchanges, tokens=tokens, back=back)
        for name, back in (("dispatch", False), ("dispatch_and_combine", True))
        for tokens in (128, 4096)
    },
    **{
        f"swaps_{neighbours}_of_{kib}k": partial(_swaps, neighbours=neighbours, nbytes=kib << 10)
        for kib in (1, 64)
        for neighbours in (1, 2)
    },
    **{f"norms_{rows}": partial(_norms, rows=rows) for rows in _NORMS},
    "auto_decode": _auto_decode,
    **{
        f"auto_{kind}_parallel": partial(_auto_train_step, kind=kind)
        for kind in ("tensor", "sequence", "data")
    },
    "auto_fsdp": partial(_auto_train_step, kind="fsdp"),
}


def without_communication(name: str, mesh: Mesh) -> tuple[Program, int] | None:
    """A program of jax.lax without its collectives, or for an auto-sharded one a similar program.

    Returns:
        The program, and how many calls of the named program one call is worth. None if there is no
        such program.
    """
    build, calls = PROGRAMS[name], 1
    if name in ("auto_tensor_parallel", "auto_sequence_parallel"):
        build = partial(PROGRAMS["transformer"], replicas=1)
    elif name == "auto_decode":
        build, calls = PROGRAMS["decode_unrolled"], _sizes(mesh, _DECODE).tokens
    elif name.startswith("auto_"):
        return None
    step, arguments = build(lax, mesh)
    # A program's results have the shardings of its arguments.
    shardings = jax.tree.map(lambda argument: argument.sharding, arguments)
    if isinstance(step, ReturningWeights):
        step = replace(step, jitted=local(step.jitted, arguments, shardings[0]))
    else:
        step = local(step, arguments, shardings)
    return (step, arguments), calls
