"""Rows of the contract: collective matmuls, norms after sums, and experts.

`jax.lax` has no such functions: tests/models.py makes them of those that it has.
"""

from collections.abc import Callable
from typing import Any

import expert_routings
import jax
import jax.numpy as jnp
import models
import numpy as np
import ragged_tables
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from contract.rows import BY_X, TOGETHER, How, row, run, shmap, small, square, under_both

# Matmuls.

COLUMNS = P(None, "x")
# Operands of `every_matmul`, whose rows differ between ranks.
SPECS = P("x"), P()


def every_matmul(lib: Any, x: Any, w: Any) -> dict[str, Any]:
    """Each collective matmul of a rank's x and w."""
    TOGETHER.update(("all_gather", "psum_scatter", "psum"))
    lib = models.functions(lib)
    products, whole = lib.all_gather_matmul(x, [w, w[:, :2]], "x", return_gathered=True)
    return {
        "list": [*products, whole],
        "alone": lib.all_gather_matmul(x, w, "x", gather_axis=-2),
        "scattered": lib.matmul_reduce_scatter(x, w, "x"),
        "summed": lib.matmul_all_reduce(x, w, "x"),
    }


def arguments() -> tuple[np.ndarray, np.ndarray]:
    return small(8, 3, top=3), small(3, 4, seed=1, top=3)


def loss(f: Callable[..., Any]) -> Callable[..., Any]:
    """A number that is not linear in the results."""
    return lambda *args: sum((y * y).sum() for y in jax.tree.leaves(f(*args)))


def exactly(
    body: Callable[..., Any],
    *values: Any,
    in_specs: Any = SPECS,
    out_specs: Any = BY_X,
    mesh: Any = None,
    transform: Callable[[Any], Any] = lambda f: f,
) -> Any:
    """Runs a transformed shard_map of a body whose products have all their bits."""
    with jax.default_matmul_precision("highest"):
        return under_both(
            lambda check: run(transform(shmap(body, mesh, in_specs, out_specs, check)), *values)
        )


def values_and_gradients(f: Any) -> Any:
    """Of the loss of all arguments."""
    return lambda *args: jax.value_and_grad(loss(f), range(len(args)))(*args)


def derivatives(f: Any) -> Any:
    """The gradients of the loss of all arguments, and their tangents."""

    def both(*args: Any) -> Any:
        gradient = jax.grad(loss(f), range(len(args)))
        return jax.jvp(gradient, args, tuple(map(jnp.cos, args)))

    return both


def per_rank(tree: Any) -> Any:
    return jax.tree.map(lambda v: v[None], tree)


@row("every axis that can be gathered or scattered; matrices of unequal widths", How.ACCELERATED)
def matmuls(lib: Any) -> Any:
    lib = models.functions(lib)

    def body(x: Any, w: Any) -> Any:
        gathered, scattered = (
            [lib.all_gather_matmul(x, w, "x", gather_axis=k) for k in (*range(x.ndim - 1), -2)],
            [lib.matmul_reduce_scatter(x, w, "x", scatter_dimension=k) for k in range(-1, x.ndim)],
        )
        several = lib.all_gather_matmul(x, [w, w[:, :2], w[:, 2:]], "x", return_gathered=True)
        return per_rank((gathered, scattered, several, lib.matmul_all_reduce(x, w, "x")))

    w = small(3, 6, seed=1)
    shapes = (8, 3), (4, 2, 3), (4, 2, 6, 3)
    return [exactly(body, small(*shape), w) for shape in shapes]


