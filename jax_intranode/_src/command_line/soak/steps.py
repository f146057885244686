"""The steps of a program, as functions of a library.

A step takes and returns a device's array v [rows, columns] and a digest of the same shape, unsigned
integers into which all results of collectives go, also those that v does not keep.

Between two collectives there are only operations whose result does not depend on how XLA fuses
them: sign changes, permutations, and multiplication by powers of two.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_intranode._src.command_line.soak import programs
from jax_intranode._src.command_line.soak.programs import Program, Step, Steps, Wrapped
from jax_intranode._src.ops import collective

State = tuple[Any, Any]
Run = Callable[[Any, Any], State]


class LaxMatmuls:
    """The collective matmuls as compositions of `jax.lax`, beside the functions of a library."""

    def __init__(self, collectives: Any) -> None:
        """Takes the library of the collectives."""
        self.psum, self.pmean = collectives.psum, collectives.pmean
        self.psum_scatter, self.all_gather = collectives.psum_scatter, collectives.all_gather
        self.all_to_all = collectives.all_to_all

    def all_gather_matmul(
        self, x: Any, w: Any, axes: Any, *, gather_axis: int = 0, return_gathered: bool = False
    ) -> Any:
        """As `jax_intranode.all_gather_matmul`."""
        whole = self.all_gather(x, axes, axis=gather_axis, tiled=True)
        products = [whole @ m for m in w] if isinstance(w, list) else whole @ w
        return (products, whole) if return_gathered else products

    def matmul_reduce_scatter(
        self, x: Any, w: Any, axes: Any, *, scatter_dimension: int = 0
    ) -> Any:
        """As `jax_intranode.matmul_reduce_scatter`."""
        return self.psum_scatter(x @ w, axes, scatter_dimension=scatter_dimension, tiled=True)

    def matmul_all_reduce(self, x: Any, w: Any, axes: Any) -> Any:
        """As `jax_intranode.matmul_all_reduce`."""
        return self.psum(x @ w, axes)

    def column_parallel_matmul(self, x: Any, w: Any, axes: Any) -> Any:
        """As `jax_intranode.column_parallel_matmul`."""
        return x @ w

    def row_parallel_matmul(self, x: Any, w: Any, axes: Any) -> Any:
        """As `jax_intranode.row_parallel_matmul`."""
        return self.matmul_all_reduce(x, w, axes)


def raw_bits(x: Any) -> Any:
    """The bits of an array as unsigned integers."""
    return lax.bitcast_convert_type(lax.stop_gradient(x), jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _mix(digest: Any, found: Any) -> Any:
    """Adds bits of the digest's shape to it."""
    return digest * 3 + found.astype(digest.dtype)


@jax.custom_vjp
def _bound(v: Any) -> Any:
    """Clips the value to [-1, 1], and its cotangent as well."""
    return jnp.clip(v, -1, 1)


_bound.defvjp(lambda v: (jnp.clip(v, -1, 1), None), lambda _, ct: (jnp.clip(ct, -1, 1),))


@jax.custom_vjp
def _bound_cotangent(w: Any) -> Any:
    """Keeps the value and clips its cotangent, so that several of them have an exact sum."""
    return w


_bound_cotangent.defvjp(lambda w: (w, None), lambda _, ct: (jnp.clip(ct, -32, 32),))


def build(program: Program, lib: Any) -> Callable[..., Any]:
    """Returns the function of a device's arrays that runs the program.

    Args:
        lib: has the functions of `jax_intranode`.

    Returns:
        A function of (turn, v, w, ct): the number of the turn, a device's array [rows, columns], a
        matrix [columns, columns] and the cotangent of the result. It returns v and the digest, and
        if the program has a gradient the cotangents of v and w.
    """
    run_all = _sequence(program.steps)

    def body(turn: Any, v: Any, w: Any, ct: Any) -> Any:
        context = _Context(program, lib, turn, w)

        def forward(v: Any, w: Any) -> State:
            context.w = _bound_cotangent(w)
            v = jnp.roll(v, turn, axis=0)
            positions = jnp.arange(v.size, dtype=jnp.int32).reshape(v.shape)
            v = jnp.where((positions * 2654435 + turn * 40503) & 64 == 0, v, -v)
            return run_all(context, v, jnp.zeros_like(raw_bits(v)))

        if not program.gradient:
            return forward(v, w)
        y, transpose, digest = jax.vjp(forward, v, w, has_aux=True)
        return y, digest, *transpose(ct)

    return body


