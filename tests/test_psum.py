"""The cases of the collectives, and programs with psum, in one process with all devices."""

import re
from typing import Any

import cases
import cases_of_collectives  # noqa: F401
import cases_of_experts  # noqa: F401
import cases_of_matmuls  # noqa: F401
import cases_of_norms  # noqa: F401
import cases_of_ragged  # noqa: F401
import cases_of_segments  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_programs  # noqa: F401
from devices import need_devices
from jax.sharding import PartitionSpec as P
from tiers import full

import jax_intranode
from jax_intranode._src.ops import all_reduce

pytestmark = pytest.mark.one_version

# These differ from cases that the quick tier runs in nothing but an algorithm or in a number.
FULL = (
    *("trees-auto-300", "trees-one_shot-300", "trees-two_shot-300", "random_program-0"),
    "random_program_in_segments-0",
    *("random_program-2", "random_program-3"),
    *("independent_calls_of_unequal_cost-8", "random_program-1"),
)
# Of these cases the quick tier runs those that end so.
QUICK = {
    "segments_of_every_dtype": (
        *("psum-bfloat16", "psum-int64", "psum_scatter-float64", "all_gather-bfloat16"),
        "all_to_all-float32",
    ),
    "ragged_of_random_tables": ("2-1", "2-3", "8-0", "8-2", "8-3"),
    "ragged_of_tables_in_a_loop": ("-3",),
    "experts_of_random_routings": ("2-1", "2-4", "3-2", "8-0", "8-3"),
    "experts_in_a_loop": ("-3",),
    "random_permutes": (),
    "rewritten_program": ("-0", "-2", "-13"),
    "norms_of_every_dtype_and_length": (
        *("bfloat16-one_shot-rms_norm", "float32-two_shot-layer_norm"),
        "float16-one_shot-layer_norm",
    ),
    "norms_of_long_rows": ("bfloat16-16384-one_shot",),
    "norms_of_every_world_size": ("3-two_shot", "8-one_shot"),
    "norms_of_unusual_values": ("bfloat16",),
    "norms_of_batches": ("bfloat16",),
    "norms_of_parts": ("bfloat16-rms_norm",),
}


def is_quick(name: str) -> bool:
    return name not in FULL and name.endswith(QUICK.get(name.partition("-")[0], ("",)))


@pytest.mark.parametrize("name", [name if is_quick(name) else full(name) for name in cases.CASES])
def test_case(name: str) -> None:
    case = cases.CASES[name]
    need_devices(case.devices)
    cases.free_regions()
    case.run()


def test_packs_of_several_arrays_are_counted_in_32_bits() -> None:
    need_devices(2)
    if jax.devices()[0].platform == "gpu":
        pytest.skip("on GPUs jax.lax sums more than 64 GiB")
    shapes = [(10 << 30,), (2 << 30,), (10 << 30,)]  # 40, 8 and 40 GiB
    with cases.forced("two_shot"):
        parts = all_reduce.operations("psum", cases.line(2), ("x",), shapes, np.dtype("float32"))
    found = [(arrays, chosen.algorithm) for arrays, chosen in parts]
    assert found == [([0, 1], "two_shot"), ([2], "two_shot")]


def test_unused_results_are_not_summed() -> None:
    n = len(jax.devices())

    def body(v: jax.Array) -> jax.Array:
        return jax_intranode.psum((v, v * 2, v * 3), "x")[1]

    f = jax.shard_map(body, mesh=cases.line(), in_specs=P("x"), out_specs=P())
    text = jax.jit(lambda v: jax.vmap(f)(v[None])).lower(jnp.zeros((n, 100))).as_text()
    (call,) = [line for line in text.splitlines() if "@jax_intranode_psum" in line]
    assert call.count("tensor<1x1x100xf32>") == 2, call  # one operand, one result


@pytest.mark.parametrize(("split", "concat", "most"), [(0, 0, 0), (0, 1, 1), (1, 0, 1)])
def test_all_to_all_is_transposed_only_where_it_must(split: int, concat: int, most: int) -> None:
    def body(v: Any) -> Any:
        return jax_intranode.all_to_all(v, "x", split, concat, tiled=True)

    need_devices(2)
    mesh = cases.line(2)
    x = cases.put(mesh, P("x"), np.ones((8, 6), np.float32))
    text = cases.compiled_of_ours(cases.sharded(body, mesh, P("x"), P("x")), x).as_text()
    assert len(re.findall(r" transpose\(", text)) <= most, text
