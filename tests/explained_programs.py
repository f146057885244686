"""Programs of a library's collectives, of which `explain` has to report what they lower to."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_intranode import explain
from jax_intranode._src.jax_private import hlo

N = len(jax.devices())
X = jax.ShapeDtypeStruct((N, 4 * N), jnp.float32)  # float32[1, 4 N] on each device
HALVES = [list(range(N // 2)), list(range(N // 2, N))]
OF_LAX = {
    **dict.fromkeys(("psum", "pmean", "pmax", "pmin"), "all-reduce"),
    "psum_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


def in_report(calls: Any) -> Counter[str]:
    """Counts the collectives of a report, as `hlo.in_lowered` does; lax sums arrays one by one."""
    found: Counter[str] = Counter()
    for call in calls:
        if call.algorithm != "lax":
            found[f"jax_intranode_{call.operation.replace('pmean', 'psum')}"] += 1
        elif call.axes:
            found[OF_LAX[call.operation]] += len(call.shapes)
    return found


def check_report(f: Callable[[Any], Any], grad: bool = False) -> None:
    """The lowered program of a function, or of its gradient, holds what `explain` reports."""
    function = jax.grad(lambda v: (f(v) ** 2).sum()) if grad else f
    calls = explain(function)(X)
    text = jax.jit(function).lower(X).as_text()
    assert in_report(calls) == hlo.in_lowered(text), f"{calls}\n{text}"
    assert len(calls) > 0
    assert all(call.reason for call in calls)


def programs(lib: Any) -> dict[str, Callable[[Any], Any]]:
    """Functions of a device's array, with `jax_intranode` or `jax.lax` as library."""

    @jax.jit
    def twice_called(v: Any) -> Any:
        return lib.psum(v * 2, "x")

    @jax.custom_vjp
    def custom(v: Any) -> Any:
        return lib.psum(v, "x")

    def backward(v: Any, ct: Any) -> Any:
        return (lib.all_gather(ct, "x")[0] * v,)

    custom.defvjp(lambda v: (lib.psum(v, "x"), v), backward)

    def scanned(v: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            return lib.pmean(c, "x"), lib.psum(c, "x")

        return lax.scan(step, v, None, length=7)[1].sum(0)

    def of_int(v: Any) -> Any:
        return lib.psum(v.astype(jnp.int32), "x").astype(v.dtype)

    def loops(v: Any) -> Any:
        v = scanned(v)
        return lax.while_loop(lambda c: lib.psum(c, "x").sum() < 0, lambda c: of_int(c) + c, v)

    def parts(v: Any) -> Any:
        scattered = lib.psum_scatter(v, "x", scatter_dimension=1, tiled=True)
        whole = lib.all_gather(scattered, "x", axis=1, tiled=True)
        return whole + lib.all_gather(v[:, 0], "x").sum()

    def solved(v: Any) -> Any:
        def half(_: Any, b: Any) -> Any:
            return lib.psum(b, "x") / (2 * N)

        return lax.custom_linear_solve(lambda u: 2 * lib.psum(u, "x"), v, half, half)

    return {
        "plain": lambda v: lib.psum(v, "x") + lib.pmean(v * 2, "x"),
        "unused": lambda v: (lib.psum(v, "x"), lib.psum((v * 2, v * 3), "x")[1])[1],
        "twice": lambda v: twice_called(twice_called(v)) + twice_called(v[:, :4])[:, :1],
        "loops": loops,
        "cond": lambda v: lax.cond(
            v[0, 0] > 0, lambda u: lib.psum(u, "x"), lambda u: scanned(lib.psum(u * 2, "x")), v
        ),
        "remat": jax.checkpoint(lambda v: jnp.sin(lib.psum(v, "x")) * lib.psum(v * v, "x")),
        "custom_vjp": custom,
        "parts": parts,
        "solved": solved,
        "vmap": lambda v: jax.vmap(lambda u: lib.psum(u, "x") + parts(u[None])[0])(v),
    }
