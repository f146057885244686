"""Lowers programs for GPUs that are not there."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def compare_lowered() -> ModuleType:
    """tools/compare_lowered.py, which has GPUs that are not there."""
    path = Path(__file__).parent.parent / "tools" / "compare_lowered.py"
    spec = importlib.util.spec_from_file_location("compare_lowered", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare_lowered"] = module  # dataclasses look the module up
    spec.loader.exec_module(module)
    return module
