"""Checks and times one row of a collective matmul's table."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

import jax_intranode
from jax_intranode._src.command_line.bench import oracle, timing
from jax_intranode._src.command_line.bench.operations import MATMULS, Matmul, Shape, flops
from jax_intranode._src.command_line.bench.oracle import Data
from jax_intranode._src.command_line.bench.settings import Settings
from jax_intranode._src.group import rendezvous as rendezvous_lib
from jax_intranode._src.jax_private import hlo
from jax_intranode._src.selection import tuning
from jax_intranode._src.selection.overlap import choice
from jax_intranode._src.selection.overlap.plan import Plan
from jax_intranode._src.selection.overlap.profiles import H200, Profile

# A chain should take this long on a GPU. A repetition is CHAINS chains.
_CHAIN_S = 20e-3
_MAX_CHAIN = 64
CHAINS = 2
# The shortest time that a call is assumed to take.
_LEAST_CALL_S = 10e-6


def measure(
    settings: Settings, mesh: Mesh, dtype_name: str, shape: Shape
) -> tuple[dict[str, Any], str | None]:
    """Checks and times one shape of one dtype.

    Returns:
        The row (docs/measurements/json_file.md), and the reason if our call fell back to jax.lax.
    """
    if settings.plan is not None:
        unforced = dataclasses.replace(settings, plan=None)
        with choice.forced(Plan(**settings.plan)):
            return measure(unforced, mesh, dtype_name, shape)
    matmul, backward = MATMULS[settings.name], settings.backward
    dtype = np.dtype(jnp.dtype(dtype_name))
    label = f"{dtype.name}/{shape}/{backward}"

    data = oracle.make(matmul, shape, dtype, mesh)
    ours, by_lax = (_call(mesh, f, backward, data) for f in (matmul.ours, matmul.lax))
    chosen = jax_intranode.explain(ours.program(mesh))(ours.moving, *ours.fixed).own
    algorithms = {call.algorithm for call in chosen} or {"none"}
    plans = hlo.plans_in(ours.program(mesh).lower(ours.moving, *ours.fixed).as_text())
    fallback = next((call.reason for call in chosen if call.algorithm == "lax"), None)

    checked = oracle.fields(label, *_check(mesh, matmul, backward, data, ours, by_lax))
    length = chain_length(settings, dtype_name, shape)
    nothing = overhead_s(mesh, settings, ours, length)
    calls = {"ours": ours, "lax": by_lax, "alone": _alone(data, backward)}
    runs = {name: chain(mesh, call, length).run for name, call in calls.items()}
    shipped = None
    if tuning.current() is not None and settings.plan is None:
        with tuning.using(None):
            as_shipped = _call(mesh, matmul.ours, backward, data)
            lowered = as_shipped.program(mesh).lower(as_shipped.moving, *as_shipped.fixed)
            runs["shipped"] = chain(mesh, as_shipped, length).run
            runs["shipped"]()  # lowers it
        shipped = "other plan" if hlo.plans_in(lowered.as_text()) != plans else "same plan"
        del as_shipped, lowered
    del data, ours, by_lax, calls
    times, handler_calls = timing.compare(
        runs,
        mesh,
        settings,
        label,
        calls=CHAINS * length,
        untimed=repetitions_to_settle(settings, dtype_name, shape),
        overhead_s=nothing,
    )
    our_us, lax_us, alone_us = (times[name].p50 for name in ("ours", "lax", "alone"))
    bound = None
    if settings.platform == "gpu":
        received = matmul.received_bytes(shape, mesh.size, dtype.itemsize)
        bound = max(alone_us, 1e6 * received / profile_of(mesh).link_bound_bytes_per_s)
    row = {
        "operation": settings.name,
        "backward": backward,
        "m": shape.m,
        "k": shape.k,
        "n": shape.n,
        "dtype": dtype.name,
        "mode": settings.mode,
        "algorithm": algorithms.pop() if len(algorithms) == 1 else "mixed",
        "reason": "; ".join(dict.fromkeys(call.reason for call in chosen)),
        "plans": plans,
        "chain": length,
        **timing.fields(times),
        "tflops": flops(shape, backward) / our_us / 1e6,
        "wrong": checked["wrong"],
        "alone_time_us": alone_us,
        "bound_us": bound,
        "share": None if bound is None else bound / our_us,
        "lax_share": None if bound is None else bound / lax_us,
        **checked,
        **timing.draw_fields(times, "ours", "lax", "alone"),
        "handler_calls": handler_calls,
        "shipped_plan": shipped,
        "shipped_time_us": None if shipped is None else times["shipped"].p50,
    }
    return row, fallback


# Calls.


@dataclass(frozen=True)
class Call:
    """A function of per-device arrays that returns a list of arrays, and its operands.

    A chain changes the first one, `moving`.
    """

    function: Callable[..., list[Any]]
    moving: Any
    fixed: tuple[Any, ...]

    def program(self, mesh: Mesh) -> Any:
        return timing.program(mesh, self.function)

    def results(self, mesh: Mesh) -> list[Any]:
        return self.program(mesh)(self.moving, *self.fixed)


def _call(mesh: Mesh, function: Callable[[Any, Any], Any], backward: bool, data: Data) -> Call:
    """Returns a collective matmul, or its backward pass given the forward pass's residuals."""
    if not backward:
        return Call(lambda x, w: [function(x, w)], data.x, (data.w,))
    forward = timing.program(mesh, lambda x, w: jax.vjp(function, x, w)[1])
    return Call(lambda ct, pull: list(pull(ct)), data.ct, (forward(data.x, data.w),))


