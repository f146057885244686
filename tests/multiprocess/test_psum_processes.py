"""The cases of the collectives with one process per device, in one start of the processes."""

import cases
import pytest
from multiprocess_ranks import check_case, outcome_of_cases, worlds

# The quick tier runs these of the cases that come in many dtypes or transformations. A
# transformation ends before a program is lowered, so the number of processes matters little to it.
# Each process compiles each program: four processes get fewer cases.
QUICK = {
    "like_lax": ("forward-True", "grad_scan-True", "runtime_cond-False", "vmap_of_grad-True"),
    "parts_like_lax": (
        *("layer-True", "grad_scan-True", "pmean-False", "grad_axis2_tiled-True"),
        "grad_exchanged-True",
    ),
    "gradients_of_matmuls": ("True-reduce_scatter", "False-all_reduce"),
    "every_dtype_and_count": (
        *("float32-one_shot", "bfloat16-two_shot", "int8-one_shot", "float16-one_shot"),
        *("int64-two_shot", "uint32-two_shot"),
    ),
    "every_dtype_and_count_of_parts": (
        *("float64-psum_scatter", "bfloat16-psum_scatter", "uint8-psum_scatter"),
        *("int8-all_gather", "float16-all_gather", "uint64-all_gather", "int8-all_to_all"),
    ),
    "segments_of_every_dtype": (
        *("psum-float32", "psum_scatter-int8", "all_gather-float32", "all_to_all-bfloat16"),
    ),
    "random_program_in_segments": ("1",),
    "delays_in_segments": ("psum_scatter",),
    "trees": ("auto-300", "two_shot-2"),
    "exact_matmuls": ("129-bfloat16", "1-float32"),
    "random_program": ("2", "4"),
}
QUICK_OF_FOUR = QUICK | {
    "like_lax": ("forward-True", "runtime_cond-False"),
    "parts_like_lax": ("layer-True", "grad_axis2_tiled-True"),
    "matmuls_on_a_data_and_tensor_mesh": ("True",),
    "every_dtype_and_count": ("float32-one_shot", "bfloat16-two_shot", "int8-one_shot"),
    "every_dtype_and_count_of_parts": ("float64-psum_scatter", "int8-all_gather"),
    "segments_of_every_dtype": ("psum-bfloat16",),
    "trees_in_segments": (),
    "delays_in_segments": ("psum",),
    "graphs_of_segments_in_turn": (),
    "trees": ("two_shot-2",),
    "exact_matmuls": ("129-bfloat16",),
    "random_program": ("4",),
    "independent_calls_of_unequal_cost": ("4",),
    "results_amid_other_data": ("bfloat16",),
    "epochs_wrap": ("3",),
    "chain_with_delays": ("psum", "psum_scatter", "all_to_all"),
    "input_overwritten": ("psum", "all_gather"),
}


def is_quick(name: str, world: int) -> bool:
    """Whether the quick tier runs a case in `world` processes (conftest.py).

    Four processes run the cases above, and those that need four devices.
    """
    function, _, parameters = name.partition("-")
    if world == 2:
        return parameters in QUICK.get(function, (parameters,))
    chosen = QUICK_OF_FOUR.get(function)
    return cases.CASES[name].devices >= 4 if chosen is None else parameters in chosen


@pytest.fixture(scope="module", params=worlds(), ids=lambda n: f"{n}_processes")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    log_dir = tmp_path_factory.mktemp("cases") / "logs"
    return outcome_of_cases(request, "cases", request.param, log_dir)


@pytest.mark.parametrize("name", cases.CASES)
def test_case(name: str, outcome: str) -> None:
    check_case(name, outcome)


def test_quick_cases_exist() -> None:
    for quick in (QUICK, QUICK_OF_FOUR):
        for function, parameters in quick.items():
            assert {f"{function}-{chosen}" for chosen in parameters} <= cases.CASES.keys()
