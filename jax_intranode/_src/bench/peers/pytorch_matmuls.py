"""PyTorch's collective matmuls: NCCL beside a matmul, and the fused ones of its symmetric memory.

For pytorch_rank.py; imports neither JAX nor us.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# Matmuls in one graph.
CALLS = 4

# Rows of each result that are checked.
_CHECKED_ROWS = 16


def libraries(told: dict[str, Any]) -> tuple[str, ...]:
    """Returns what can run the operation; PyTorch has no fused matmul and all-reduce."""
    fused = told["operation"] != "matmul_all_reduce"
    return ("torch nccl", "torch fused") if fused else ("torch nccl",)


def label(shape: list[int], dtype: Any) -> str:
    """Returns the text of the progress line."""
    del dtype
    return " x ".join(map(str, shape))


def keys(shape: list[int], dtype: Any) -> dict[str, int]:
    """Returns what a row says of the shape."""
    del dtype
    return dict(zip("mkn", shape, strict=True))


def prepare(
    library: str, told: dict[str, Any], shape: list[int], dtype: Any, device: Any
) -> tuple[Callable[[], Any], int]:
    """Makes a call on random operands, uniform from -1 to 1, and checks it.

    Args:
        library: one of `libraries`.
        told: what to measure: "operation" and "backward".
        shape: rows, contracted and columns of the matmul on one device.
        dtype: the dtype.
        device: this rank's device.

    Returns:
        The call, and the number of wrong elements on all ranks.
    """
    m, k, n = shape
    gathers = told["operation"] == "all_gather_matmul"
    scatters = told["operation"] == "matmul_reduce_scatter"
    size, fused = dist.get_world_size(), library == "torch fused"
    generator = torch.Generator(device).manual_seed(dist.get_rank())

    def random(*sizes: int) -> Any:
        values = torch.empty(sizes, dtype=dtype, device=device)
        return values.uniform_(-1, 1, generator=generator)

    x, w = random(m // size if gathers else m, k), random(k, n)
    if not told["backward"]:
        if gathers:
            gather = _gather_matmul(x, w, fused)
            return _checked(lambda: [gather()[1]], [(_gathered(x), w, False)], scatters)
        if scatters:
            scatter = _matmul_scatter(x, w, fused)
            return _checked(lambda: [scatter()], [(x, w, True)], scatters)
        return _checked(lambda: [_summed(x @ w)], [(x, w, True)], scatters)

    ct = random(m // size if scatters else m, n)
    if gathers:
        # Kept from the forward pass.
        whole_x = _gathered(x)
        scatter = _matmul_scatter(ct, w.t(), fused)
        return _checked(
            lambda: [scatter(), whole_x.t() @ ct],
            [(ct, w.t(), True), (whole_x.t(), ct, False)],
            True,
        )
    if scatters:
        gather = _gather_matmul(ct, w.t(), fused)

        def both() -> list[Any]:
            whole_ct, dx = gather()
            return [dx, x.t() @ whole_ct]

        whole_ct = _gathered(ct)
    else:

        def both() -> list[Any]:
            whole_ct = _summed(ct.clone())
            return [whole_ct @ w.t(), x.t() @ whole_ct]

        whole_ct = _summed(ct.clone())
    return _checked(both, [(whole_ct, w.t(), False), (x.t(), whole_ct, False)], False)


# What the calls are made of.


def _gathered(x: Any) -> Any:
    """Gathers the rows of all ranks."""
    rows = dist.get_world_size() * x.shape[0]
    whole = torch.empty((rows, x.shape[1]), dtype=x.dtype, device=x.device)
    dist.all_gather_into_tensor(whole, x)
    return whole


def _summed(x: Any) -> Any:
    """Sums over all ranks, in place."""
    dist.all_reduce(x)
    return x


def _gather_matmul(x: Any, w: Any, fused: bool) -> Callable[[], tuple[Any, Any]]:
    """Returns a call that gives the gathered x, and its product with w."""
    group = dist.group.WORLD.group_name

    def by_nccl() -> tuple[Any, Any]:
        whole = _gathered(x)
        return whole, whole @ w

    def by_symmetric_memory() -> tuple[Any, Any]:
        whole, products = torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, group)
        return whole, products[0]

    return by_symmetric_memory if fused else by_nccl


def _matmul_scatter(x: Any, w: Any, fused: bool) -> Callable[[], Any]:
    """Returns a call that gives this rank's rows of the sum of all ranks' products."""
    group = dist.group.WORLD.group_name

    def by_nccl() -> Any:
        rows = x.shape[0] // dist.get_world_size()
        part = torch.empty((rows, w.shape[1]), dtype=x.dtype, device=x.device)
        dist.reduce_scatter_tensor(part, x @ w)
        return part

    def by_symmetric_memory() -> Any:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group)

    return by_symmetric_memory if fused else by_nccl


def _checked(
    call: Callable[[], list[Any]], products: list[tuple[Any, Any, bool]], first_is_part: bool
) -> tuple[Callable[[], Any], int]:
    """Returns the call, and how many elements of some rows of its results are wrong.

    Args:
        call: gives the results.
        products: for each result, its two matrices, and whether all ranks' products are added.
        first_is_part: whether a rank has its part of the rows of the first result only.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    device = products[0][0].device
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for position, (got, (left, right, summed)) in enumerate(zip(call(), products, strict=True)):
        # In float32, as torch.backends.cuda.matmul.allow_tf32 is off unless it is set.
        parts = size if first_is_part and position == 0 else 1
        rows = torch.linspace(0, got.shape[0] - 1, _CHECKED_ROWS, device=device).long()
        of_all = torch.cat([part * got.shape[0] + rows for part in range(parts)])
        expected = left[of_all].float() @ right.float()
        if summed:
            dist.all_reduce(expected)
        if parts > 1:
            expected = expected.chunk(parts)[rank]
        eps = max(torch.finfo(got.dtype).eps, 2.0**-10)
        allowed = size * eps * (expected.abs() + 2 * expected.square().mean().sqrt())
        wrong += ((got[rows].float() - expected).abs() <= allowed).logical_not().sum()
    dist.all_reduce(wrong)
    return call, int(wrong.item())
