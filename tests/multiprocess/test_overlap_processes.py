"""Overlapped collective matmuls with one process per GPU, on any number of hardware queues."""

import cases_of_overlap
import pytest
from devices import module_needs_gpus, need_overlap, need_ranks
from multiprocess_ranks import check_case, outcome_of_cases, worlds


@pytest.fixture(
    scope="module",
    params=[(n, 8) for n in worlds()] + [(2, 1), (2, 32)],
    ids=lambda p: f"{p[0]}_processes-{p[1]}_queues",
)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    world, queues = request.param
    need_overlap()
    need_ranks(world)
    return outcome_of_cases(
        request,
        "cases_of_overlap",
        world,
        tmp_path_factory.mktemp("cases") / "logs",
        {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues)},
    )


@pytest.mark.parametrize("name", cases_of_overlap.CASES)
def test_case(name: str, outcome: str) -> None:
    check_case(name, outcome)


module_needs_gpus()  # last, so that all above is run without a GPU, too
