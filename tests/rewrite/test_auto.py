"""Plain jit programs over Auto axes, to which XLA's partitioner adds collectives."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from auto_programs import (
    N,
    check,
    check_left,
    collectives,
    compiled,
    constrained,
    normal,
    not_installed,
    of,
    of_xla,
    put,
    two_axes,
)
from jax import lax
from jax.extend.mlir import ir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import full

import jax_intranode
from jax_intranode._src import operations
from jax_intranode._src.health import call_sites
from jax_intranode._src.jax_private import hlo
from jax_intranode._src.ops import fallback
from jax_intranode._src.rewrite import sums, switch
from jax_intranode._src.rewrite.auto import (
    bodies,
    groups,
    modules,
    overlap,
    partitioner,
    rewriting,
    simplified,
)
from jax_intranode._src.rewrite.collectives import Body
from jax_intranode._src.selection import config, table

__all__ = ["not_installed"]

EVERY = "data", "model"
TENSOR_PARALLEL = (None, "model"), ("model", None)
WORDS = np.array([0, 63, 64, 99, -1, -64, -65, 31], np.int32)


def mlp(p: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def weights(up: Any, down: Any, **others: Any) -> Any:
    """Those of `mlp`, and others."""
    shapes = {"up": ((16, 32), up), "down": ((32, 16), down)} | others
    return {
        name: put(normal(i, *shape), *spec)
        for i, (name, (shape, spec)) in enumerate(shapes.items())
    }


def tensor_parallel() -> tuple[Any, jax.Array]:
    """Weights and operand of `mlp`, which needs a sum."""
    return weights(*TENSOR_PARALLEL), put(normal(2, 8, 16), "data")


def fully_sharded() -> tuple[Any, jax.Array]:
    """Those of an `mlp` that gathers its weights."""
    return weights(("model", None), ("model", None)), put(normal(2, 64, 16), EVERY)


# Programs, with their arguments, and what must become of XLA's collectives.


def two_sums(x: Any, w: Any) -> Any:
    return x @ w, jnp.sin(x) @ w


def sums_around_a_barrier(x: Any, w: Any) -> Any:
    return x @ w, jnp.sin(lax.optimization_barrier(x)) @ w


def gather_before_a_product(p: Any, x: Any, scale: Any) -> Any:
    """Propagation gives the product, which a constraint wants whole, the constraint's sharding."""
    whole = constrained(jnp.sin(x) * scale, "data", None, None)
    return x + constrained(mlp(p, whole), "data", "model", None)


def two_sums_in_a_branch(x: Any) -> Any:
    """Both share a shard_map. HLO has its results, and the operands of the branch, in tuples."""
    columns = x.sum(0)
    return lax.cond(
        columns[0] > -100, lambda: columns.sum() + x.sum(1).max(), lambda: columns.sum()
    )


