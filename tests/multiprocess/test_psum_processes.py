"""The cases of the collectives with one process per device, in one start of the processes."""

import cases
import pytest
from multiprocess_ranks import check_case, outcome_of_cases, worlds


@pytest.fixture(scope="module", params=worlds(), ids=lambda n: f"{n}_processes")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    log_dir = tmp_path_factory.mktemp("cases") / "logs"
    return outcome_of_cases(request, "cases", request.param, log_dir)


@pytest.mark.parametrize("name", cases.CASES)
def test_case(name: str, outcome: str) -> None:
    check_case(name, outcome)