def _alone(data: Data, backward: bool) -> Call:
    """Returns the products without communication, of operands that are already gathered."""

    def multiply(moving: Any, rest: Data) -> list[Any]:
        whole = rest._replace(**{name: moving})
        return [a @ b for a, b in oracle.products(whole, backward)]

    name = "whole_ct" if backward else "whole_x"
    rest = data._replace(**dict.fromkeys(("x", "ct", "whole_ct", name)))
    return Call(multiply, getattr(data, name), (rest,))


def _nothing(mesh: Mesh, call: Call) -> Call:
    """Returns a call that does nothing, which measures a chain's overhead.

    The overhead is the start of the chain and the change of the operand. The chain of this call is
    executed once, where other chains are executed `CHAINS` times, because the host starts the
    second one while the first one runs. The overhead is not subtracted on CPUs, where it is smaller
    than the noise.
    """
    element = timing.program(mesh, lambda x: x[:1, :1])(call.moving)
    return Call(lambda _, result: [result], call.moving, (element,))


def _check(
    mesh: Mesh, matmul: Matmul, backward: bool, data: Data, ours: Call, by_lax: Call
) -> tuple[tuple[int, float], tuple[int, float]]:
    """Returns the wrong elements and the error of our results, and those of lax's."""
    got, expected = ours.results(mesh), by_lax.results(mesh)
    (wrong, error), of_lax = (
        oracle.compare_sample(mesh, matmul, backward, data, results) for results in (got, expected)
    )
    wrong += oracle.count_unlike(mesh, got, expected, matmul.results(backward))
    if matmul.gathers and not backward:
        wrong += oracle.count_wrong_gathered(mesh, data, matmul)
    return (wrong, error), of_lax


# Chains.


def overhead_s(mesh: Mesh, settings: Settings, call: Call, length: int) -> float:
    """Returns the seconds of a repetition that belong to no call: 0 on CPUs (see `_nothing`)."""
    if settings.platform == "cpu":
        return 0.0
    empty = chain(mesh, _nothing(mesh, call), length, executions=1)
    (seconds,), _ = timing.take_turns([empty.run], mesh, settings)
    return float(np.median(seconds))


def chain(mesh: Mesh, call: Call, length: int, executions: int = CHAINS) -> timing.Chain:
    """Returns a chain of calls, each of which depends on the previous one."""

    def link(moving: Any, *fixed: Any) -> Any:
        return _moved(moving, call.function(moving, *fixed))

    return timing.Chain(mesh, link, call.moving, call.fixed, length, executions)


def _moved(x: Any, results: list[Any]) -> Any:
    """Returns the operand with one element, changed in place, that depends on all results.

    The first barrier forces XLA to compute all elements of the results. The second one keeps XLA
    from moving the change of the operand into the computation of the next results.
    """
    results = lax.optimization_barrier(results)
    total = sum(result[:1, :1].astype(jnp.float32) for result in results)
    element = jnp.clip(total, -1, 1).astype(x.dtype)
    return lax.optimization_barrier(lax.dynamic_update_slice(x, element, (0, 0)))


def profile_of(mesh: Mesh) -> Profile:
    """Returns the constants of the GPUs; the H200's where none are known."""
    tuned = tuning.profile_for(device.device_kind for device in mesh.devices.flat)
    found = tuned or rendezvous_lib.rendezvous_of(mesh.devices.flat).shipped_profile
    return found if isinstance(found, Profile) else H200


def chain_length(settings: Settings, dtype_name: str, shape: Shape) -> int:
    """Returns the number of calls in a chain: enough to hide the cost of starting it."""
    if settings.chain is not None:
        return settings.chain
    if settings.platform == "cpu":
        return 2
    return min(max(round(_CHAIN_S / _call_s(settings, dtype_name, shape)), 2), _MAX_CHAIN)


def _call_s(settings: Settings, dtype_name: str, shape: Shape) -> float:
    """Returns a rough estimate of a call's seconds on a GPU, the same on all ranks."""
    itemsize = jnp.dtype(dtype_name).itemsize
    received = MATMULS[settings.name].received_bytes(shape, settings.devices, itemsize)
    rate = H200.matmul_flops * 2 / itemsize
    link_s = received / H200.link_bound_bytes_per_s
    seconds = max(flops(shape, settings.backward) / rate, link_s)
    return max(seconds, _LEAST_CALL_S)


def calls_in_a_row(settings: Settings, dtype_name: str, shape: Shape) -> int:
    return CHAINS * chain_length(settings, dtype_name, shape)


def repetitions_to_settle(settings: Settings, dtype_name: str, shape: Shape) -> int:
    """Returns the number of repetitions that take about `settle_ms`."""
    calls_s = calls_in_a_row(settings, dtype_name, shape) * _call_s(settings, dtype_name, shape)
    return math.ceil(1e-3 * settings.settle_ms / calls_s)
