"""Runs JAX's own tests of shard_map, pmap and collectives without and with jax_intranode.install().

    python tools/jax_own_tests.py PATH [TEST_FILE...] [--out FOLDER]

PATH is a source tree of JAX, best of the version that is installed:

    git clone --depth 1 --branch jax-v0.10.2 https://github.com/jax-ml/jax PATH

Tests run against the installed jax, not against the sources in PATH. They use all GPUs, or else 8
CPU devices. There ragged_collective_test.py, which skips CPUs, runs with install() only. TEST_FILE
is a file of PATH/tests. Logs and outcomes are left in the folder.

Prints how many tests ran each of our operations, and the tests whose outcome differs; the last line
counts them. Exits with 1 if a test passes
without install() and does not pass with it, unless jax_own_tests_differ.txt lists it with a reason.
Exits with 2 if no test ran the kernels of this package.

Needs the package, pytest, pytest-xdist, pytest-timeout and absl-py. Takes about 10 minutes on 2
cores; JAX_DISABLE_MOST_OPTIMIZATIONS=1 makes the tests faster on CPUs. This file is a plugin of
pytest, too, which calls install() and notes outcomes.
"""

import argparse
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parent
# The first two have the tests of ppermute, pmax and pmin, too.
FILES = ("shard_map_test.py", "pmap_test.py", "ragged_collective_test.py", "overlap_test.py")


@dataclass
class Outcome:
    """What became of a test.

    Attributes:
        outcome: "passed", "failed" or "skipped".
        operations: how many operations of this package the devices ran, summed over devices.
        lowered: the names of those in the programs that it lowered.
    """

    outcome: str = "passed"
    operations: int = 0
    lowered: list[str] = field(default_factory=list)


# The plugin.


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares the options of the plugin."""
    parser.addoption("--install", action="store_true", help="call jax_intranode.install()")
    parser.addoption("--outcomes", type=Path, help="write the outcomes to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Turns the rewriting on, and collects outcomes in the process that gets those of all workers.

    Raises:
        RuntimeError: this version of JAX can't be rewritten.
    """
    if config.getoption("--install"):
        import jax_intranode

        jax_intranode.install()
    if config.getoption("--outcomes") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(config.getoption("--outcomes")))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Undoes a skip: lax has no ragged_all_to_all on CPU devices, and this package has one."""
    import jax

    of = getattr(item, "cls", None)
    if of is None or of.__name__ != "RaggedCollectiveTest" or jax.default_backend() != "cpu":
        return
    if item.config.getoption("--install"):
        of.setUp = super(of, of).setUp
        of.assertIn = lambda *_: None  # it looks for lax's custom call in the StableHLO text


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Counts the operations that a test runs in our kernels."""
    if not item.config.getoption("--install"):
        return (yield)
    import jax_intranode

    before, lowered = jax_intranode.usage_counter(), _lowered()
    try:
        return (yield)
    finally:
        item.user_properties.append(("operations", jax_intranode.usage_counter() - before))
        item.user_properties.append(("lowered", sorted(_lowered() - lowered)))


def _lowered() -> Counter[str]:
    """How many of each of our operations this process has lowered."""
    import jax_intranode

    found: Counter[str] = Counter()
    for row in jax_intranode.stats().lowered:
        found[row.operation] += row.count
    return found


class _Outcomes:
    """Collects the outcomes of tests."""

    def __init__(self, path: Path):
        self._path = path
        self._outcomes: dict[str, Outcome] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self._outcomes.setdefault(report.nodeid, Outcome())
        # A test has three reports: set-up, call and tear-down.
        if report.outcome != "passed" and found.outcome != "failed":
            found.outcome = report.outcome
        if report.when == "call":
            properties = dict(report.user_properties)
            found.operations = properties.get("operations", 0)
            found.lowered = properties.get("lowered", [])

    def pytest_sessionfinish(self) -> None:
        by_name = {name: asdict(outcome) for name, outcome in self._outcomes.items()}
        self._path.write_text(json.dumps(by_name, indent=1, sort_keys=True))


# The comparison.


def known_differences(path: Path) -> dict[str, str]:
    """The reasons why tests may differ, by pattern of the test's name."""
    lines = (line.strip() for line in path.read_text().splitlines())
    pairs = (line.partition(": ") for line in lines if line and not line.startswith("#"))
    return {pattern: reason for pattern, _, reason in pairs}


