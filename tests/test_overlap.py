"""Overlapped collective matmuls in one process that has all GPUs."""

import cases_of_overlap
import pytest
from devices import module_needs_gpus, need_devices, need_overlap


@pytest.mark.parametrize("name", cases_of_overlap.CASES)
def test_case(name: str) -> None:
    need_overlap()
    case = cases_of_overlap.CASES[name]
    need_devices(case.devices)
    case.run()


module_needs_gpus()  # last, so that all above is run without a GPU, too
