"""Random programs (tests/stress): they find wrong values, and can be made again."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from devices import need_devices
from stress import calls, chains
from stress.calls import Call

import jax_intranode

pytestmark = pytest.mark.one_version


OPERATIONS = {
    "psum": Call("psum", ("y", "x"), "bfloat16", (9, 3), leaves=3),
    "psum_scatter": Call("psum_scatter", ("x",), "float16", (3, 2), 1, tiled=False),
    "all_gather": Call("all_gather", ("y",), "complex64", (3,), 1, tiled=False),
    "all_to_all": Call("all_to_all", ("x", "y"), "bool", (8, 2), 0, 1),
    "pmax": Call("pmax", ("y", "x"), "bfloat16", (9, 3), leaves=2),
    "pmin": Call("pmin", ("x",), "int32", (9, 3)),
    "ppermute": Call("ppermute", ("x", "y"), "float16", (9, 3), perm=((0, 3), (3, 1)), leaves=2),
    "ragged_all_to_all": Call("ragged_all_to_all", ("x", "y"), "uint8", (9, 3), 2, 6),
    "all_gather_matmul": Call("all_gather_matmul", ("x",), "float32", (8, 16), 0, 8, leaves=2),
    "matmul_reduce_scatter": Call("matmul_reduce_scatter", ("x", "y"), "bfloat16", (8, 8), 0, 16),
    "matmul_all_reduce": Call("matmul_all_reduce", ("y",), "float16", (8, 8), 0, 24),
    "moe_dispatch": Call("moe_dispatch", ("y", "x"), "bfloat16", (9, 6), 2, 12, leaves=2),
}


def wrong_in_one_element(f: Any) -> Any:
    """A function of a library, wrong on the last rank of its group."""

    def wrong(x: Any, *arguments: Any, **options: Any) -> Any:
        ys, tree = jax.tree.flatten(f(x, *arguments, **options))
        (axes,) = (a for a in (*arguments, *options.values()) if isinstance(a, tuple))
        last = jax.lax.axis_index(axes) == jax.lax.axis_size(axes) - 1
        y = ys[0].reshape(-1)
        off = ~y[1] if y.dtype == bool else y[1] + jnp.ones((), y.dtype)
        ys[0] = y.at[1].set(jnp.where(last, off, y[1])).reshape(ys[0].shape)
        return jax.tree.unflatten(tree, ys)

    return wrong


def pairs() -> Iterator[Any]:
    """Each operation in the ways in which it is called; each way once in the quick tier."""
    for k, (operation, call) in enumerate(OPERATIONS.items()):
        ways = [*calls.WAYS[k:], *calls.WAYS[:k]]
        if operation in calls.COMPARED:
            ways.remove("vmap")
        if call.dtype not in calls.FLOATS or operation in calls.EXTREMES:
            ways = [way for way in ways if way not in ("gradient", "checkpoint")]
        for way in ways:
            quick = way == ways[0]
            yield pytest.param(operation, way, marks=[] if quick else pytest.mark.full)


@pytest.mark.parametrize(("operation", "way"), [*pairs()])
def test_right_and_wrong_values(operation: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need_devices(4)
    call, small = OPERATIONS[operation], operation in calls.COMPARED
    call = dataclasses.replace(call, way=way, small=small)
    order = (2, 0, 1, 3)
    made = chains.Program(0, (2, 2), order, (call,), False, False, "auto", rounds=3, delays=True)
    assert chains.run_program(made, 1) > 0
    right = getattr(jax_intranode, operation)
    monkeypatch.setattr(jax_intranode, operation, wrong_in_one_element(right))
    with pytest.raises(chains.Wrong, match="words after call 0 of"):
        chains.run_program(made, 1)


def test_programs_can_be_made_again() -> None:
    made = [chains.make(7, number, 8, "cpu") for number in range(100)]
    assert made == [chains.make(7, number, 8, "cpu") for number in range(100)]
    assert len({str(program) for program in made}) == 100
    texts = "".join(map(str, made))
    for name in (*calls.OPERATIONS, *calls.COMPARED, *calls.WAYS, "unedited=True", "two_shot"):
        assert name in texts, name