def maxima_and_minima(x: Any) -> Any:
    """Those over one axis that are ready together are one operation."""
    return x.max(1), (x // 2).max(1), x.min((0, 1)), x.max(0)


def maximum_from_three(x: Any) -> Any:
    return lax.reduce(x, np.array(3, x.dtype), lax.max, (1,))


def over_data(ins: Any, outs: Any, vma: bool = True) -> Any:
    """Makes a body that of a shard_map that binds "data" and leaves "model" to XLA."""
    how = {"in_specs": ins, "out_specs": outs, "axis_names": {"data"}, "check_vma": vma}
    return lambda body: lambda *args: jax.shard_map(body, mesh=two_axes(), **how)(*args)


DATA, WHOLE = P("data"), P()


@over_data((WHOLE, DATA), WHOLE, vma=False)
def partly_manual_softmax(p: Any, x: Any) -> Any:
    return lax.pmax(jax.nn.softmax(x @ p["up"]), "data")


def each_kind(x: Any) -> Any:
    total = lax.psum(x, "data")
    whole = lax.all_gather(x, "data", axis=0, tiled=True)
    part = lax.psum_scatter(whole * 2, "data", scatter_dimension=0, tiled=True)
    turned = lax.all_to_all(jnp.sin(whole), "data", 0, 0, tiled=True)
    return total[None] + part[None], turned


@over_data(DATA, DATA)
def exchanged(*xs: Any) -> Any:
    return [lax.all_to_all(x, "data", 0, 0, tiled=True) for x in xs]


@over_data((DATA, DATA, WHOLE), WHOLE)
def expert(up: Any, down: Any, x: Any) -> Any:
    """Each device of "data" has an expert, whose matmuls XLA partitions over "model"."""
    return lax.psum(jax.nn.gelu(x @ up[0]) @ down[0], "data")


@over_data((WHOLE, DATA), WHOLE, vma=False)
def gather_before_a_matmul(x: Any, w: Any) -> Any:
    """Both share a shard_map, whose operand has the shape that it has before the gather."""
    return x @ lax.all_gather(w, "data", axis=0, tiled=True)


def beside_a_whole_shard_map(x: Any, w: Any) -> Any:
    specs = {"in_specs": P("data", "model"), "out_specs": DATA}
    return jax.shard_map(lambda x: lax.psum(x, "model"), mesh=two_axes(), **specs)(x) + x @ w


def columns_of_a_broadcast(x: Any, w: Any) -> Any:
    """XLA exchanged parts of the broadcast, and would have gathered the array once it was ours."""
    return jax.vmap(lambda column: (column * w).sum(), in_axes=1)(x)


def dropped(key: Any, p: Any, x: Any) -> Any:
    """JAX says that a key is replicated by a mesh of its own, without axes."""
    return mlp(p, x * jax.random.bernoulli(key, 0.9, x.shape))


def bias_that_is_computed_with_again(p: Any, x: Any) -> Any:
    """XLA takes a program that reshapes one of several results of a barrier."""

    @jax.checkpoint
    def layer(p: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]

    return jax.grad(lambda p, x: (layer(p, x) ** 2).sum(), argnums=(0, 1))(p, x)


def results_whose_users_xla_removes(x: Any, y: Any, a: Any, b: Any) -> Any:
    """XLA gave the shardings of such users to what makes the results, and refused the program."""

    def twice_reshaped(x: Any) -> Any:
        return x.reshape(1, -1).reshape(-1)

    sums = twice_reshaped(x.sum(0)), twice_reshaped(y.sum(0)) * 1.0
    return [0.9 * m + g * g for m, g in zip((a, b), sums, strict=True)]


@functools.partial(jax.jacrev, argnums=0)
def loop_whose_result_is_sliced_whole(p: Any, x: Any) -> Any:
    """It ended the process with a segmentation fault."""

    def body(carry: Any, _: Any) -> Any:
        x, total = carry
        return (x + mlp(p, x), total + x[None]), None

    x, total = lax.scan(body, (x, jnp.zeros((1, *x.shape))), None, length=3)[0]
    return (lax.slice(total, (0, 0, 0), total.shape).reshape(x.shape) * 1.0 + mlp(p, x)).sum()


def decode(table: Any, words: Any) -> Any:
    """Lookups, logits and the next words, in a loop."""

    def step(words: Any, _: Any) -> Any:
        words = jnp.argmax(table[words] @ table.T, -1).astype(np.int32)
        return words, words

    return lax.scan(step, words, None, length=3)


@functools.partial(jax.value_and_grad, argnums=0)
def tied_embeddings(table: Any, words: Any) -> Any:
    logits = jax.nn.log_softmax(jax.checkpoint(lambda t: t[words] @ t.T)(table))
    return -jnp.take_along_axis(logits, words[:, None], 1).mean()


def largest(x: Any, table: Any) -> Any:
    """StableHLO has no top_k, and no erf."""
    return table[lax.top_k(x, 3)[1]] @ table.T


def error_function(x: Any, table: Any) -> Any:
    return lax.erf(x @ table.T) @ table


def some_words(_: int) -> jax.Array:
    return put(WORDS % 64, "data")


def of_mlp(up: Any, down: Any, **others: Any) -> Callable[[int], Any]:
    return lambda _: weights(up, down, **others)


TP = of_mlp(*TENSOR_PARALLEL)
X = of((8, 16), "data")
DIVIDED = of((8, 16), None, "model")
BOTH = of((8, 16), *EVERY)
TABLE = of((64, 16), "model")
EXPERT = of((2, 16, 32), "data", None, "model"), of((2, 32, 16), *EVERY), of((8, 16))
EACH_KIND = {"psum": 1, "all_gather": 1, "psum_scatter": 1, "all_to_all": 1}
FLOAT8 = [dtype for dtype in operations.EXCHANGED if dtype.startswith("float8")]
# The function, its arguments, and how many operations of this package there must be. "left" says
# how many of XLA's collectives stay, of more: 0 if it is not there, any number if it is None.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "tensor parallel": (mlp, (TP, X), {"psum": 1}),
    "FSDP": (mlp, (of_mlp(("model",), ("model",)), of((64, 16), EVERY)), {"all_gather": 2}),
    "two sums": (two_sums, (DIVIDED, of((16, 4), "model")), {"psum": 1}),
    "a barrier": (sums_around_a_barrier, (DIVIDED, of((16, 4), "model")), {"psum": 2}),
    "a product": (
        gather_before_a_product,
        (TP, of((2, 8, 16), *EVERY), of((16,))),
        {"all_gather": 1, "psum_scatter": 1},
    ),
    "a branch": (two_sums_in_a_branch, (BOTH,), {"psum": 3, "left": 1}),
    **{
        f"maxima of {dtype}": (
            maxima_and_minima,
            (lambda _, dtype=dtype: put((100 * np.abs(normal(0, 8, 16))).astype(dtype), *EVERY),),
            {"pmax": 2},
        )
        for dtype in ("float32", "bfloat16", "int32", "uint8")
    },
    "softmax": (lambda p, x: jax.nn.log_softmax(x @ p["up"]), (TP, X), {"pmax": 1, "psum": 1}),
    "a partly manual softmax": (partly_manual_softmax, (TP, X), {"pmax": 2, "psum": 1}),
    "each kind": (over_data(DATA, DATA)(each_kind), (BOTH,), EACH_KIND),
    "each kind, unchecked": (over_data(DATA, DATA, vma=False)(each_kind), (BOTH,), EACH_KIND),
    "each float8": (
        exchanged,
        tuple(of((8, 16), *EVERY, dtype=dtype) for dtype in FLOAT8),
        {"all_to_all": len(FLOAT8)},
    ),
    "experts": (expert, EXPERT, {"psum": 2}),
    "gradients of experts": (
        jax.grad(lambda *args: (expert(*args) ** 2).sum(), argnums=(0, 1, 2)),
        EXPERT,
        {},
    ),
    "a gather before a matmul": (
        gather_before_a_matmul,
        (of((16, 16), "model"), of((16, 8), "data")),
        {"all_gather": 1},
    ),
    "beside a whole shard_map": (
        beside_a_whole_shard_map,
        (BOTH, of((16, 16 // max(1, N // 2)), "model")),
        {"psum": 2},
    ),
    "a gathered array that is reduced otherwise": (
        lambda x: constrained(x) - constrained(x).max(0),
        (DIVIDED,),
        {"all_gather": 1},
    ),
    "a broadcast": (
        columns_of_a_broadcast,
        (of((16, 16), *EVERY), of((16, 16), "model")),
        {"psum": 1, "left": 1},
    ),
    "a key of random numbers": (dropped, (lambda _: jax.random.key(0), TP, X), {"psum": 1}),
    "a bias": (
        bias_that_is_computed_with_again,
        (of_mlp(*TENSOR_PARALLEL, bias=((32,), ("model",))), of((2, 8, 16))),
        {},
    ),
    "users that are removed": (
        results_whose_users_xla_removes,
        (of((16, 32), "data"), of((16, 64), *EVERY), of((32,)), of((64,))),
        {},
    ),
    "a slice of all": (loop_whose_result_is_sliced_whole, (TP, X), {}),
    "decoding": (decode, (TABLE, some_words), {"psum": 1, "pmax": 1, "pmin": 1}),
    "tied embeddings": (tied_embeddings, (TABLE, some_words), {}),
    "top_k": (largest, (of((8, 32), "data"), of((32, 16), "model")), {"psum": 1, "left": 1}),
    # With JAX 0.10.2 a gather is left.
    "erf": (error_function, (X, of((32, 16), "model")), {"psum": 1, "left": None}),
    **{
        f"lookups of {dtype}": (
            lambda table, words: table[words.astype(np.uint8)],
            (of((64, 8), "model", dtype=dtype), some_words),
            {"psum": 1},
        )
        for dtype in ("bfloat16", "int32")
    },
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    f, arguments, wanted = PROGRAMS[name]
    check(f, *(make(seed) for seed, make in enumerate(arguments)), **{"left": 0} | wanted)


def booleans(*spec: Any) -> Callable[[int], jax.Array]:
    return lambda seed: put(normal(seed, 16, 16) > 0.2, *spec)


COMPLEX = of((8, 16), None, "model", dtype="complex64")
# Programs to which XLA adds collectives that stay as they are.
LEFT: dict[str, tuple[Any, ...]] = {
    "a sum that begins at 3": (lambda x: lax.reduce(x, np.float32(3), lax.add, (1,)), DIVIDED),
    "a maximum that begins at 3": (maximum_from_three, DIVIDED),
    "a maximum of int32 that begins at 3": (
        maximum_from_three,
        of((8, 16), None, "model", dtype="int32"),
    ),
    "a product of complex": (jnp.dot, COMPLEX, of((16, 8), "model", dtype="complex64")),
    # Their sum is True or False, and lax.psum counts.
    "a sum of a product of booleans": (
        lambda x, w: (x @ w).sum(1),
        booleans(*TENSOR_PARALLEL[0]),
        booleans(*TENSOR_PARALLEL[1]),
    ),
    "a product of booleans": (
        lambda x, w: jnp.where(x @ w, x, w),
        booleans(*TENSOR_PARALLEL[0]),
        booleans(*TENSOR_PARALLEL[1]),
    ),
    "a lookup of booleans": (
        lambda table, words: table[words],
        of((64, 8), "model", dtype="bool"),
        some_words,
    ),
    # Counts that begin at others.
    "words that are added to": (
        lambda table, words: table.at[words].add(1.0),
        TABLE,
        some_words,
    ),
    "words that are set": (lambda table, words: table.at[words].set(1.0), TABLE, some_words),
}


@pytest.mark.parametrize("name", LEFT)
def test_programs_that_are_left(name: str) -> None:
    f, *arguments = LEFT[name]
    check_left(f, *(make(seed) for seed, make in enumerate(arguments)))


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sums and gathers are moved on CPUs, too; sets the bytes from which on sums are large."""
    monkeypatch.setattr(rewriting, "moves_on_cpus", True)
    return lambda nbytes: monkeypatch.setattr(sums, "OVERLAPPED_BYTES", nbytes)


def gated_step(batch: int = 2) -> tuple[Any, ...]:
    """The gradients of a sequence-parallel layer behind a norm's weight, and their arguments."""
    before, scale = put(normal(5, 16, 16)), put(normal(3, 16))
    x = put(normal(2, batch, 8, 16), "data", "model")
    p = weights(*TENSOR_PARALLEL, gate=((16, 32), (None, "model")))

    def loss(p: Any, x: Any, scale: Any) -> Any:
        whole = constrained(jnp.sin(x @ before) * scale, "data", None, None)
        gated = constrained(whole @ p["gate"], "data", None, "model")
        hidden = jnp.sin(whole @ p["up"]) * gated
        return ((x + constrained(hidden @ p["down"], "data", "model", None)) ** 2).sum()

    return jax.grad(loss, argnums=(0, 1, 2)), p, x, scale


@pytest.mark.parametrize("batch", [2, 8])
def test_gathers_and_sums_next_to_matmuls(batch: int, moving: Any) -> None:
    """A gather behind a norm's weight, a large sum of which all take a part, and shared ones."""
    moving(0)
    f, *args = gated_step(batch)
    # Forward for both matmuls and backward for the input and the weight gradient; forward, and
    # backward of the sum of two products.
    check(f, *args, left=0, all_gather=2, psum_scatter=2)
    with jax_intranode.accelerate(auto=True):
        calls = jax_intranode.explain(f)(*args)
    sent = [c.shapes for c in calls if c.operation in ("all_gather", "psum_scatter")]
    n = batch // 2
    assert sorted(sent) == [((n, 8 // (N // 2), 16),)] * 2 + [((n, 8, 16),)] * 2


def test_moves_that_xla_would_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that XLA would shard otherwise after moves is rewritten without them."""
    f, *args = gated_step()
    _, wanted = check(f, *args)
    jax.clear_caches()
    keeps = rewriting.Program.keeps_shardings
    kept: list[bool] = []

    def only_without_moves(self: Any) -> bool:
        kept.append(keeps(self) and bool(kept))
        return kept[-1]

    monkeypatch.setattr(rewriting, "moves_on_cpus", True)
    monkeypatch.setattr(rewriting.Program, "keeps_shardings", only_without_moves)
    _, after = check(f, *args)
    assert kept == [False, True] and after == wanted


@pytest.mark.parametrize("remat", [False, True])
def test_rows_behind_large_sums_are_divided(remat: bool, moving: Any) -> None:
    """A tensor-parallel stack sends what a sequence-parallel one sends, where sums are large."""
    p = weights(*TENSOR_PARALLEL, gate=((16, 32), (None, "model")), scale=((16,), ()))
    x = put(normal(2, 2, 8, 16), "data")

    def layer(p: Any, x: Any) -> Any:
        normed = x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * (1 + p["scale"])
        hidden = jnp.tanh(normed @ p["up"]) * (normed @ p["gate"])
        return x + constrained(hidden @ p["down"], "data", None, None)

    layer = jax.checkpoint(layer) if remat else layer
    gradient = jax.grad(lambda p, x: (layer(p, layer(p, x)) ** 2).mean(), argnums=(0, 1))
    check(gradient, p, x, psum_scatter=0)
    jax.clear_caches()
    moving(0)
    # Two layers, forward and backward. The first layer has all of x.
    check(gradient, p, x, left=0, psum_scatter=4, all_gather=4 + remat)


@pytest.mark.parametrize("batch", ["data", None])
def test_rows_whose_sums_xla_does_not_scatter(
    batch: Any,
    as_on_gpus: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On 2 x 2 devices XLA permutes instead where the sum is replicated over the major axis."""
    as_on_gpus(0)
    monkeypatch.setattr(Body, "is_overlapped", lambda *_, **__: True)
    mesh = two_axes(range(4))
    p = jax.tree.map(lambda w: put(w, *w.sharding.spec, mesh=mesh), weights(*TENSOR_PARALLEL))

    def f(p: Any, x: Any) -> Any:
        for _ in range(2):
            y = jnp.sin(x)
            x = x + (jnp.tanh(y @ p["up"]) * (y @ p["up"] ** 2) * (y @ p["up"] ** 3)) @ p["down"]
        return x

    check(f, p, put(normal(3, 8, 8, 16), batch, mesh=mesh), psum_scatter=2 if batch else 0)
    caplog.clear()  # CPUs have no sum that overlaps with its matmul


@pytest.mark.parametrize("whole", [1, 2])
def test_rows_that_are_needed_whole(whole: int, moving: Any) -> None:
    """Rows are divided if that sends no more than the sum."""
    moving(0)

    def f(p: Any, x: Any) -> Any:
        y = mlp(p, x)
        return [jnp.sort(of(y), axis=0) for of in (jnp.sin, jnp.cos)[:whole]]

    check(f, *tensor_parallel(), psum_scatter=int(whole == 1))


@pytest.mark.parametrize("other", [False, True])
def test_a_sum_that_is_needed_whole(other: bool, moving: Any) -> None:
    """A sum is not scattered if an operation needs all of it, or two need different parts."""

    def f(p: Any, x: Any) -> Any:
        y = constrained(mlp(p, x), "data", None)
        part = jnp.sin(constrained(y, EVERY, None))
        return part, constrained(y, "data", "model") if other else y.T @ y

    check(f, *tensor_parallel(), psum_scatter=0, psum=1 if other else 2)


@pytest.mark.parametrize("several", [False, True])
def test_sums_whose_parts_are_taken(several: bool, moving: Any) -> None:
    """Both large sums in a product are scattered; not a small one that is taken over both axes."""
    moving(0 if several else 1 << 20)
    p, x = tensor_parallel()

    def f(p: Any, z: Any, x: Any) -> Any:
        product = mlp(p, x) * mlp(p, x + 1) if several else mlp(p, x)
        return z * constrained(product, "data" if several else None, None)

    _, after = check(f, p, put(normal(6, 8, 16), EVERY), x if several else put(x))
    assert after == ({"jax_intranode_psum_scatter": 2} if several else {"jax_intranode_psum": 1})


# Of an MLP: how x and both weights are sharded, and what XLA needs for its gradients.
TWO_AXES = {
    "FSDP over all devices": ((EVERY,), (EVERY,), (EVERY,)),
    "FSDP over one axis of two": ((EVERY,), ("data",), ("data",)),
    "FSDP and tensor parallel": (("data",), EVERY, EVERY[::-1]),
    "FSDP and a divided sequence": (EVERY, EVERY, EVERY[::-1]),
    "a divided sequence": (EVERY, (None, "model"), ("model",)),
}


@pytest.mark.parametrize("how", TWO_AXES)
def test_gradients_over_two_axes(how: str) -> None:
    """Sums over several axes, of which some scatter; arrays that are gathered along both."""
    of_x, *of_weights = TWO_AXES[how]

    def step(p: Any, x: Any) -> Any:
        gradients = jax.grad(lambda p, x: (constrained(mlp(p, x), *of_x) ** 2).mean())(p, x)
        return jax.tree.map(lambda w, g: w - g, p, gradients)

    before, _ = check(step, weights(*of_weights), put(normal(2, 8, 16, 16), *of_x), left=0)
    assert of_xla(before) >= 4


@pytest.mark.parametrize(
    ("case", "gathers"), [("together", 1), ("large", 3), ("types", 2), ("needed", 2), ("axes", 2)]
)
def test_small_gathers_are_one(case: str, gathers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers of vectors, and of small matrices along rows, that do not need each other."""
    over = "data" if case == "axes" else "model"
    x, y, z = put(normal(3, 16), "model"), put(normal(3, 8, 4), "model"), put(normal(3, 32), over)
    if case == "large":
        monkeypatch.setattr(groups, "VECTOR_BYTES", 127)

    def whole(v: Any, axis: str = "model") -> Any:
        return constrained(constrained(jnp.sin(v), axis))

    def f(x: Any, y: Any, z: Any) -> Any:
        x = whole(x)
        z = z.astype(jnp.bfloat16) if case == "types" else z * x[3] if case == "needed" else z
        return x, whole(y), whole(z, over)

    check(f, x, y, z, left=0, all_gather=gathers)


def test_gathers_that_are_too_large_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has a row for two of the three gathers as one, not for all."""
    of_table = table.rows_and_source

    def rows_and_source(*of: Any) -> Any:
        rows, source = of_table(*of)
        return rows and (dataclasses.replace(rows[-1], nbytes=256, measured=True),), source

    monkeypatch.setattr(table, "rows_and_source", rows_and_source)
    vectors = [put(normal(i, 16 * N), "model") for i in range(3)]  # 128 bytes of each device

    def f(*of: Any) -> Any:
        return [constrained(constrained(jnp.sin(v), "model")) for v in of]

    check(f, *vectors, left=0, all_gather=2)


def larger(one: Any, other: Any) -> Any:
    (x, i), (y, j) = one, other
    first = (x > y) | (x != x)
    return jnp.where(first, x, y), jnp.where(first | ((x == y) & (i < j)), i, j)


def reduced(computation: Any, x: Any, first: int, *inits: Any) -> Any:
    """A reduction of an array and indices that begin at `first`."""
    index = lax.broadcasted_iota(np.int32, x.shape, 1) + first
    return lax.reduce((x, index), inits, computation, (1,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_the_index_of_a_maximum(dtype: str) -> None:
    """Of equal elements it is the lowest one, of several NaN the first; all may be infinite."""
    x = np.abs(normal(0, 8, 16)).round(1) * 10
    is_float = dtype in ("float32", "bfloat16")
    if is_float:
        x[0, [3, 15]], x[1], x[2, 15] = np.nan, -np.inf, np.nan
    x[3], x[4] = 0, 2
    x = put(x.astype(dtype), "data", "model")

    def f(x: Any) -> Any:
        return (
            lax.argmax(x, 1, np.uint32),
            jnp.argmin(x, 0),
            jax.vmap(jnp.argmax)(x + x),
            jnp.argmin(x, 1, keepdims=True),
        )

    before, after = check(f, x)
    assert before["all-gather"] >= 6 and of_xla(after) <= of_xla(before) - 6
    assert after["jax_intranode_pmax"] >= 1 and after["jax_intranode_pmin"] >= 1
    check(jnp.argmax, x)
    lowest = np.array(-np.inf if is_float else 0, dtype)
    # The smallest of the indices begins at 5.
    check(lambda x: reduced(larger, x, 7, lowest, np.int32(5))[1], x)


def test_a_reduction_of_two_that_is_no_argmax() -> None:
    """Of equal elements the highest index; and the sum of both."""

    def last(one: Any, other: Any) -> Any:
        (x, i), (y, j) = one, other
        return jnp.where(x > y, x, y), jnp.where((x > y) | ((x == y) & (i > j)), i, j)

    def both(one: Any, other: Any) -> Any:
        return one[0] + other[0], one[1] + other[1]

    x = put(normal(0, 8, 16).round(1), "data", "model")
    for function, start in ((last, -np.inf), (both, 0.0)):
        inits = np.float32(start), np.int32(0)
        check(lambda x, f=function, i=inits: reduced(f, x, 0, *i), x, pmin=0)


@pytest.mark.parametrize("mode", ["clip", "fill", "drop", "promise_in_bounds"])
@pytest.mark.parametrize("order", [None, range(N)[::-1]])
def test_lookups_in_a_sharded_table(mode: str, order: Any) -> None:
    """Rows that a device does not have are 0, and added up; it keeps the gradients of its own."""
    mesh = two_axes(order)
    words = put(WORDS % 64 if mode == "promise_in_bounds" else WORDS, "data", mesh=mesh)
    columns = put(normal(1, 8, 64), None, "model", mesh=mesh)
    tables = put(normal(0, 64, 8), "model", mesh=mesh), columns

    def f(tables: Any, words: Any) -> Any:
        rows, columns = tables
        square = jnp.stack([words, words[::-1]], 1)
        options = {"mode": mode, "fill_value": 3.0} if mode == "fill" else {"mode": mode}
        of_rows = rows.at[square].get(**options)
        return of_rows.sum(1), columns.at[:, words].get(**options)

    def loss(tables: Any, words: Any) -> Any:
        return sum((each**2).sum() for each in f(tables, words))

    before, after = check(f, tables, words)
    assert before["all-reduce"] >= 2 and of_xla(after) <= of_xla(before) - 2
    assert after["jax_intranode_psum"] >= 1
    before, after = check(jax.grad(loss), tables, words)
    assert of_xla(after) <= of_xla(before) - 4


@pytest.mark.parametrize("what", ["argument", "difference", "choice"])
def test_results_that_are_gathered(what: str) -> None:
    """XLA reshards results for out_shardings, and operands of select."""

    def f(m: Any, g: Any) -> Any:
        if what == "argument":
            return g * 1.5
        return m + (g - m) * 0.1 if what == "difference" else jnp.where(m > 0, g * 2, m)

    jitted = jax.jit(f, out_shardings=NamedSharding(two_axes(), P()))
    check(jitted, put(normal(0, 8, 4)), put(normal(1, 8, 4), EVERY), left=0, all_gather=1)


def test_attention_of_a_divided_sequence() -> None:
    """XLA ignores shardings of operations; without constraints it chose others for two dots."""
    mesh = two_axes(range(4))

    def loss(w: Any, x: Any) -> Any:
        qkv = jnp.einsum("bsd,cde->cbse", x, w).reshape(3, *x.shape[:2], 4, -1)
        mixed = jax.nn.dot_product_attention(*qkv).reshape(x.shape)
        return (constrained(mixed, *EVERY, mesh=mesh) ** 2).mean()

    w = put(normal(0, 3, 16, 16), None, None, "model", mesh=mesh)
    before, after = check(jax.grad(loss), w, put(normal(1, 8, 4, 16), *EVERY, mesh=mesh))
    assert of_xla(after) < of_xla(before)


def rms_norm(x: Any, scale: Any) -> Any:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def layer_norm(x: Any, scale: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (1 + scale) + scale


@pytest.mark.parametrize(
    ("norm", "is_divided"),
    [(rms_norm, True), (layer_norm, False), full(rms_norm, False), full(layer_norm, True)],
)
def test_a_norm_behind_a_sum(norm: Any, is_divided: bool, norms_are_fused: None) -> None:
    """Layers whose sums are followed by a residual and a norm; the sequence may be divided."""
    between = ("data", "model") if is_divided else ("data", None)
    layers = [weights(*TENSOR_PARALLEL, scale=((16,), ())) for _ in "ab"]

    def f(layers: Any, x: Any) -> Any:
        for w in layers:
            x = x + constrained(mlp(w, norm(x, w["scale"])), *between, None)
        return norm(x, layers[0]["scale"]), x

    x = put(normal(2, 2, 8, 16), *between)
    kind = f"psum{'_scatter' * is_divided}_residual_{norm.__name__}"
    check(f, layers, x, left=0, **{kind: 2})
    with jax_intranode.accelerate(auto=True):
        assert [c.operation for c in jax_intranode.explain(f)(layers, x)].count(kind) == 2
    # Here the backward pass needs what the norm computes, so it stays as it is.
    check(jax.grad(lambda w, x: (f(w, x)[0] ** 2).sum()), layers, x, left=0)


# What XLA does on GPUs.


@pytest.fixture
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the bytes from which on collectives are left that XLA can overlap."""
    monkeypatch.setattr(rewriting._Rewriting, "_on_gpus", lambda _: True)
    return lambda nbytes: monkeypatch.setattr(overlap.sums, "OVERLAPPED_BYTES", nbytes)


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_of_a_sharded_product(as_on_gpus: Any, parts: int) -> None:
    """Where XLA permutes as often as it would sum, all is left to it on GPUs."""
    as_on_gpus(1 << 30)
    wide, down = put(normal(0, 16, 16 * parts), None, "model"), put(normal(1, 16, 16), "model")

    def f(wide: Any, down: Any, x: Any) -> Any:
        first, *others = jnp.split(x @ wide, parts, axis=-1)
        return sum(others, jnp.tanh(first)) @ down

    before, after = check(f, wide, down, put(normal(2, 8, 16), "data"))
    assert (before == after) == (parts == 3)


@pytest.mark.parametrize(("batch", "users"), [(1, 2), (1, 1), (2, 2)])
def test_dimensions_of_one_element(as_on_gpus: Any, batch: int, users: int) -> None:
    """XLA removes them on GPUs, so dots that it partitions may share what they send."""
    as_on_gpus(1 << 30)
    others = [put(normal(3 + i, 16, 16)) for i in range(users)]

    def f(p: Any, x: Any, others: Any) -> Any:
        y = x + mlp(p, x)
        return [constrained(y @ w, None, "model", "data") for w in others]

    before, after = check(
        f, weights(*TENSOR_PARALLEL), put(normal(2, batch, 8, 16), None, "data"), others
    )
    assert of_xla(before) > 1
    assert ("jax_intranode_psum" in after) == ((batch, users) != (1, 2)), after


@pytest.mark.parametrize(
    ("f", "arguments", "most", "taken"),
    [
        (lambda p, x: jnp.tanh(p["up"] @ p["down"]) * 2, fully_sharded, 0, 1),
        # Sums that all matmuls need.
        (lambda p, x: mlp(p, mlp(p, x)), tensor_parallel, 0, 2),
        # XLA combines the gathers of parameters, of which only the second can run next to a matmul.
        (mlp, fully_sharded, 3 << 10, 0),
        (mlp, fully_sharded, 4 << 10, 2),
    ],
)
def test_what_xla_can_overlap_is_left(
    f: Any, arguments: Any, most: int, taken: int, as_on_gpus: Any
) -> None:
    as_on_gpus(most)
    before, after = check(f, *arguments())
    assert of_xla(before) - of_xla(after) == taken


def test_matmuls_that_overlap_are_not_left(
    as_on_gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA could run their collectives next to other matmuls, too. If none overlaps, none moves.

    Gathers of parameters are left.
    """
    as_on_gpus(0)
    f, *args = gated_step()
    with mock.patch.object(hlo, "through_hlo", wraps=hlo.through_hlo) as converted:
        _, found = check(f, *args)
    # Not again without the moves, where no matmul overlaps, nor to be propagated again.
    assert converted.call_count == 1
    jax.clear_caches()
    judged = bodies.Bodies.judged

    def as_overlapped(self: Any, group: Any) -> Any:
        found = judged(self, group)
        return dataclasses.replace(found, overlaps=found.left is None)

    with monkeypatch.context() as patch:
        patch.setattr(bodies.Bodies, "judged", as_overlapped)
        _, after = check(f, *args, psum_scatter=2, all_gather=2)
        _, of_parameters = check(mlp, *fully_sharded())
    assert of_xla(of_parameters) == 2
    assert after["all-gather"] == after["reduce-scatter"] == 0
    jax.clear_caches()
    monkeypatch.setattr(rewriting.moved, "move", lambda _: 0)
    monkeypatch.setattr(rewriting.moved, "share", lambda *_: False)
    _, after = check(f, *args)
    assert after == found and of_xla(after) > 1


@pytest.mark.parametrize("left", [2, 0])
def test_sums_of_gradients_are_judged_as_one(left: int, as_on_gpus: Any) -> None:
    """XLA combines them, also the last one, which has no matmul behind it.

    The sums of tensor parallelism, which each matmul needs, are ours at every size.
    """
    p, x = tensor_parallel()
    nbytes = sum(w.addressable_shards[0].data.nbytes for w in p.values())
    as_on_gpus(nbytes - 1 if left else nbytes)
    f = jax.grad(lambda p, x: jnp.sin(mlp(p, x)).sum())
    check(f, p, x, left=left)
    with jax_intranode.accelerate(auto=True):
        calls = jax_intranode.explain(f)(p, x)
    reasons = [call.reason for call in calls if call.algorithm == "lax"]
    assert len(reasons) == left and all("combines" in reason for reason in reasons)


@pytest.mark.parametrize(
    "branch, wanted",
    [(lambda x: x @ x, "if"), (lambda x: x.T, "if"), (lambda x: jnp.tanh(x) - x.sum(0), "case")],
)
def test_branches_for_gpus(branch: Any, wanted: str) -> None:
    """XLA makes selects of cheap branches, through which Shardy propagates as through a "case"."""

    def f(x: Any) -> Any:
        return lax.cond(x[0, 0] > 0, branch, lambda x: x * 2, x)

    module = jax.jit(f).lower(normal(0, 8, 8)).compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        new = simplified.simplified(module, for_gpus=True)
        names = {o.name for o in modules.walk(new.operation)}
        assert new.operation.verify()
    assert names & {"stablehlo.if", "stablehlo.case"} == {f"stablehlo.{wanted}"}


@pytest.mark.parametrize(
    "spec, times, for_gpus, swaps",
    [
        ("ai,ib->ba", 1, True, True),
        ("aij,bji->ba", 1, True, True),
        ("ai,ib->ab", 1, True, False),
        ("ai,ib->ba", 2, True, False),  # the product itself is needed, too
        ("aci,ib->bac", 1, True, False),
        ("ai,ib->ba", 1, False, False),
    ],
)
def test_transposed_products(spec: str, times: int, for_gpus: bool, swaps: bool) -> None:
    """For GPUs XLA multiplies in the other order, and Shardy prefers the first operand."""
    terms, result = spec.split("->")
    sizes = dict(zip("abcij", (2, 3, 4, 5, 6), strict=True))
    shapes = [[sizes[c] for c in term] for term in terms.split(",")]
    plain = "".join(c for c in terms if c in result)

    def f(x: Any, w: Any) -> Any:
        y = jnp.einsum(f"{terms}->{plain}", x, w)
        order = [plain.index(c) for c in result]
        return [y.transpose(order), y * 2][:times]

    module = jax.jit(f).lower(*(normal(i, *shape) for i, shape in enumerate(shapes))).compiler_ir()
    with module.context, ir.Location.unknown():
        new = simplified.simplified(module, for_gpus=for_gpus)
        assert new.operation.verify()
        (dot,) = [o for o in modules.walk(new.operation) if o.name.startswith("stablehlo.dot")]
        first = list(ir.RankedTensorType(dot.operands[0].type).shape)
        transposes = [o for o in modules.walk(new.operation) if o.name == "stablehlo.transpose"]
    assert (first == shapes[1]) == swaps
    assert len(transposes) == (result != plain and not swaps)


@pytest.mark.parametrize("loads", [None, False, True])
def test_operations_alone_without_kernels(
    loads: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices that load nothing show the same collectives; if they can't, those of the mesh do.

    They can't, too, in a JAX whose topologies cannot be read as expected.
    """
    monkeypatch.setattr(partitioner, "_SLOW_KERNELS", {"cpu"})
    monkeypatch.setattr(partitioner, "_known", {})
    monkeypatch.setattr(partitioner, "_targets", functools.cache(partitioner._targets.__wrapped__))
    of = partitioner.topologies.TopologyDescription
    if loads:
        these = SimpleNamespace(devices=jax.devices())
        monkeypatch.setattr(of, "deserialize", lambda _: these, raising=False)
    if loads is None:
        unexpected = mock.Mock(side_effect=TypeError("unexpected arguments"))
        for name in ("serialize", "deserialize"):
            monkeypatch.setattr(of, name, unexpected, raising=False)
    check(mlp, *tensor_parallel(), left=0)
    targets = [target for target, _ in partitioner._targets(two_axes())]
    assert targets[-1] == two_axes()
    if loads is None:
        assert len(targets) == unexpected.call_count == 1
    elif jax.__version_info__ >= (0, 12):
        assert len(targets) == 2 and (targets[0] == targets[1]) == loads


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("{{0,1},{2,3}}", {"model"}),
        ("{{0,2},{1,3}}", {"data"}),
        ("{{0,3},{1,2}}", None),
        ("{}", {"data", "model"}),
        ("[2,2]<=[4]", {"model"}),
        ("[2,2]<=[2,2]T(1,0)", {"data"}),
        ("[1,4]<=[4]", {"data", "model"}),
        ("mesh['axis_0'=2,'axis_1'=2] {'axis_1'}", {"model"}),
        ("mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'a'}", {"model"}),
        ("mesh['a'=4] {'a':(1)2}", {"data"}),
        ("mesh['a'=4] {'a':(2)2}", {"model"}),
        ("mesh['a'=4,'b'=1] {'a':(2)2,'b','a':(1)2}", {"data", "model"}),
        ("mesh['a'=8] {'a'}", None),
    ],
)
def test_groups_of_hlo(text: str, axes: set[str] | None) -> None:
    groups = hlo.groups_of_text(text, 4)
    found = groups and partitioner.axes_of_groups(
        frozenset(groups), ("data", "model"), np.arange(4).reshape(2, 2)
    )
    assert found == (None if axes is None else frozenset(axes))


# When programs are rewritten, and what users are told.


def test_install_with_and_without_auto() -> None:
    p, x = tensor_parallel()
    f = jax.jit(mlp)

    def ours() -> bool:
        return "jax_intranode" in f.lower(p, x).as_text()

    jax_intranode.install()
    assert not ours()
    jax_intranode.install(auto=True)
    assert ours()
    exported = jax.export.export(jax.jit(lambda *args: mlp(*args)))(p, x)
    assert "jax_intranode" not in exported.mlir_module()
    with jax_intranode.accelerate():
        assert ours()
    jax_intranode.install()
    assert not ours()
    with jax_intranode.accelerate():
        with jax_intranode.accelerate(auto=True):
            assert ours()
        assert not ours()
    jax_intranode.uninstall()
    assert not ours()


def test_explain_says_what_became_of_each() -> None:
    def f(p: Any, x: Any) -> Any:
        return mlp(p, x), x.prod(0)

    p, x = tensor_parallel()
    jax_intranode.install(auto=True)
    report = jax_intranode.explain(f)(p, x)
    assert {call.origin for call in report} == {"XLA's partitioner"}
    ours, left = report
    assert (ours.operation, ours.axes, ours.algorithm != "lax") == ("psum", ("model",), True)
    where = f"{__file__}:{mlp.__code__.co_firstlineno + 1} (mlp)"
    assert ours.source == where
    no_sum = "a reduction that is no sum, maximum or minimum"
    assert (left.operation, left.reason) == ("reduce", no_sum)
    report = jax_intranode.explain(f, compiled=True)(p, x)
    assert report.compiled == {"all-reduce": 1, "jax_intranode_psum": 1}
    assert report.added == {"all-reduce": 1}  # the product
    assert where in str(call_sites.place_of_site("jit_f psum float32[4,16]"))
    whole = over_data(DATA, WHOLE, vma=False)(lambda x: lax.all_gather(x, "data", tiled=True))
    (left,) = jax_intranode.explain(whole)(put(normal(0, 16, 16), EVERY))
    assert left.operation == "all_gather" and "Auto axes" in left.reason
    products = COMPLEX(0), put(normal(1, 16, 8).astype(np.complex64), "model")
    for f, args in ((jnp.dot, products), (lambda x: x.sum(1), products[:1])):
        (left,) = jax_intranode.explain(f)(*args)
        assert "complex64" in left.reason


def test_what_is_left_is_told_whole() -> None:
    """Maxima in a table, and a cumulative sum: XLA's collectives are rows with their lines."""

    def f(table: Any, words: Any, w: Any) -> Any:
        rows = table.at[words].max(3.0)
        return jnp.cumsum(rows @ w, axis=0)

    table, w = put(normal(0, 16, 8), "model"), put(normal(1, 8, 8), "data")
    words = put(np.arange(8, dtype=np.int32), "data")
    with jax_intranode.accelerate(auto=True):
        report = jax_intranode.explain(f, compiled=True)(table, words, w)
        found = collectives(compiled(f, table, words, w))
    assert report.compiled == found and of_xla(found)
    left = [call for call in report if call.algorithm == "lax"]
    line = f"{__file__}:{f.__code__.co_firstlineno + 1} (f)"
    assert line in [call.source for call in left]
    assert any("scatter" in call.reason for call in left if call.source == line)


def test_what_has_a_line_of_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback, "_logged", set())
    caplog.set_level(logging.INFO, "jax_intranode")
    mesh = two_axes(range(4))
    args = put(normal(0, 16, 32), mesh=mesh), put(normal(1, 32, 16), "model", mesh=mesh)
    args = *args, put(normal(2, 8, 16), mesh=mesh)

    def lines(f: Any, *args: Any) -> list[str]:
        caplog.clear()
        with jax_intranode.accelerate(auto=True):
            jax.jit(f).lower(*args)
        return [r.getMessage() for r in caplog.records]

    # XLA would shard it in another way after the replacements, unless it says how.
    def loss(up: Any, down: Any, y: Any, keep: bool) -> Any:
        def layer(y: Any, _: Any) -> Any:
            hidden = jnp.tanh(y @ up)
            hidden = constrained(hidden, mesh=mesh) if keep else hidden
            return hidden @ down + y, None

        return (lax.scan(layer, y, None, length=2)[0] ** 2).mean()

    left, kept = (jax.grad(functools.partial(loss, keep=keep), (0, 1)) for keep in (False, True))
    (line,) = [line for line in lines(left, *args) if "left to XLA" in line]
    assert line.startswith("jit_loss is left to XLA: with the replacements XLA would shard")
    assert "with_sharding_constraint" in line
    assert not [line for line in lines(kept, *args) if "jit_loss is left" in line]

    def product(x: Any) -> Any:
        return x.prod(0)

    where = f"{__file__}:{product.__code__.co_firstlineno + 1} (product)"
    assert lines(product, put(normal(2, 8, 16), "data")) == [
        # Nothing says that nothing else is left.
        "Lowered jit_product: of 1 matmuls, reductions and reshardings to which XLA's partitioner "
        "would add collectives, 0 became 0 operations of this package. XLA may communicate for "
        "others, too: explain(f, compiled=True) lists what is left.",
        f"reduce at {where} is left to XLA: a reduction that is no sum, maximum or minimum.",
    ]
    # The shard_maps that become parts of a program have no lines of their own.
    (line,) = [line for line in lines(mlp, *tensor_parallel()) if "Lowered" in line]
    assert "XLA's partitioner" in line


@pytest.mark.parametrize(
    "why",
    ["a callback", "several meshes", "own function", "symbolic shapes", "constants", "shardy"],
)
def test_explain_says_why_a_program_is_left_as_a_whole(why: str) -> None:
    mesh = two_axes()
    other = Mesh(mesh.devices, ("x", "y"), axis_types=mesh.axis_types)
    p, x = tensor_parallel()
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 16"), x.dtype)
    of_any_shape = jax.export.export(jax.jit(jax.nn.relu))(rows)
    table = np.arange(33 << 20, dtype=np.uint8)

    def f(p: Any, x: Any) -> Any:
        y = mlp(p, x)
        if why == "symbolic shapes":
            y = of_any_shape.call(y)
        if why == "constants":
            y += jnp.asarray(table)[:1]
        if why == "a callback":
            jax.debug.print("{}", y[0, 0])
        if why == "own function":
            y = lax.composite(jax.nn.relu, "tests.relu")(lax.approx_max_k(y, 2)[0])
        return constrained(y, "x", mesh=other) if why == "several meshes" else y

    jax.config.update("jax_use_shardy_partitioner", why != "shardy")
    try:
        with jax_intranode.accelerate(auto=True):
            report = jax_intranode.explain(f)(p, x)
            found = collectives(compiled(f, p, x))
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert set(found) == {"all-reduce"}
    assert why in (report.left or "") and why in str(report)


def test_a_program_that_xla_refuses_is_compiled_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the user's own is not laid to this package, and the program stays ours."""
    p, x = tensor_parallel()
    from jax._src import compiler  # noqa: TID251 - stands in for XLA

    f = jax.jit(mlp)
    with jax_intranode.accelerate(auto=True):
        lowered = f.lower(p, x)
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_of_tests"):
            lowered.compile({"xla_of_tests": True})
        assert "refuses" not in caplog.text and not of_xla(collectives(lowered.compile()))
    jax.clear_caches()
    compile_ = compiler.compile_or_get_cached

    def refuse(backend: Any, computation: Any, *args: Any, **kwargs: Any) -> Any:
        if "jax_intranode_psum" in str(computation):
            raise jax.errors.JaxRuntimeError("INTERNAL: refused")
        return compile_(backend, computation, *args, **kwargs)

    monkeypatch.setattr(compiler, "compile_or_get_cached", refuse)
    check_left(mlp, p, x)
    with jax_intranode.accelerate(auto=True):
        assert "jax_intranode" not in f.lower(p, x).as_text()
    assert "INTERNAL: refused" in caplog.text
    caplog.clear()


def test_an_exception_leaves_the_program_unless_a_peer_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = jax_intranode.CommunicationError("process 1 is gone")
    replace = mock.Mock(side_effect=[KeyError("not expected"), gone])
    monkeypatch.setattr(groups, "replace", replace)
    check_left(mlp, *tensor_parallel())
    assert sum("not expected" in record.message for record in caplog.records) == 1
    with pytest.raises(jax_intranode.CommunicationError), jax_intranode.accelerate(auto=True):
        jax.jit(lambda *args: mlp(*args)).lower(*tensor_parallel())
    caplog.clear()


def test_a_jaxlib_without_propagation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What needs it is left to XLA, or an error where it is asked for; jax.lax is replaced."""
    monkeypatch.setattr(switch, "PIPELINE", "builtin.module(sdy-no-such-pass)")
    with pytest.raises(RuntimeError, match=r"leave out auto=True"):
        jax_intranode.install(auto=True)
    assert not switch.mode.enabled.value
    mesh = Mesh(np.array(jax.devices()), ("x",))
    total = jax.shard_map(lambda v: lax.psum(v, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    with jax_intranode.accelerate():
        assert "jax_intranode_psum" in jax.jit(total).lower(jnp.ones((mesh.size, 4))).as_text()
    assert "Programs over Explicit axes are left to XLA" in caplog.text
    caplog.clear()


def test_strict_names_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rewriting.agreement, "reason_for_no_auto", lambda *_: "a process has not agreed"
    )
    strict = dataclasses.replace(config.get(), strict=True)
    monkeypatch.setattr(config, "get", lambda: strict)
    p, x = tensor_parallel()
    with jax_intranode.accelerate(auto=True):
        with pytest.raises(RuntimeError, match=r"dot_general at .*test_auto.py.*has not agreed"):
            jax.jit(mlp).lower(p, x)
        (call,) = jax_intranode.explain(mlp)(p, x)
    assert (call.algorithm, call.reason) == ("lax", "a process has not agreed")


def test_dtypes_that_are_not_enabled_any_more() -> None:
    """Nothing fails, as another array's sum next to it does not."""
    with jax.enable_x64(True):
        x = put(normal(0, 8, 16).astype(np.float64), None, "model")
        traced = jax.jit(lambda x: x.sum(1)).trace(x)
    with jax_intranode.accelerate(auto=True):
        assert set(collectives(traced.lower().compile())) == {"all-reduce"}
    # One of two sums is left.
    check(lambda x, y: (x.sum(1), y.sum(1)), COMPLEX(0), DIVIDED(0), left=1, psum=1)
