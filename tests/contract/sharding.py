"""Rows of the contract: types within shard_map, kinds of mesh axes, pmap, and several meshes."""

from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from contract import rows
from contract.rows import PROGRAMS, How, each, each_raised, kind, row, run, shmap, small, square

# Types within shard_map.


@row("types of results: the axes they vary over, with `check_vma` on and off", How.TYPES)
def types_of_results(lib: Any) -> Any:
    def body(v: Any) -> Any:
        trees = each(lib, v), each(lib, (v, v.astype(jnp.int32)), ("x",)), each(lib, v[:0])
        return trees, lib.psum((v, v.sum()), ("x",)), lib.psum(v > 1, "x")

    return rows.types_inside(body, small(8, 3))


@row("operands that vary over some of the mesh's or the summed axes", How.ACCELERATED, 4)
def partly_varying(lib: Any, check: bool) -> Any:
    seen = []

    def body(v: Any, w: Any, u: Any) -> Any:
        results = each(lib, (w, u), "x"), each(lib, (v, w), "y"), each(lib, u, ("x", "y"))
        both = lib.psum((v, u) if check else (v, u, w), ("x", "y"))
        seen.append(jax.tree.map(kind, (results, both)))
        return results, both, lib.psum(both, "x")

    specs = P("x", "y"), P("x"), P()
    values = [small(8, 8, seed=k) for k in range(3)]
    return run(shmap(body, square(), specs, P(("x", "y")), check), *values), seen


@row("operands that vary over some of the given axes", How.AS_LAX, devices=4)
def parts_of_varying_over_some_axes(lib: Any) -> Any:
    return each_raised(
        lib,
        lambda f: rows.inside_raised(
            lambda v: f(v, ("x", "y")), mesh=square(), out_specs=P(("x", "y"))
        ),
    )


@row("replicated operands, alone and with others", How.ACCELERATED)
def replicated(lib: Any) -> Any:
    def body(v: Any, w: Any) -> Any:
        once = lib.psum(w, "x")
        together = each(lib, [v, w, jnp.ones(4), v * w, once, lib.pmean(v, "x")])
        return each(lib, w), together, lib.psum({"a": w * 2, "b": once}, "x")

    return rows.inside(body, small(8, 3), small(4, 3), in_specs=(P("x"), P()))


@row("unreduced and reduced operands", How.AS_LAX)
def parts_of_unreduced(lib: Any) -> Any:
    return [
        each_raised(
            lib,
            lambda f, to=to, specs=specs: rows.inside_raised(
                lambda v: f(lax.pcast(v, "x", to=to), "x"), in_specs=specs
            ),
        )
        for to, specs in (("unreduced", P("x")), ("reduced", P()))
    ]


@row("a result that contradicts `out_specs`", How.ERROR, devices=4)
def wrong_out_specs(lib: Any) -> Any:
    over_x = [
        rows.raised(lambda f=f: run(shmap(lambda v: f(v, "x")), small(8, 3)))
        for name, f in rows.operations(lib).items()
        if name not in ("psum", "pmean", "pmax", "pmin")  # the same on all ranks
    ]
    f = shmap(lambda v: lib.psum(v, "x"), square(), P("x", "y"), P())
    return over_x, rows.raised(lambda: run(f, small(4, 6)))


# Kinds of axes.


@row(
    "partly manual meshes with Auto and Explicit axes, also with sharding constraints inside: the "
    "HLO of `psum` has no all-gather",
    How.LAX,
    devices=4,
)
def partly_manual(lib: Any, check: bool) -> Any:
    seen = []

    def body(v: Any) -> Any:
        seen.append(kind(lib.psum(v, "x")))
        return lib.psum(v * 2, "x")

    def constrained(v: Any) -> Any:
        return lax.with_sharding_constraint(body(v), P(None, "y"))

    def over(of: AxisType, body: Any, out_specs: Any = rows.REPLICATED) -> Any:
        mesh = square(kind=of)
        value = jax.device_put(small(8, 6), NamedSharding(mesh, P("x", "y")))
        f = shmap(body, mesh, P("x"), out_specs, check, axis_names={"x"})
        with jax.set_mesh(mesh):
            return run(f, value)

    auto = over(AxisType.Auto, body)
    assert "all-gather" not in PROGRAMS[-1]
    every = over(AxisType.Auto, lambda v: each(lib, v * 2), P("x"))
    return auto, every, over(AxisType.Auto, constrained), over(AxisType.Explicit, body), seen


