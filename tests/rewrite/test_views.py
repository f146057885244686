"""Arrays that are reshaped and transposed, as factors of the array that they are made from."""

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_intranode._src.rewrite import views
from jax_intranode._src.rewrite.views import Factor

SHAPES = [(12,), (4, 3), (2, 6), (2, 1, 6), (3, 2, 2), (1, 12), (2, 2, 3, 1)]


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """A shape of 12 elements, then permutations and shapes in turns."""
    found = [draw(st.sampled_from(SHAPES))]
    for _ in range(draw(st.integers(0, 4))):
        found.append(tuple(draw(st.permutations(range(len(found[-1]))))))
        found.append(draw(st.sampled_from(SHAPES)))
    return found


@settings(deadline=None, max_examples=40)
@given(chains())
def test_a_chain_is_one_arrangement(chain: list[tuple[int, ...]]) -> None:
    shape, *steps = chain
    source = np.arange(12).reshape(shape)
    array, dims = source, views.whole(shape)
    for permutation, reshaped in zip(steps[::2], steps[1::2], strict=True):
        array, dims = array.transpose(permutation), tuple(dims[i] for i in permutation)
        after = views.reshaped(dims, reshaped)
        if after is None:  # 12 = 4 * 3 can be transposed so that 2 * 6 is not made of factors
            break
        array, dims = array.reshape(reshaped), after
    assert [views.size_of(dim) for dim in dims] == list(array.shape)
    arranged = views.arrange(source, views.joined(*dims), array.shape)
    np.testing.assert_array_equal(np.asarray(arranged), array)
    assert views.in_order(*dims) == bool((np.diff(array.ravel()) == 1).all())


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(SHAPES), st.sampled_from([1, 2, 3, 4, 6, 12]), st.data())
def test_digits(shape: tuple[int, ...], stride: int, data: Any) -> None:
    size = data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 12) if 12 % (n * stride) == 0]))
    found = views.digits(views.joined(*views.whole(shape)), stride, size)
    flat = np.arange(math.prod(shape)) // stride % size
    if found is None:
        return
    index = np.indices(shape).reshape(len(shape), -1)
    value = np.zeros_like(flat)
    for f in found:
        value = value * f.size + index[f.dim] // f.stride % f.size
    np.testing.assert_array_equal(value, flat)


def test_a_split_of_a_factor_that_does_not_divide() -> None:
    # [4, 3] transposed is [3, 4]; as [2, 6], the first dimension is no factor.
    assert views.reshaped(((Factor(1, 1, 3),), (Factor(0, 1, 4),)), (2, 6)) is None
    assert views.reshaped(((Factor(1, 1, 3),), (Factor(0, 1, 4),)), (6, 2)) == (
        (Factor(1, 1, 3), Factor(0, 2, 2)),
        (Factor(0, 1, 2),),
    )
