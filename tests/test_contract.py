"""Runs each row of the contract with our functions and with lax's, and compares them."""

import re
from pathlib import Path

import contract
import contract_of_parts
import jax
import numpy as np
import pytest
from contract import Raised
from devices import need_devices
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_intranode

TABLE = Path(__file__).resolve().parent.parent / "docs" / "contract.md"
ROWS = {**contract.ROWS, **contract_of_parts.ROWS}
# The collectives of XLA that must not be in a program of our collectives.
OF_XLA = {
    **dict.fromkeys(contract.ROWS, "all-reduce"),
    **dict.fromkeys(contract_of_parts.ROWS, "all-reduce|all-gather|reduce-scatter|all-to-all"),
}
# Rows that take a second or more. Each transforms what other rows run with check_vma=False, too:
# the quick tier runs these with check_vma=True.
SLOW = (
    *("checkpoint", "grad-of-integers", "grad-of-one-operand", "grad-of-parts-inside"),
    *("grad-of-parts-outside", "grad-of-parts-through-control-flow", "grad-through-control-flow"),
    *("jacobians", "jvp", "jvp-of-grad", "jvp-of-parts", "linearize", "partly-known"),
    *("parts-of-every-dtype", "parts-of-large-arrays", "parts-of-loops", "parts-of-nested-jit"),
    *("parts-of-vmapped-name-inside", "pytree-of-many-arrays", "scatter-dimensions-of-any-kind"),
    *("second-derivatives-of-parts", "vmap-of-grad", "vmap-of-grad-of-parts", "vmap-of-parts"),
    "vmap-of-parts-of-many-kinds",
)


def test_slow_rows_exist() -> None:
    assert set(SLOW) <= ROWS.keys()


@pytest.mark.parametrize(
    ("name", "check_vma"),
    [pytest.param(name, [True], id=f"{name}-checked") for name in SLOW]
    + [
        pytest.param(name, [True, False], id=name, marks=[pytest.mark.full] * (name in SLOW))
        for name in ROWS
    ],
)
def test_row(name: str, check_vma: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "CHECK_VMA", check_vma)
    row = ROWS[name]

    def collectives(text: str) -> int:
        """The number of XLA's collectives in a program."""
        return len(re.findall(rf"\b(?:{OF_XLA[name]})(?:-start)?\(", text))

    need_devices(row.devices)
    ours = contract.outcome(row, jax_intranode.psum)
    theirs = contract.outcome(row, lax.psum)
    assert theirs.calls == 0
    if row.how == contract.DIFFERS:
        # The second process reports values or the text of an error.
        (ours_saved, ours_loaded), (saved, loaded) = ours.result, theirs.result
        assert ours_saved == saved == "yes"
        assert isinstance(loaded, list)
        assert "needs jax_intranode.initialize(mesh)" in str(ours_loaded)
        return
    contract.compare(ours.result, theirs.result)
    if row.how == contract.ERROR:
        results = jax.tree.leaves(theirs.result)
        assert all(isinstance(result, Raised) for result in results), "lax raises no error"
    calls = [text.count("jax_intranode_") > 0 for text in ours.programs]
    of_xla = [collectives(text) > 0 for text in ours.programs]
    if row.how == contract.ACCELERATED:
        assert ours.calls > 0, "our kernels did not run"
        assert all(calls), "a program without our call"
        assert not any(of_xla), "a collective of XLA beside our call"
    elif row.how == contract.PARTLY:
        assert ours.calls > 0, "our kernels did not run"
        assert any(calls) and any(of_xla)
    elif row.how == contract.DERIVED:
        assert ours.calls > 0, "our kernels did not run"
        assert any(calls) or not calls
        for text, of_lax in zip(ours.programs, theirs.programs, strict=True):
            assert collectives(text) <= collectives(of_lax), "more of them than with lax"
    elif row.how != contract.AS_LAX:
        assert ours.calls == 0, "our kernels ran"
        assert not any(calls)
        assert [*map(collectives, ours.programs)] == [*map(collectives, theirs.programs)]


def test_error_outside_any_axis_says_where_to_call_it() -> None:
    """The message is lax's, and has a hint if lax's has none."""
    row = contract.ROWS["unbound-axis-outside"]
    ours, theirs = (row.run(psum) for psum in (jax_intranode.psum, lax.psum))
    for a, b in zip(ours, theirs, strict=True):
        assert a.message.startswith(b.message), (a, b)
        assert "shard_map" in a.message + a.notes, a


@pytest.mark.parametrize("dimension", [1, 2])
def test_vmap_of_untiled_psum_scatter_over_a_later_dimension(dimension: int) -> None:
    """Lax's own batching rule is wrong in this case. Ours is right."""
    value = contract.small(4, 3, 5)
    f = contract.shmap(
        lambda v: jax.vmap(lambda u: jax_intranode.psum_scatter(u, "x"), dimension)(v),
        out_specs=P("x"),
        check_vma=False,
    )
    total = value[:2] + value[2:]
    want = np.concatenate([np.moveaxis(part, dimension - 1, 0) for part in total])
    np.testing.assert_array_equal(contract.run(f, value), want)


@pytest.mark.parametrize(("split", "concat"), [(0, 2), (1, 0), (1, -1)])
def test_gradient_of_untiled_all_to_all_over_two_dimensions(split: int, concat: int) -> None:
    """Lax's own transposition raises an error in this case, and does not know -1 in jax 0.10."""
    value = contract.small(4, 2, 3)
    f = contract.shmap(
        lambda v: jax_intranode.all_to_all(v, "x", split, concat), out_specs=P("x"), check_vma=True
    )
    want = np.concatenate(
        [np.stack([x.take(r, split) for x in np.split(value, 2)], concat) for r in range(2)]
    )
    np.testing.assert_array_equal(contract.run(f, value), want)
    gradient = jax.grad(lambda v: (f(v) ** 2).sum() / 2)
    np.testing.assert_array_equal(contract.run(gradient, value), value)


@pytest.mark.skipif(not TABLE.exists(), reason="the docs are not here")
def test_table_has_the_rows() -> None:
    lines = re.findall(r"^\| `([\w-]+)` \| (.*) \| (.*) \|$", TABLE.read_text(), re.MULTILINE)
    rows = [(row.name, row.what, row.how) for row in ROWS.values()]
    assert lines == rows, "docs/contract.md differs from tests/contract.py, contract_of_parts.py"
