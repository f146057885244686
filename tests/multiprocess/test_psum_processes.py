"""Cases and rows of the contract with one process per device, in one start of the processes."""

import itertools
from collections.abc import Sequence

import pytest
from cases_of_processes import CASES
from multiprocess_ranks import check_case, outcome_of_cases, worlds

pytestmark = pytest.mark.one_version

# Of these functions and modules the quick tier runs some cases: with two processes, and with four,
# which get fewer, because each process compiles each program. A transformation ends before a
# program is lowered, so the number of processes matters little to it.
QUICK: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "every_dtype_and_count": (
        (
            *("float32-one_shot", "bfloat16-two_shot", "int8-one_shot", "int8-all_to_all"),
            *("float64-psum_scatter", "bfloat16-psum_scatter", "int8-all_gather"),
        ),
        ("bfloat16-two_shot", "float64-psum_scatter"),
    ),
    "segments_of_every_dtype": (("psum-float32", "all_to_all-bfloat16"), ("psum-bfloat16",)),
    "random_program_in_segments": (("1",), ()),
    "trees": (("two_shot-2",), ("two_shot-2",)),
    "trees_in_segments": (("",), ()),
    "sums_of_few_rows": (("17",), ()),
    "random_program": ((), ("4",)),
    "random_permutes": (("0",), ()),
    "ragged_of_random_tables": (("2-0", "2-1", "2-3"), ("4-3",)),
    "ragged_of_tables_in_a_loop": (("2",), ()),
    "experts_of_random_routings": (("2-1", "2-4"), ("4-3",)),
    "experts_in_a_loop": (("2",), ("4",)),
    "random_programs_in_turn": ((), ()),
    "rewritten_program": ((), ()),
    "independent_calls_of_unequal_cost": (("2",), ()),
    "beside_lax": (("psum",), ("psum",)),
    "input_overwritten": (("psum", "all_to_all"), ("psum", "all_to_all")),
    "results_amid_other_data": (("int8",), ()),
    "results_that_a_scan_stacks": ((), ()),
    "special_values": (("two_shot", "all_gather"), ("two_shot", "all_gather")),
    "word_of_no_data": (("ppermute",), ("ppermute",)),
    "sums_on_two_nodes": ((), ("shared_memory",)),
    "contract": (
        ("cond", "extremes-in-gradients"),
        ("device-order-changed", "several-axes", "permutations"),
    ),
    "norms": (("of_every_dtype_and_length-bfloat16-two_shot-rms_norm",), ()),
}


def is_quick(name: str, world: int) -> bool:
    """Whether the quick tier runs a case in `world` processes (conftest.py).

    Of other functions those that need four devices run in four processes, the others in two.
    """
    separator = "_" if name.startswith(("contract_", "norms_")) else "-"
    function, _, parameters = name.partition(separator)
    if function in QUICK:
        return parameters in QUICK[function][world > 2]
    return CASES[name].devices <= 2 if world == 2 else CASES[name].devices >= 4


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
    for function, of_worlds in QUICK.items():
        separator = "_" if function in ("contract", "norms") else "-"
        for parameters in filter(None, itertools.chain(*of_worlds)):
            assert f"{function}{separator}{parameters}" in CASES
