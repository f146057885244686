"""Arrays that are reshaped and transposed, as factors of the array that they are made from."""

import itertools
import math

import numpy as np
import pytest

from jax_intranode._src.rewrite import views

SHAPES = [(12,), (4, 3), (2, 6), (2, 1, 6), (3, 2, 2), (1, 12), (2, 2, 3, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_chain_is_one_arrangement(shape: tuple[int, ...]) -> None:
    """Of random permutations and shapes in turns."""
    rng = np.random.default_rng(shape)
    source = np.arange(12).reshape(shape)
    for _ in range(30):
        array, dims = source, views.whole(shape)
        for _ in range(rng.integers(5)):
            permutation, reshaped = rng.permutation(array.ndim), SHAPES[rng.integers(len(SHAPES))]
            array, dims = array.transpose(permutation), tuple(dims[i] for i in permutation)
            after = views.reshaped(dims, reshaped)
            if after is None:  # 12 = 4 * 3 can be transposed so that 2 * 6 is not made of factors
                break
            array, dims = array.reshape(reshaped), after
        assert [views.size_of(dim) for dim in dims] == list(array.shape)
        arranged = views.arrange(source, views.joined(*dims), array.shape)
        np.testing.assert_array_equal(np.asarray(arranged), array)
        assert views.in_order(*dims) == bool((np.diff(array.ravel()) == 1).all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_digits(shape: tuple[int, ...]) -> None:
    divisors = (1, 2, 3, 4, 6, 12)
    pairs = [(k, n) for k, n in itertools.product(divisors, divisors) if 12 % (k * n) == 0]
    for stride, size in pairs:
        found = views.digits(views.joined(*views.whole(shape)), stride, size)
        if found is None:
            continue
        index = np.indices(shape).reshape(len(shape), -1)
        value = np.zeros(math.prod(shape), int)
        for f in found:
            value = value * f.size + index[f.dim] // f.stride % f.size
        np.testing.assert_array_equal(value, np.arange(len(value)) // stride % size)
