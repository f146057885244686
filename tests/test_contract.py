"""Runs each row of the contract with our functions and with lax's, and compares them."""

import re
from pathlib import Path
from typing import Any

import contract
import jax
import numpy as np
import pytest
from contract import ROWS, rows
from devices import need_devices
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_intranode

TABLE = Path(__file__).resolve().parent.parent / "docs" / "contract.md"
# The quick tier leaves them out: those with a process each, what gradients and eager calls do, too,
# dtypes whose values the case "special_values" compares, and what lax runs.
FULL = (
    *("persistent-cache", "serialized-executable", "tangents", "jacobians", "every-dtype"),
    *("parts-of-exotic-dtypes", "large-arrays"),
)

# The quick tier runs each row with check_vma=True, and these also without: gradients, types and
# batches depend on it. Most other tests have check_vma=False.
BOTH = (
    *("grad-inside", "transposes", "replicated", "types-of-results", "vmap-outside"),
    "partly-varying",
)


def test_named_rows_exist() -> None:
    assert {*FULL, *BOTH} <= ROWS.keys()


@pytest.mark.parametrize(
    ("name", "check_vma"),
    [pytest.param(name, [True], id=f"{name}-checked") for name in ROWS if name not in FULL + BOTH]
    + [
        pytest.param(name, [True, False], id=name, marks=[pytest.mark.full] * (name not in BOTH))
        for name in ROWS
    ],
)
def test_row(name: str, check_vma: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "CHECK_VMA", check_vma)
    need_devices(ROWS[name].devices)
    contract.check(ROWS[name])


def test_error_outside_any_axis_says_where_to_call_it() -> None:
    """The message is lax's, and has a hint if lax's has none."""
    row = ROWS["unbound-axis-outside"]
    ours, theirs = (jax.tree.leaves(row.run(lib)) for lib in (jax_intranode, lax))
    for a, b in zip(ours, theirs, strict=True):
        assert a.message.startswith(b.message), (a, b)
        if a.type is not NotImplementedError:  # of an operation without a derivative
            assert "shard_map" in a.message + a.notes, a


@pytest.mark.parametrize("axes", ["nowhere", ("x", "nowhere")])
@pytest.mark.parametrize("name", ["psum", "pmean", "psum_scatter", "all_gather", "all_to_all"])
def test_an_unbound_axis_is_a_name_error_under_check_vma(name: str, axes: Any) -> None:
    """Of lax it is an AssertionError without a text, or a ValueError about something else."""
    f = rows.operations(jax_intranode)[name]
    mapped = rows.shmap(lambda v: f(v, axes), out_specs=P("x"), check_vma=True)
    with pytest.raises(NameError, match=r"unbound axis name: .*nowhere") as error:
        jax.eval_shape(mapped, rows.small(8, 3))
    text = str(error.value) + "".join(getattr(error.value, "__notes__", []))
    assert f"jax_intranode.{name.replace('pmean', 'psum')}" in text
    assert "bound here: ['x']" in text


@pytest.mark.parametrize("dimension", [1, 2])
def test_vmap_of_untiled_psum_scatter_over_a_later_dimension(dimension: int) -> None:
    """Lax's own batching rule is wrong in this case. Ours is right."""
    value = rows.small(4, 3, 5)
    f = rows.shmap(
        lambda v: jax.vmap(lambda u: jax_intranode.psum_scatter(u, "x"), dimension)(v),
        out_specs=P("x"),
        check_vma=False,
    )
    total = value[:2] + value[2:]
    want = np.concatenate([np.moveaxis(part, dimension - 1, 0) for part in total])
    np.testing.assert_array_equal(rows.run(f, value), want)


@pytest.mark.parametrize(("split", "concat"), [(0, 2), (1, 0), (1, -1)])
def test_gradient_of_untiled_all_to_all_over_two_dimensions(split: int, concat: int) -> None:
    """Lax's own transposition raises an error in this case, and does not know -1 in jax 0.10."""
    value = rows.small(4, 2, 3)
    f = rows.shmap(
        lambda v: jax_intranode.all_to_all(v, "x", split, concat), out_specs=P("x"), check_vma=True
    )
    want = np.concatenate(
        [np.stack([x.take(r, split) for x in np.split(value, 2)], concat) for r in range(2)]
    )
    np.testing.assert_array_equal(rows.run(f, value), want)
    gradient = jax.grad(lambda v: (f(v) ** 2).sum() / 2)
    np.testing.assert_array_equal(rows.run(gradient, value), value)


@pytest.mark.skipif(not TABLE.exists(), reason="the docs are not here")
def test_table_has_the_rows() -> None:
    lines = re.findall(r"^\| `([\w-]+)` \| (.*) \| (.*) \|$", TABLE.read_text(), re.MULTILINE)
    assert lines == [(row.name, row.what, row.how) for row in ROWS.values()]