class _Context:
    """What steps need besides the state."""

    def __init__(self, program: Program, lib: Any, turn: Any, w: Any) -> None:
        self.program = program
        self.lib = lib
        self.turn = turn
        self.w = w

    def bits(self, x: Any) -> Any:
        """The bits of an array. Two zeros are alike where the order of a sum is not known."""
        return raw_bits(jnp.where(x == 0, jnp.zeros_like(x), x) if self.program.integers else x)

    def varies(self, x: Any) -> Any:
        return collective.varying(x, self.program.layout.axes)

    def scaled(self, x: Any, n: int) -> Any:
        """A sum of n arrays, made as small as each of them."""
        if self.program.integers:
            return _bound(x)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return x * jnp.asarray(0.5 ** math.ceil(math.log2(n)), x.dtype)
        return x


def _sequence(steps: Steps) -> Callable[[_Context, Any, Any], State]:
    def run(context: _Context, v: Any, digest: Any) -> State:
        for step in steps:
            if isinstance(step, Wrapped):
                v, digest = _wrapped(step, context)(v, digest)
            else:
                v, digest = _STEPS[step.name](context, step, v, digest)
        return v, digest

    return run


def _wrapped(wrapped: Wrapped, context: _Context) -> Run:
    """The steps in a transformation or control flow."""
    run = functools.partial(_sequence(wrapped.steps), context)

    def scan(v: Any, digest: Any) -> State:
        return lax.scan(lambda state, _: (run(*state), None), (v, digest), length=2)[0]

    def fori_loop(v: Any, digest: Any) -> State:
        return lax.fori_loop(0, 3, lambda _, state: run(*state), (v, digest))

    def cond(v: Any, digest: Any) -> State:
        return lax.cond(context.turn % 3 > 0, run, lambda v, d: (-v, d + 1), v, digest)

    def vmap(v: Any, digest: Any) -> State:
        pair = jnp.stack([v, v[::-1]])
        vs, digests = jax.vmap(run)(pair, jnp.stack([digest, digest + 1]))
        return vs[0], _mix(_mix(digests[0], digests[1]), context.bits(vs[1]))

    wrappers: dict[str, Run] = {
        "jit": jax.jit(run),
        "checkpoint": jax.checkpoint(run),
        "scan": scan,
        "fori_loop": fori_loop,
        "cond": cond,
        "vmap": vmap,
    }
    return wrappers[wrapped.wrapper]


