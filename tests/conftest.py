"""Which devices and how many processes the tests use.

The tests use all GPUs of the machine, or else 8 CPU devices. JAX_INTRANODE_REQUIRE_GPUS=n makes the
run fail where JAX finds fewer than n GPUs, and turns each skip for want of GPUs into a failure.

Without GPUs, one worker per core runs the tests (pytest-xdist). A selection of files or names runs
in one process, and so does everything on GPUs, because each test uses all of them.
"""

import dataclasses
import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling

ROOT = Path(__file__).resolve().parent.parent
# More workers gain little: the longest groups of tests take as long as all others together.
MOST_WORKERS = 4
# One worker gets all tests of a group, which share something expensive: processes, native programs,
# or compiled programs.
GROUPS = re.compile(
    r"[\[-](\d+_processes|(?:plain|thread|address)-\w+)[-\]]"
    r"|test_(?:programs|own_kernels|ordinary_programs|faults|failures|readme)\.py"
    r"|\[(?:persistent-cache|serialized-executable)"
)

sys.path.append(str(ROOT / "tools"))

# `python -m pytest` puts the checkout on the path. Unless native modules were built in it, the
# tests need the installed package.
if not list((ROOT / "jax_intranode").glob("_host.*")):
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
try:
    import jax_intranode
except ModuleNotFoundError as error:
    raise pytest.UsageError(f"{error}. Install the package: pip install '.[test]'") from error

import jax  # noqa: E402
from bench_settings import run_here as run_here  # noqa: E402
from devices import REQUIRED_GPUS, need_devices  # noqa: E402

from jax_intranode._src.group import rendezvous  # noqa: E402
from jax_intranode._src.selection import config  # noqa: E402

# Tests fail by the message of an operation that waits too long, and not by pytest's own limit.
os.environ.setdefault("JAX_INTRANODE_TIMEOUT_S", "60")
jax.config.update("jax_num_cpu_devices", 8)
# A tenth of the time goes into garbage collections, and into cutting JAX's frames from tracebacks.
jax.config.update("jax_traceback_filtering", "off")
gc.freeze()
gc.set_threshold(100_000, 50, 100)


@pytest.fixture(scope="module", autouse=True)
def communicators() -> Iterator[None]:
    """Frees the regions of the slab: the files together use more partitions than there are.

    Only after files that use several, because what JAX has cached is compiled again then.
    """
    yield
    if any(len(r.communicators) > 2 for r in rendezvous._all.values()):
        jax.clear_caches()  # programs from before do not run after shutdown()
        jax_intranode.shutdown()


@pytest.fixture
def fresh() -> Iterator[None]:
    """No rendezvous has taken place before, and later tests have their own."""
    jax_intranode.shutdown()
    jax.clear_caches()
    yield
    jax_intranode.shutdown()
    jax.clear_caches()


@pytest.fixture
def not_installed() -> Iterator[None]:
    """Two devices, and in the end install() is undone."""
    need_devices(2)
    yield
    jax_intranode.uninstall()


@pytest.fixture
def norms_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are fused whatever the table says."""
    always = dataclasses.replace(config.get(), fuse_norms="always")
    monkeypatch.setattr(config, "get", lambda: always)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the cases of the full tier, too")


def pytest_report_header() -> str:
    devices = jax.devices()
    return f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}"


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "full: only the full tier runs this (pytest --full)",
        "one_version: .ci/run leaves it out with the oldest Python: values, C++, commands, pages",
    ):
        config.addinivalue_line("markers", marker)
    gpus = sum(d.platform == "gpu" for d in jax.devices())
    # XLA takes long to optimize CPU code, of which the handlers that are tested are no part. The
    # full tier runs with the optimizations. Processes that tests start inherit the variable.
    quick = gpus == 0 and not config.getoption("full")
    if quick and os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "1":
        jax.config.update("jax_disable_most_optimizations", True)
    if gpus < REQUIRED_GPUS:
        pytest.exit(
            f"JAX_INTRANODE_REQUIRE_GPUS={REQUIRED_GPUS}, but JAX sees {gpus} GPUs", returncode=1
        )


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    selected = config.option.keyword or not all(Path(arg).is_dir() for arg in config.args)
    if selected or REQUIRED_GPUS or jax.devices()[0].platform == "gpu":
        return 0
    cores = len(os.sched_getaffinity(0))
    return min(cores, MOST_WORKERS) if cores > 1 else 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("full"):
        of_full_tier = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=of_full_tier)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


class Groups(LoadGroupScheduling):
    """Groups tests by their names. pytest-xdist 3.8 ignores its marker for it with pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        found = GROUPS.search(nodeid)
        return f"{nodeid.partition('::')[0]} {found[1] or ''}" if found else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups | None:
    return Groups(config, log) if config.getvalue("dist") == "loadgroup" else None
