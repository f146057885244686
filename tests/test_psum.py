"""The cases of the collectives, and programs with psum, in one process with all devices."""

import re
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import need_devices
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_intranode
from jax_intranode._src.ops.psum import selection

# The quick tier runs these transformations with check_vma=False, and all with check_vma=True. Rows
# of the contract have both.
QUICK_WITHOUT_CHECK_VMA = (
    *("like_lax-forward", "like_lax-grad_scan", "like_lax-grad_vmap", "like_lax-inner_gradient"),
    *("parts_like_lax-layer", "parts_like_lax-grad_pmean", "parts_like_lax-grad_scan"),
)


# These differ from cases that the quick tier runs in nothing but an algorithm or in a number.
FULL = (
    *("trees-one_shot-300", "trees-two_shot-300", "random_program-0"),
    *("random_program_in_segments-0", "delays_in_segments-all_gather"),
)
QUICK_IN_SEGMENTS = (
    *("psum-bfloat16", "psum-int64", "psum_scatter-float64", "all_gather-bfloat16"),
    "all_to_all-float32",
)


def is_quick(name: str) -> bool:
    if name in FULL:
        return False
    if name.startswith("segments_of_every_dtype-"):
        return name.endswith(QUICK_IN_SEGMENTS)
    transformation = name.removesuffix("-False")
    many = name != transformation and name.startswith(("like_lax-", "parts_like_lax-"))
    return not many or transformation in QUICK_WITHOUT_CHECK_VMA


@pytest.mark.parametrize(
    "name",
    [
        name if is_quick(name) else pytest.param(name, marks=pytest.mark.full)
        for name in cases.CASES
    ],
)
def test_case(name: str) -> None:
    case = cases.CASES[name]
    need_devices(case.devices)
    case.run()


def test_unbound_axis_is_laxs_error() -> None:
    with pytest.raises(NameError, match="unbound axis name: nowhere"):
        jax_intranode.psum(jnp.ones(3), "nowhere")


def lowered(psum: object, mesh: jax.sharding.Mesh, shape: tuple[int, ...], **kwargs: object) -> str:
    """The compiled HLO of a psum over "x"."""
    f = jax.shard_map(
        lambda v: psum(v, "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False,
        **kwargs,
    )  # fmt: skip
    return jax.jit(f).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile().as_text()


def test_our_call_is_in_the_program_and_laxs_is_not() -> None:
    text = lowered(jax_intranode.psum, cases.line(), (len(jax.devices()), 100))
    assert "jax_intranode_psum" in text
    assert "all-reduce" not in text


def test_large_arrays_fall_back_to_lax() -> None:
    n = len(jax.devices())
    text = lowered(jax_intranode.psum, cases.line(), (n, 64 << 20))
    assert "jax_intranode_psum" not in text
    assert "all-reduce" in text
    assert "faster than lax" in selection(cases.line(), ("x",), (1, 64 << 20), "float32").reason


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("tree", [False, True])
def test_fallback_is_laxs_own_program(check_vma: bool, tree: bool) -> None:
    def program(psum: Any) -> str:
        def body(v: jax.Array) -> jax.Array:
            a, b = psum((v * 2, v), "x") if tree else (psum(v * 2, "x"), v)
            return a + b + 1

        f = jax.shard_map(
            body, mesh=cases.line(), in_specs=P("x"), out_specs=P("x"), check_vma=check_vma
        )
        shape = (len(jax.devices()) * 8, 1 << 20)
        return jax.jit(f).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).as_text()

    assert program(jax_intranode.psum) == program(lax.psum)


def test_unused_results_are_not_summed() -> None:
    n = len(jax.devices())

    def body(v: jax.Array) -> jax.Array:
        return jax_intranode.psum((v, v * 2, v * 3), "x")[1]

    f = jax.shard_map(body, mesh=cases.line(), in_specs=P("x"), out_specs=P())
    text = jax.jit(lambda v: jax.vmap(f)(v[None])).lower(jnp.zeros((n, 100))).as_text()
    (call,) = [line for line in text.splitlines() if "@jax_intranode_psum" in line]
    assert call.count("tensor<1x1x100xf32>") == 2, call  # one operand, one result


def test_partly_manual_mesh_is_not_gathered() -> None:
    need_devices(4)
    n = len(jax.devices()) // 2
    mesh = cases.make_mesh((2, n), ("auto", "x"))
    f = jax.shard_map(
        lambda v: jax_intranode.psum(v, "x"),
        mesh=mesh,
        in_specs=P(None, "x"),
        out_specs=P(),
        axis_names={"x"},
    )
    argument = jax.ShapeDtypeStruct(
        (8, 16 * n), jnp.float32, sharding=jax.NamedSharding(mesh, P("auto", "x"))
    )
    text = jax.jit(f).lower(argument).compile().as_text()
    assert "all-gather" not in text
    assert "all-reduce" in text


def test_export_falls_back_to_lax() -> None:
    mesh = cases.line()
    f = jax.shard_map(
        lambda v: jax_intranode.psum(v, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
    )
    exported = jax.export.export(jax.jit(f))(jnp.ones((len(jax.devices()), 3)))
    assert "@jax_intranode_psum" not in exported.mlir_module()
    assert "all_reduce" in exported.mlir_module()


def test_vmapped_axis_name() -> None:
    x = jnp.arange(12.0).reshape(3, 4)
    got = jax.vmap(lambda v: jax_intranode.psum(v, "i"), axis_name="i")(x)
    assert (got == lax.psum(x, ()) * 0 + x.sum(0)).all()


def test_explicit_axes() -> None:
    n = len(jax.devices())
    mesh = jax.make_mesh((n,), ("x",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.arange(4.0 * n), jax.NamedSharding(mesh, P("x")))
    f = jax.shard_map(
        lambda v: jax_intranode.psum(v, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
    )
    with jax.set_mesh(mesh):
        got = jax.jit(f)(x)
    assert (got == x.reshape(n, 4).sum(0)).all()


@pytest.mark.parametrize(("split", "concat", "most"), [(0, 0, 0), (0, 1, 1), (1, 0, 1)])
def test_all_to_all_is_transposed_only_where_it_must(split: int, concat: int, most: int) -> None:
    def body(v: Any) -> Any:
        return jax_intranode.all_to_all(v, "x", split, concat, tiled=True)

    need_devices(2)
    mesh = cases.line(2)
    x = cases.put(mesh, P("x"), np.ones((8, 6), np.float32))
    text = cases.compiled_of_ours(cases.sharded(body, mesh, P("x"), P("x")), x).as_text()
    assert len(re.findall(r" transpose\(", text)) <= most, text
