"""Cases of calls of the handler of collective matmuls that lowering never makes."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import check, line, put, sharded
from jax.sharding import PartitionSpec as P
from overlapped_cases import (
    case,
    on_gpus,
    overlapped,
    wait_for_all,
)

import jax_intranode
from jax_intranode._src.group import partition as partition_lib
from jax_intranode._src.native import definitions, extension
from jax_intranode._src.selection.overlap.plan import Plan

# Wrong calls: what differs from a right call, and a part of the handler's error. The right call
# multiplies rows of 64 elements by the transpose of a matrix [72, 64] and computes its weight
# gradient. A name that is a field of the plan changes the plan.
_ROWS, _K, _N = 16, 64, 72
WRONG_CALLS = {
    "operation": ({"algorithm": 0}, "not a collective matmul of algorithm 0"),
    "no_pieces": ({"first_pieces": 0}, "first_pieces=0,"),
    "pieces": ({"last_pieces": 1000}, "last_pieces=1000,"),
    "tiles": ({"tile_columns": 100}, "tile_columns=100,"),
    "tiles_of_sum": (
        {"sums": True, "wgrads": 0, "wgrad": False, "tile_columns": 224},
        "tile_columns=224,",
    ),
    "tiles_of_wgrad": ({"tile_columns": 192}, "tile_columns=192,"),
    "band_pairs": ({"band_pairs": 0}, "band_pairs=0,"),
    "parts": ({"parts": 0}, ",parts=0,"),
    "rounds": ({"rounds": 0}, "rounds=0,"),
    "row_pairs_before_wgrad": ({"row_pairs_before_wgrad": -1}, "row_pairs_before_wgrad=-1"),
    "wgrad_tiles_last": ({"wgrad_tiles_last": -1}, "wgrad_tiles_last=-1"),
    "wgrads": ({"wgrads": -1}, "-1 weight gradients"),
    "wgrad_of_plan": ({"wgrad": False}, "wgrad=0,"),
    "wgrads_of_pipeline": ({"tile_columns": 0}, "1 weight gradients"),
    "not_transposed": ({"transposed": 0}, "1 weight gradients"),
    "gathered": ({"gathered": 1}, "1 weight gradients"),
    "two_wgrads": ({"wgrads": 2}, "3 operands and 3 results"),
    "no_wgrad": ({"wgrads": 0, "wgrad": False}, "w[1] is 72 x"),
    "axis": ({"axis": 1}, "axis 1 of 2 dimensions"),
    "dtype": ({"dtype": "float32"}, "takes bf16 and f16"),
    "length_of_k": ({"x": (_ROWS, 60)}, "its last dimension is 60; it must be a multiple of 8"),
    "k_of_matrix": ({"w": (_N, 128)}, "w[0] is 128 x 72"),
    "matrix": ({"w": (_N * _K,)}, "w is not a matrix"),
    "rows_of_product": ({"product": (_ROWS, _N)}, "its product has 1152 elements"),
    "rows_of_cotangent": ({"cotangent": (_ROWS, _N)}, "has 1152 elements for"),
    "columns_of_cotangent": ({"cotangent": (_N, _ROWS)}, "has 1152 elements for"),
    "shape_of_wgrad": ({"wgrad_result": (_K, _K)}, "0 has 4096 elements; it is 72 x 64"),
    "rows_of_sum": ({"sums": True, "x": (17, _K)}, "17 can't be split over"),
    "scratch_of_sum": ({"sums": True, "scratch": 8}, "scratch of 8 bytes; it needs"),
}
_RIGHT_PLAN = Plan(tile_columns=256, wgrad=True).attributes()


@case(wrong=tuple(WRONG_CALLS))
def overlapped_wrong_call_is_refused(wrong: str) -> None:
    """All ranks refuse a call that lowering never makes. A right call works before and after."""
    if not on_gpus():
        pytest.skip("needs GPUs; on CPUs there is no handler of collective matmuls")
    mesh = line()
    n = mesh.size
    x, w = (put(mesh, P(), np.ones((64, 64), jnp.bfloat16)) for _ in range(2))
    gather = sharded(lambda x, w: jax_intranode.all_gather_matmul(x, w, "x"), mesh, P(), P("x"))
    overlapped(gather, (x, w), "fused")  # now there is a communicator

    def call(sums: bool = False, dtype: str = "bfloat16", **changes: Any) -> list[Any]:
        operation = "matmul_reduce_scatter" if sums else "all_gather_matmul"
        part, whole = _ROWS, n * _ROWS
        groups = partition_lib.partition(mesh, ("x",))
        right = {
            "x": (whole if sums else part, _K),
            "w": (_N, _K),
            "cotangent": (whole, _N),
            "product": (part if sums else whole, _N),
            "wgrad_result": (_N, _K),
            "scratch": extension.module("gpu").MATMUL_SCRATCH_BYTES,
            "algorithm": definitions.ALGORITHMS.index(operation),
            "axis": 0,
            "transposed": 1,
            "gathered": 0,
            "wgrads": 1,
        }
        plan = {name: type(value)(changes.pop(name, value)) for name, value in _RIGHT_PLAN.items()}
        values = right | changes
        operands = [values.pop(name) for name in ("x", "w", "cotangent")]
        results = [jax.ShapeDtypeStruct(values.pop(s), dtype) for s in ("product", "wgrad_result")]
        results.append(jax.ShapeDtypeStruct((values.pop("scratch"),), np.uint8))
        axis = values.pop("axis")

        def f() -> list[Any]:
            found = jax.ffi.ffi_call("jax_intranode_collective_matmul", results)(
                *(jnp.ones(shape, dtype) for shape in operands),
                device_ids=np.array(groups.device_ids, np.int64),
                group_size=np.int64(groups.group_size),
                site="a wrong call",
                axis=np.int64(axis),
                plan=plan,
                **{name: np.int32(value) for name, value in values.items()},
            )
            return [v[None] for v in found[:2]]

        return jax.block_until_ready(jax.jit(sharded(f, mesh, (), P("x")))())

    def check_right_call() -> None:
        product, wgrad = call()
        check(product, np.full((n, n * _ROWS, _N), _K, jnp.bfloat16))
        check(wgrad, np.full((n, _N, _K), n * _ROWS, jnp.bfloat16))

    check_right_call()
    changes, says = WRONG_CALLS[wrong]
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(says)):
        call(**changes)
    wait_for_all(f"refused {wrong}")
    check_right_call()