def compare(
    without: dict[str, Outcome], with_ours: dict[str, Outcome], known: dict[str, str]
) -> int:
    """Prints how two runs differ; returns the exit code.

    Args:
        without: the outcomes without install(), by test.
        with_ours: the outcomes with it.
        known: what `known_differences` returns.
    """
    if not without or not with_ours:
        print("Nothing was compared: pytest did not finish; see its logs")
        return 2
    worse, listed, better = [], [], []
    for name in sorted(without | with_ours):
        before, after = (
            outcomes[name].outcome if name in outcomes else "not run"
            for outcomes in (without, with_ours)
        )
        if after == "passed" and before != "passed":
            better.append(f"  {name}: {before} without")
        elif before == "passed" and after != "passed":
            reason = next((r for p, r in known.items() if fnmatch.fnmatchcase(name, p)), None)
            if reason is None:
                worse.append(f"  {name}: {after}")
            else:
                listed.append(f"  {name}: {after}; {reason}")
    for title, lines in (
        ("Pass without install() and not with it", worse),
        ("The same, for a known reason", listed),
        ("Pass with install() only", better),
    ):
        if lines:
            print(f"{title}:", *lines, sep="\n")
    for title, outcomes in (("Without", without), ("With", with_ours)):
        counts = Counter(outcome.outcome for outcome in outcomes.values())
        print(f"{title} install(): " + ", ".join(f"{n} {k}" for k, n in sorted(counts.items())))
    operations = [outcome.operations for outcome in with_ours.values() if outcome.operations]
    print(f"{_tests(operations)} ran our kernels, {sum(operations)} operations in all")
    ran = [outcome.lowered for outcome in with_ours.values() if outcome.operations]
    by_name = Counter(name for names in ran for name in names)
    print("Tests that lowered " + ", ".join(f"{k}: {n}" for k, n in sorted(by_name.items())))
    verb = "differs" if len(worse) == 1 else "differ"
    print(f"{_tests(worse)} {verb}, and {len(listed)} for a known reason")
    if not operations:
        print("Nothing was compared: no test ran our kernels")
        return 2
    return 1 if worse else 0


def _tests(names: list[Any]) -> str:
    return "1 test" if len(names) == 1 else f"{len(names)} tests"


def read(path: Path) -> dict[str, Outcome]:
    """Reads the outcomes that the plugin has written; none if pytest wrote no file."""
    if not path.exists():
        return {}
    by_name: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return {name: Outcome(**outcome) for name, outcome in by_name.items()}


def run_tests(name: str, files: Sequence[str], out: Path, work: Path, *more: str) -> None:
    """Runs the tests in the folder `work`; writes NAME.log, and by the plugin NAME.json."""
    print(f"== {' '.join(files)} {name} install(): {out}/{name}.log", flush=True)
    outcomes = out / f"{name}.json"
    outcomes.unlink(missing_ok=True)
    gpus = (
        shutil.which("nvidia-smi")
        and b"GPU"
        in subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, check=False).stdout
    )
    environ = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8",
        "JAX_INTRANODE_TIMEOUT_S": os.environ.get("JAX_INTRANODE_TIMEOUT_S", "60"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TOOLS), os.environ.get("PYTHONPATH")])),
    }
    plugins = ["-p", "no:cacheprovider", "-p", "jax_own_tests", "-n", "0" if gpus else "auto"]
    with (out / f"{name}.log").open("w") as log:
        subprocess.run(
            [
                *(sys.executable, "-P", "-m", "pytest", "-c", "/dev/null", "--rootdir", "."),
                *("-q", *plugins, "--timeout", "600", "--outcomes", str(outcomes), *more),
                *(f"tests/{file}" for file in files),
            ],
            cwd=work,
            env={**os.environ, **environ},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )


def main() -> int:
    """Runs the tests in both ways and compares them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path, metavar="PATH")
    parser.add_argument("files", nargs="*", metavar="TEST_FILE", help=f"default: {FILES}")
    default = TOOLS.parent / "build" / "jax_own_tests"
    parser.add_argument("--out", type=Path, default=default, metavar="FOLDER")
    options = parser.parse_args()
    out, tests = options.out.resolve(), options.tree / "tests"
    out.mkdir(parents=True, exist_ok=True)
    # Not every version of JAX has all of them.
    files = options.files or [file for file in FILES if (tests / file).exists()]
    with tempfile.TemporaryDirectory() as work:
        # In a copy without the folder `jax`, Python imports the installed one.
        shutil.copytree(tests, Path(work, "tests"))
        run_tests("without", files, out, Path(work))
        run_tests("with", files, out, Path(work), "--install")
    known = known_differences(TOOLS / "jax_own_tests_differ.txt")
    return compare(read(out / "without.json"), read(out / "with.json"), known)


if __name__ == "__main__":
    sys.exit(main())
