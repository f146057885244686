"""Cases and rows of the contract with one process per device, in one start of the processes."""

import pytest
from cases_of_processes import CASES
from multiprocess_ranks import check_case, outcome_of_cases, worlds

pytestmark = pytest.mark.one_version

# The quick tier runs these of the cases that come in many dtypes, and these rows of the contract: a
# transformation ends before a program is lowered, so the number of processes matters little to it.
# Each process compiles each program: four processes get fewer cases.
QUICK = {
    "every_dtype_and_count": (
        *("float32-one_shot", "bfloat16-two_shot", "int8-one_shot", "int8-all_to_all"),
        *("float64-psum_scatter", "bfloat16-psum_scatter", "int8-all_gather"),
    ),
    "segments_of_every_dtype": (*("psum-float32", "all_to_all-bfloat16"),),
    "random_program_in_segments": ("1",),
    "trees": ("two_shot-2",),
    "sums_of_few_rows": ("17",),
    "random_program": (),
    "random_permutes": ("0",),
    "ragged_of_random_tables": ("2-0", "2-1", "2-3"),
    "ragged_of_tables_in_a_loop": ("2",),
    "experts_of_random_routings": ("2-1", "2-4"),
    "random_programs_in_turn": (),
    "rewritten_program": (),
    "independent_calls_of_unequal_cost": ("2",),
    "input_overwritten": ("psum", "all_to_all"),
    "results_amid_other_data": ("int8",),
    "results_that_a_scan_stacks": (),
    "special_values": ("two_shot", "all_gather"),
    "word_of_no_data": ("ppermute",),
}
QUICK_OF_FOUR = QUICK | {
    "every_dtype_and_count": ("bfloat16-two_shot", "float64-psum_scatter"),
    "segments_of_every_dtype": ("psum-bfloat16",),
    "trees_in_segments": (),
    "random_program_in_segments": (),
    "random_program": ("4",),
    "sums_of_few_rows": (),
    "independent_calls_of_unequal_cost": (),
    "results_amid_other_data": (),
    "random_permutes": (),
    "ragged_of_random_tables": ("4-3",),
    "ragged_of_tables_in_a_loop": (),
    "experts_of_random_routings": ("4-3",),
    "experts_in_a_loop": (),
    "sums_on_two_nodes": ("shared_memory",),
}


# Rows of the contract, of 2 devices and of 4, and cases of norms.
QUICK_ROWS = {
    2: ("cond", "extremes-in-gradients"),
    4: ("device-order-changed", "several-axes", "permutations"),
}
# What processes add to the cases of one process: data that arrive while a phase waits.
QUICK_NORMS = ("every_dtype_and_length-bfloat16-two_shot-rms_norm",)


def is_quick(name: str, world: int) -> bool:
    """Whether the quick tier runs a case in `world` processes (conftest.py).

    Four processes run the cases above, and those that need four devices.
    """
    if name.startswith("contract_"):
        return name.removeprefix("contract_") in QUICK_ROWS.get(world, ())
    if name.startswith("norm_"):
        return world == 2 and name.removeprefix("norm_") in QUICK_NORMS
    function, _, parameters = name.partition("-")
    if world == 2:
        return parameters in QUICK.get(function, (parameters,)) and CASES[name].devices <= 2
    chosen = QUICK_OF_FOUR.get(function)
    return CASES[name].devices >= 4 if chosen is None else parameters in chosen


@pytest.fixture(scope="module", params=worlds(), ids=lambda n: f"{n}_processes")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    log_dir = tmp_path_factory.mktemp("cases") / "logs"
    # The full tier has many more cases.
    return outcome_of_cases(request, "cases_of_processes", request.param, log_dir, timeout_s=850)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, outcome: str) -> None:
    check_case(name, outcome)


def test_quick_cases_exist() -> None:
    for quick in (QUICK, QUICK_OF_FOUR):
        for function, parameters in quick.items():
            assert {f"{function}-{chosen}" for chosen in parameters} <= CASES.keys()
    rows = {f"contract_{name}" for names in QUICK_ROWS.values() for name in names}
    assert rows | {f"norm_{name}" for name in QUICK_NORMS} <= CASES.keys()
