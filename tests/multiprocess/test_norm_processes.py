"""The cases of psum_residual_rms_norm and its relatives with one process per device."""

import cases_of_norms
import pytest
from multiprocess_ranks import check_case, outcome_of_cases, worlds

# What processes add to the cases of one process: data that arrive while a phase waits.
QUICK = (
    *("every_dtype_and_length-bfloat16-two_shot-rms_norm", "batch_invariance-bfloat16"),
    *("parts_of_the_rows-float32-layer_norm", "calls_in_a_loop"),
)


def is_quick(name: str, world: int) -> bool:
    """Whether the quick tier runs a case in `world` processes (conftest.py)."""
    return world == 2 and name in QUICK


@pytest.fixture(scope="module", params=worlds(), ids=lambda n: f"{n}_processes")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    log_dir = tmp_path_factory.mktemp("cases") / "logs"
    return outcome_of_cases(request, "cases_of_norms", request.param, log_dir)


@pytest.mark.parametrize("name", cases_of_norms.CASES)
def test_case(name: str, outcome: str) -> None:
    check_case(name, outcome)


def test_quick_cases_exist() -> None:
    assert set(QUICK) <= cases_of_norms.CASES.keys()