def _blend(step: Step, v: Any, y: Any) -> Any:
    """Takes about half of a result. The rest stays as it was, so that the ranks' arrays differ."""
    chosen = (jnp.arange(v.size).reshape(v.shape) // 3 + step.number) % 2 == 0
    return jnp.where(chosen, y, v)


# Collectives.


def _psum(context: _Context, step: Step, v: Any, digest: Any) -> State:
    y = context.varies(context.lib.psum(v, step.axes))
    digest = _mix(digest, context.bits(y))
    return _blend(step, v, context.scaled(y, lax.axis_size(step.axes))), digest


def _psum_tree(context: _Context, step: Step, v: Any, digest: Any) -> State:
    tree = {"v": v, "more": [v[:1], lax.stop_gradient(context.bits(v)[0, :1]).astype(jnp.int32)]}
    tree = jax.tree.map(context.varies, context.lib.psum(tree, step.axes))
    (row, few), y = tree["more"], tree["v"]
    digest = _mix(_mix(_mix(digest, context.bits(y)), context.bits(row)), context.bits(few))
    return _blend(step, v, context.scaled(y, lax.axis_size(step.axes))), digest


def _pmean(context: _Context, step: Step, v: Any, digest: Any) -> State:
    y = context.varies(context.lib.pmean(v, step.axes))
    return _blend(step, v, y), _mix(digest, context.bits(y))


def _psum_scatter(context: _Context, step: Step, v: Any, digest: Any) -> State:
    n = lax.axis_size(step.axes)
    rows, columns = v.shape
    d = 1 if columns % n == 0 and step.number % 2 else 0
    if step.number % 4 < 2:
        part = context.lib.psum_scatter(v, step.axes, scatter_dimension=d, tiled=True)
    else:
        shape = (rows, n, columns // n) if d else (n, rows // n, columns)
        part = context.lib.psum_scatter(v.reshape(shape), step.axes, scatter_dimension=d)
    part = context.varies(part)
    repeats = (1, n) if d else (n, 1)
    rest = v[:, part.shape[1] :] if d else v[part.shape[0] :]
    digest = _mix(digest, jnp.tile(context.bits(part), repeats))
    return jnp.concatenate([context.scaled(part, n), rest], axis=d), digest


def _all_gather(context: _Context, step: Step, v: Any, digest: Any) -> State:
    n = lax.axis_size(step.axes)
    d, tiled = step.number % 2, step.number % 4 < 2
    whole = context.varies(context.lib.all_gather(v, step.axes, axis=d, tiled=tiled))
    if tiled:
        shape = (v.shape[0], n, v.shape[1]) if d else (n, *v.shape)
        whole = whole.reshape(shape)
    whole = jnp.moveaxis(whole, d, 0)
    for k in range(n):
        digest = _mix(digest, context.bits(whole[k]))
    if context.program.integers:
        whole = _bound(whole)
    return _blend(step, v, whole[step.number % n]), digest


def _all_to_all(context: _Context, step: Step, v: Any, digest: Any) -> State:
    n = lax.axis_size(step.axes)
    rows, columns = v.shape
    if step.number % 4 < 2:
        # The parts become rows, or columns.
        y = context.lib.all_to_all(v, step.axes, 0, step.number % 2, tiled=True)
        y = context.varies(y).reshape(rows, columns)
    else:
        cut = v.reshape(rows // n, n, columns)
        y = context.varies(context.lib.all_to_all(cut, step.axes, 1, 1)).reshape(v.shape)
    return _blend(step, v, y), _mix(digest, context.bits(y))


# Collective matmuls.


def _matmul_all_reduce(context: _Context, step: Step, v: Any, digest: Any) -> State:
    y = context.varies(context.lib.matmul_all_reduce(v, context.w, step.axes))
    return _blend(step, v, _bound(y)), _mix(digest, context.bits(y))


def _mlp(context: _Context, step: Step, v: Any, digest: Any) -> State:
    hidden = context.lib.all_gather_matmul(v, context.w, step.axes)
    for part in context.bits(hidden).reshape(-1, *v.shape):
        digest = _mix(digest, part)
    y = context.lib.matmul_reduce_scatter(_bound(hidden), context.w.T, step.axes)
    return _bound(y), _mix(digest, context.bits(y))


def _mlp_of_sequences(context: _Context, step: Step, v: Any, digest: Any) -> State:
    x = v.reshape(2, -1, v.shape[-1])
    hidden = context.lib.all_gather_matmul(x, context.w, step.axes, gather_axis=1)
    for part in context.bits(hidden).reshape(-1, *v.shape):
        digest = _mix(digest, part)
    y = context.lib.matmul_reduce_scatter(_bound(hidden), context.w, step.axes, scatter_dimension=1)
    y = y.reshape(v.shape)
    return _bound(y), _mix(digest, context.bits(y))


def _two_matrices(context: _Context, step: Step, v: Any, digest: Any) -> State:
    (a, b), whole = context.lib.all_gather_matmul(
        v, [context.w, context.w[::-1]], step.axes, return_gathered=True
    )
    hidden = _bound(a) - _bound(b)
    for result in (a, b, whole):
        for part in context.bits(result).reshape(-1, *v.shape):
            digest = _mix(digest, part)
    y = context.lib.matmul_reduce_scatter(_bound(hidden), context.w, step.axes)
    return _bound(y), _mix(digest, context.bits(y))


def _column_and_row_parallel(context: _Context, step: Step, v: Any, digest: Any) -> State:
    # Only a replicated operand has a meaning here; after a psum all ranks have the same.
    x = context.lib.psum(v, step.axes)
    x = jnp.where(jnp.abs(x) <= 1, x, 0)
    hidden = context.varies(context.lib.column_parallel_matmul(x, context.w, step.axes))
    y = context.varies(context.lib.row_parallel_matmul(_bound(hidden), context.w, step.axes))
    return _blend(step, v, _bound(y)), _mix(digest, context.bits(y))


# Local steps.


def _local(f: Callable[[Any, int], Any]) -> Callable[[_Context, Step, Any, Any], State]:
    return lambda context, step, v, digest: (f(v, step.number), digest)


def _negate_odd_ranks(context: _Context, step: Step, v: Any, digest: Any) -> State:
    rank = lax.axis_index(context.program.layout.axes)
    return jnp.where((rank >> step.number % 3) & 1 == 0, v, -v), digest


def _delay(context: _Context, step: Step, v: Any, digest: Any) -> State:
    """Reverses v an even number of times: XLA does not know that. The rank says how often."""
    rank = lax.axis_index(context.program.layout.axes)
    times = 2 * (((rank + context.turn) * 7919 % 5) * step.number)
    return lax.fori_loop(0, times, lambda _, u: u[::-1], v), digest


_STEPS: dict[str, Callable[[_Context, Step, Any, Any], State]] = {
    "psum": _psum,
    "pmean": _pmean,
    "psum_tree": _psum_tree,
    "psum_scatter": _psum_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "matmul_all_reduce": _matmul_all_reduce,
    "mlp": _mlp,
    "mlp_of_sequences": _mlp_of_sequences,
    "two_matrices": _two_matrices,
    "column_and_row_parallel": _column_and_row_parallel,
    "negate": _local(lambda v, _: -v),
    "roll": _local(lambda v, k: jnp.roll(v, k, axis=k % 2)),
    "reverse": _local(lambda v, _: v[::-1]),
    "negate_odd_ranks": _negate_odd_ranks,
    "delay": _delay,
}
assert _STEPS.keys() == {
    *programs.SUMS, *programs.GATHERS, *programs.MATMULS, *programs.LOCAL, "delay"
}  # fmt: skip