@row("`preferred_element_type`: dtypes of results and of gradients", How.DERIVED)
def matmuls_of_short_dtypes(lib: Any) -> Any:
    lib = models.functions(lib)

    def of(dtype: str, preferred: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            how = {"preferred_element_type": preferred}
            y = lib.all_gather_matmul(x, w, "x", **how)
            z = lib.matmul_reduce_scatter(x, w, "x", scatter_dimension=1, **how)
            return y, z, lib.matmul_all_reduce(x, w, "x", **how)

        def transform(f: Any) -> Any:
            def both(*args: Any) -> Any:
                results, pull_back = jax.vjp(f, *args)
                return results, pull_back(jax.tree.map(jnp.ones_like, results))

            return both

        values = (v.astype(dtype) for v in (small(4, 3, top=2), small(3, 4, seed=1, top=2)))
        return exactly(body, *values, transform=transform)

    pairs: list[tuple[str, Any]] = [("bfloat16", None), ("float16", "float32")]
    pairs += [("float8_e4m3fn", "float32"), ("float8_e5m2", "bfloat16")]
    with jax.numpy_dtype_promotion("strict"):
        return [of(*pair) for pair in pairs]


@row("gradients, tangents and transposes of matmuls, and derivatives of higher order", How.DERIVED)
def matmuls_differentiated(lib: Any) -> Any:
    def f(x: Any, w: Any) -> Any:
        return every_matmul(lib, x, w)

    def transposed(x: Any, w: Any) -> Any:
        def by(f: Callable[..., Any], v: Any) -> Any:
            return jax.linear_transpose(f, v)(f(v))[0]

        both = by(lambda v: f(v, w), x), by(lambda v: {**f(x, v), "list": f(x, v)["list"][:2]}, w)
        return per_rank(both)

    def derivatives(f: Any) -> Any:
        gradient = jax.grad(loss(f), (0, 1))

        def both(x: Any, w: Any) -> Any:
            along = jax.jvp(gradient, (x, w), (x, w))
            return along, jax.jvp(f, (x, w), (2 * x, w)), jax.grad(loss(gradient), (0, 1))(x, w)

        return both

    ones = small(8, 3, top=2), small(3, 4, seed=1, top=2)
    return exactly(transposed, *arguments()), exactly(f, *ones, transform=derivatives)


@row("one matmul of which the value is known and the tangent is not", How.DERIVED)
def matmuls_partly_known(lib: Any) -> Any:
    lib = models.functions(lib)

    @jax.custom_jvp
    def f(x: Any, w: Any) -> Any:
        return lib.all_gather_matmul(x, w, "x")

    @f.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (x, w), (_, dw) = primals, tangents
        return tuple(lib.all_gather_matmul(x, [w, 3 * dw], "x"))

    def of(wrap: Any) -> Any:
        def transform(f: Any) -> Any:
            return jax.grad(loss(f), 1)

        body, specs = wrap(lambda x, w: f(x, w) ** 2), (P("x"), COLUMNS)
        return exactly(body, *arguments(), in_specs=specs, out_specs=COLUMNS, transform=transform)

    return [of(wrap) for wrap in (lambda f: f, jax.checkpoint)]


@row("`vmap` of matmuls and of their gradients: batches of x, of w, and of both", How.DERIVED)
def matmuls_batched(lib: Any) -> Any:
    def of(dims: tuple[int | None, int | None]) -> Any:
        x, w = (
            v if d is None else np.stack([v, 2 * v, 1 - v], d)
            for v, d in zip(arguments(), dims, strict=True)
        )

        def body(x: Any, w: Any) -> Any:
            f = loss(lambda x, w: every_matmul(lib, x, w))
            return per_rank([jax.vmap(g, dims)(x, w) for g in (f, jax.grad(f, (0, 1)))])

        return exactly(body, x, w)

    return [of(dims) for dims in ((1, None), (None, 2), (2, 1))]


@row("matmuls and their gradients in `scan`, `cond`, `checkpoint` and nested `jit`", How.DERIVED)
def matmuls_in_control_flow(lib: Any) -> Any:
    def layer(x: Any, weights: Any) -> Any:
        gate, up, down = weights
        return x + models.gated_mlp(lib, x, gate, up, down, act=lambda v: v % 3) % 3

    def scanned(x: Any, *weights: Any) -> Any:
        return lax.scan(lambda x, ws: (jax.checkpoint(layer)(x, ws), None), x, weights)[0]

    def conditional(x: Any, *weights: Any) -> Any:
        first, second = ([w[k] for w in weights] for k in (0, 1))
        return lax.cond(lax.psum(x.sum(), "x") > 0, layer, lambda x, _: 2 * x, x, first) + jax.jit(
            layer
        )(x, second)

    specs = P("x"), P(None, None, "x"), P(None, None, "x"), P(None, "x")
    values = [small(*s, seed=k, top=2) for k, s in enumerate([(8, 3), (2, 3, 4), (2, 3, 4)])]
    values.append(small(2, 4, 3, seed=3, top=2))
    return [
        exactly(f, *values, in_specs=specs, transform=lambda f: jax.value_and_grad(loss(f)))
        for f in (scanned, jax.checkpoint(conditional))
    ]


@row("matmuls over one axis of two, with weights that the ranks of the other share", How.DERIVED, 4)
def matmuls_beside_another_axis(lib: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        return (
            every_matmul(lib, x, w)["summed"]
            + models.gated_mlp(lib, x, w, w + 1, w.T, act=lambda v: v).sum()
        )

    x, w, specs = small(8, 3, top=2), small(3, 4, seed=1, top=2), (P(("y", "x")), P())
    options = {"mesh": square(), "transform": values_and_gradients}
    return exactly(body, x, w, in_specs=specs, out_specs=specs[0], **options)


@row("products that vary over different axes; operands over Explicit axes inside", How.LAX, 4)
def matmuls_of_partly_sharded_operands(lib: Any) -> Any:
    lib = models.functions(lib)

    specs, out = (P("y"), P("x"), P()), [P(("x", "y")), P("y")]
    f = shmap(lambda x, w, v: lib.all_gather_matmul(x, [w, v], "y"), square(), specs, out)
    args = small(4, 3), small(6, 3, seed=1), small(3, 3, seed=2)
    found = [run(values_and_gradients(f), *args)]
    mesh = square(kind=AxisType.Explicit)
    inside = {"axis_names": {"x"}, "check_vma": False}
    f = shmap(lambda x, w: lib.matmul_all_reduce(x, w, "x"), mesh, (P("x"), P()), P("x"), **inside)
    with jax.set_mesh(mesh):
        for spec in (P(None, "y"), P("y", None)):
            args = jax.reshard(small(8, 4), P("x", None)), jax.reshard(small(4, 4), spec)
            found.append(run(values_and_gradients(f), *args))
    return found


# Norms. Their results are compared to rounding: cases_of_norms.py has their bits.

OF_NORMS = [
    (norm, name) for norm in ("rms_norm", "layer_norm") for name in ("psum", "psum_scatter")
]


def of_norm(lib: Any, norm: str, collective: str) -> Callable[..., Any]:
    function = getattr(models.functions(lib), f"{collective}_residual_{norm}")

    def call(x: Any, residual: Any, weight: Any, bias: Any, **options: Any) -> Any:
        return function(
            x[0], residual, weight, "x", eps=1e-3, bias=bias, weight_offset=1.0, **options
        )

    return call


def normal(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [
        np.random.default_rng(k).standard_normal(shape).astype(np.float32)
        for k, shape in enumerate(shapes)
    ]


def with_norms(lib: Any, transform: Callable[[Any], Any], some: Any = OF_NORMS[::3]) -> Any:
    """A transformation of norms, outside shard_map; the ranks bring x, the rest is shared.

    By default of each norm and of each collective, but not of each pair.
    """

    def of(norm: str, collective: str) -> Any:
        spec = P("x") if collective == "psum_scatter" else P()
        f, specs = of_norm(lib, norm, collective), (P("x"), spec, P(), P())
        values = normal((2, 4, 6), (4, 6), (6,), (6,))
        return under_both(lambda check: run(transform(shmap(f, None, specs, spec, check)), *values))

    return [of(*pair) for pair in some]


@row("norms after a sum: each of them", How.ACCELERATED, tolerance=1e-4)
def norms(lib: Any) -> Any:
    return with_norms(lib, lambda f: f, OF_NORMS)


@row("gradients, tangents and second derivatives of norms", How.DERIVED, tolerance=1e-4)
def norms_differentiated(lib: Any) -> Any:
    return with_norms(lib, derivatives)


@row("`vmap` of norms: batches of rows, and of parameters", How.ACCELERATED, tolerance=1e-4)
def norms_batched(lib: Any) -> Any:
    def batched(dims: Any) -> Callable[[Any], Any]:
        def transform(f: Any) -> Any:
            def over(*args: Any) -> Any:
                several = [
                    v if d is None else jnp.stack([v, v * 2, 1 - v])
                    for v, d in zip(args, dims, strict=True)
                ]
                return jax.vmap(f, dims)(*several)

            return over

        return transform

    return [with_norms(lib, batched(dims)) for dims in ((0, 0, None, None), (None, None, 0, 0))]


@row("gradients of norms in `scan` and `checkpoint`", How.DERIVED, tolerance=1e-3)
def norms_in_control_flow(lib: Any, check: bool) -> Any:
    call = of_norm(lib, "rms_norm", "psum")

    def body(x: Any, h: Any, weight: Any, bias: Any) -> Any:
        @jax.checkpoint
        def layer(h: Any, _: Any) -> Any:
            y, h = call(jnp.sin(x * h), h, weight, bias)
            return h + jnp.cos(y), y

        return lax.scan(layer, h, None, length=2)

    values = normal((2, 4, 6), (4, 6), (6,), (6,))
    specs = P("x"), P(), P(), P()
    return run(jax.grad(loss(shmap(body, None, specs, P(), check)), (0, 1, 2)), *values)


# Experts. Who goes where is gathered by XLA.

OF_EXPERTS = "all-reduce|reduce-scatter|all-to-all|collective-permute"


def routed(ranks: int = 2) -> list[np.ndarray]:
    """Tokens, their experts and weights, and the factors of the experts."""
    rng = np.random.default_rng(0)
    x, weights = expert_routings.operands(rng, ranks, 6, 8, 3, "float32")
    ids = expert_routings.routing(rng, ranks, 6, 3, 4, "some none")
    factors = rng.uniform(0.5, 2, (4, 8)).astype(np.float32)
    return [v.reshape(-1, v.shape[-1]) for v in (x, ids, weights, factors)]


def with_experts(
    lib: Any, transform: Callable[[Any], Any], wrap: Callable[[Any], Any] = lambda f: f
) -> Any:
    """A transformation of the layer of x, weights and factors, outside shard_map."""

    def under(check: bool) -> Any:
        x, ids, weights, factors = routed()

        def body(*args: Any) -> Any:
            return wrap(lambda *args: models.experts(lib, *args))(*args)

        mapped = shmap(body, None, P("x"), P("x"), check)
        return run(transform(lambda x, w, v: mapped(x, ids, w, v)), x, weights, factors)

    return under_both(under)


@row("`moe_dispatch` and `moe_combine`: values, gradients, tangents and second derivatives",
     How.ACCELERATED, of_xla=OF_EXPERTS, tolerance=1e-4)  # fmt: skip
def experts(lib: Any) -> Any:
    return with_experts(lib, lambda f: f), with_experts(lib, derivatives)


@row("gradients of experts through `checkpoint`, `cond`, `scan` and nested `jit`",
     How.DERIVED, of_xla=OF_EXPERTS, tolerance=1e-4)  # fmt: skip
def experts_in_control_flow(lib: Any) -> Any:
    def in_cond(f: Any) -> Any:
        branch = jax.checkpoint(jax.jit(f))
        return lambda x, *args: lax.cond(x[0, 0] < 1e6, branch, lambda *a: a[0], x, *args)

    def in_scan(f: Any) -> Any:
        return lambda x, *args: lax.scan(lambda v, _: (f(v, *args), None), x, None, 1)[0]

    return [with_experts(lib, values_and_gradients, wrap) for wrap in (in_cond, in_scan)]


@row("`vmap` of experts", How.ACCELERATED, of_xla=OF_EXPERTS, tolerance=1e-4)
def experts_batched(lib: Any) -> Any:
    def transform(f: Any) -> Any:
        return lambda *args: jax.vmap(f)(*(jnp.stack([v, jnp.cos(v)]) for v in args))

    return with_experts(lib, transform)


@row("experts over two axes in another order than the mesh's, beside a third", How.ACCELERATED, 8,
     of_xla=OF_EXPERTS, tolerance=1e-4)  # fmt: skip
def experts_over_two_axes(lib: Any, check: bool) -> Any:
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    x, ids, weights, _ = routed(8)
    factors = np.random.default_rng(1).uniform(0.5, 2, (32, 8)).astype(np.float32)
    spec = P(("a", "b", "c"))

    def body(*args: Any) -> Any:
        return models.experts(lib, *args, axes=("c", "a"))

    return run(shmap(body, mesh, spec, spec, check), x, ids, weights, factors)


# Ragged exchanges. lax has no values of them on CPU devices.


def with_ragged(
    lib: Any,
    transform: Callable[[Any], Any],
    kind: str,
    axes: tuple[int | None, ...] | None = None,
    wrap: Callable[[Any], Any] = lambda f: f,
) -> Any:
    """A transformation of the exchange of an operand and an output.

    Args:
        kind: that of the tables.
        axes: over which axes of its arguments the exchange is batched inside shard_map.
        wrap: transforms the exchange inside shard_map.
    """
    lib, rng = models.functions(lib), np.random.default_rng(0)
    tables = ragged_tables.tables(rng, 2, 2, 5, 9, kind)
    operands = ragged_tables.operands(rng, 2, (5, 9), (3,), "float32")

    def body(*args: Any) -> Any:
        def call(*args: Any) -> Any:
            return lib.ragged_all_to_all(*args, axis_name="x")

        args = tuple(v[0] for v in args)
        if axes is None:
            return wrap(call)(*args)[None]
        several = [
            v if axis is None else jnp.stack([v, 2 * v if k < 2 else v], axis)
            for k, (v, axis) in enumerate(zip(args, axes, strict=True))
        ]
        return wrap(jax.vmap(call, axes))(*several)[None]

    def under(check: bool) -> Any:
        mapped = shmap(body, None, P("x"), P("x"), check)
        return run(transform(lambda x, y: mapped(x, y, *tables)), *operands)

    return under_both(under)


def with_gradients(f: Any) -> Any:
    return lambda *args: (f(*args), jax.grad(loss(f), (0, 1))(*args))


@row("`ragged_all_to_all` of slices that overlap, are read twice or are empty; its derivatives",
     How.ACCELERATED)  # fmt: skip
def ragged(lib: Any) -> Any:
    once = [with_ragged(lib, with_gradients, kind) for kind in ("same", "apart")]
    return with_ragged(lib, derivatives, "over"), once


@row("`vmap` of `ragged_all_to_all` and its gradient: any axes of any arguments", How.ACCELERATED)
def ragged_batched(lib: Any) -> Any:
    some = (0, *[None] * 5), (None, 1, 0, None, 0, None)
    return [with_ragged(lib, with_gradients, "over", axes) for axes in some]


@row("gradients of `ragged_all_to_all` in `scan`, `checkpoint` and nested `jit`", How.ACCELERATED)
def ragged_in_control_flow(lib: Any) -> Any:
    def in_scan(call: Any) -> Any:
        def scanned(x: Any, y: Any, *tables: Any) -> Any:
            step = jax.checkpoint(lambda y, _: (jax.jit(call)(y[:5] * x, y, *tables), None))
            return lax.scan(step, y, None, length=2)[0]

        return scanned

    return with_ragged(lib, with_gradients, "apart", wrap=in_scan)