@row("shard_map inside shard_map", How.AS_LAX, devices=4)
def nested_shard_map(lib: Any) -> Any:
    def sums(v: Any) -> Any:
        return lib.psum(v, "y"), lib.psum(v, ("x", "y"))

    def body(v: Any) -> Any:
        of = {"in_specs": P(None, "y"), "axis_names": {"y"}}
        inner = jax.shard_map(lambda u: each(lib, u, "y"), out_specs=P("y"), **of)
        over_y, over_both = jax.shard_map(sums, out_specs=P(), **of)(v)
        return inner(v), each(lib, v), over_y, over_both

    specs = P("x"), P("x"), P("x"), P()
    return run(shmap(body, square(), P("x"), specs, axis_names={"x"}), small(8, 6))


@row("`set_mesh` of Auto and of Explicit axes: values, types in- and outside", How.ACCELERATED)
def axes_of_set_mesh(lib: Any) -> Any:
    def over(of: AxisType) -> Any:
        mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(of,))
        seen: list[Any] = []

        def body(v: Any) -> Any:
            seen.append(str(jax.sharding.get_abstract_mesh().axis_types))
            return each(lib, v)

        def f(v: Any) -> Any:
            result = jax.shard_map(body, in_specs=P("x"), out_specs=P("x"))(v)
            total = jax.shard_map(lambda u: lib.psum(u, "x"), in_specs=P("x"), out_specs=P())(v)
            seen.append(jax.tree.map(kind, (result, total)))
            return result, total

        with jax.set_mesh(mesh):
            return run(f, jax.device_put(small(8, 3), NamedSharding(mesh, P("x")))), seen

    return over(AxisType.Auto), over(AxisType.Explicit)


@row("`pmap`: all kinds of axis names above", How.ACCELERATED)
def pmap(lib: Any) -> Any:
    def f(v: Any) -> Any:
        sums = lib.psum({"a": v, "n": 1}, "i"), v / lib.psum(1, "i"), lib.psum(v[0], "i")
        return each(lib, v, "i"), sums

    return jax.pmap(f, axis_name="i", devices=jax.devices()[:2])(small(2, 4, 3))


@row("`pmap` with `axis_index_groups`, a name bound by vmap, and an unbound name", How.AS_LAX)
def pmap_as_lax(lib: Any) -> Any:
    def mapped(g: Any) -> Any:
        return jax.pmap(g, axis_name="i", devices=jax.devices()[:2])(small(2, 4, 3))

    def both(f: Any, v: Any) -> Any:
        return jax.vmap(lambda r: f(r, ("i", "j")), 1, axis_name="j")(v)

    return [
        each_raised(lib, lambda f: mapped(lambda v: f(v, "i", axis_index_groups=[[0], [1]]))),
        each_raised(lib, lambda f: mapped(lambda v: both(f, v))),
        each_raised(lib, lambda f: mapped(lambda v: f(v, "j"))),
    ]


# Several meshes.


@row("the device order changes after tracing: no stale ids", How.PARTLY, devices=4)
def device_order_changed(lib: Any) -> Any:
    @jax.jit
    def f(v: Any) -> Any:
        return jax.shard_map(lambda u: each(lib, u), in_specs=P("x", "y"), out_specs=P("x", "y"))(v)

    values, results = small(8, 6), []
    # With stale device ids the groups of "x" would be wrong.
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (0, 1, 2, 3)):
        mesh = square(order)
        x = jax.device_put(values, NamedSharding(mesh, P("x", "y")))
        with jax.set_mesh(mesh):
            results.append(f(x))
            PROGRAMS.append(f.lower(values).compile().as_text())
    return results


# XLA moves the arguments and results.
@row(
    "arguments and results on another mesh of the same devices",
    How.ACCELERATED,
    devices=4,
    of_xla="all-reduce",
)
def arguments_on_another_mesh(lib: Any, check: bool) -> Any:
    flat = NamedSharding(cases.make_mesh((4,), ("i",)), P("i"))
    f = shmap(lambda v: lib.psum(v, "x"), square(), P("x", "y"), P(None, "y"), check)
    value = jax.device_put(small(4, 6), flat)
    constrained = run(lambda v: lax.with_sharding_constraint(f(v).T[:4], flat), small(4, 6))
    return run(f, value), constrained


@row("meshes of the same devices, in one program and in turn", How.ACCELERATED, devices=4)
def meshes_in_turn(lib: Any) -> Any:
    flat, folded = cases.make_mesh((4,), ("i",)), square()

    def over(mesh: Mesh) -> Any:
        specs = P(mesh.axis_names)
        return shmap(lambda v: each(lib, v, mesh.axis_names[-1]), mesh, specs, specs)

    def together(v: Any) -> Any:
        on_flat = over(flat)(v)
        return on_flat, over(folded)(v), over(folded)(on_flat["psum"])

    meshes = flat, folded, square((3, 1, 2, 0)), rows.line()
    fs = [jax.jit(over(mesh)) for mesh in meshes]
    in_turn = [f(small(16, 3, seed=k)) for k in range(3) for f in fs]
    return run(together, small(16, 3)), in_turn
