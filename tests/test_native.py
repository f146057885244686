"""The C++ tests: the protocols, the CPU groups, the watch and the order of fused kernels' tiles.

tests/native/programs.py lists them. Models run the protocols in all behaviours of few ranks
(tests/native/model). The full tier runs more of them. There the protocols, the CPU groups and the
watch also run under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from native import programs as listed

pytestmark = pytest.mark.one_version

ROOT = Path(__file__).parent.parent
NATIVE = Path(__file__).parent / "native"
FLAGS = {
    "plain": [],
    "thread": ["-fsanitize=thread", "-DJAX_INTRANODE_NO_VECTORS"],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
_SANITIZER = {"TSAN_OPTIONS": "halt_on_error=1 atexit_sleep_ms=100"}

Program = Callable[[str, str], Path]  # of a name and a build


def run(*command: str | Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, **_SANITIZER},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Program:
    """Compiles a program when a test first asks for it."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler (c++ or g++) on PATH")
    directory = tmp_path_factory.mktemp("native")

    def compiled(name: str, build: str) -> Path:
        program = directory / f"{build}_{name}"
        if program.exists():
            return program
        # Models search long in the full tier. Others compile long.
        optimize = "-O0" if build == "plain" else "-O1"
        if name.endswith("_model"):
            optimize = "-O2" if pytestconfig.getoption("full") else "-O1"
        flags = ["-std=c++20", optimize, "-pthread", *FLAGS[build]]
        flags += ["-g1"] * (build != "plain")  # lines for the sanitizers' reports
        flags += ["--param", "ggc-min-heapsize=524288"]  # GCC collects garbage a fifth of its time
        # One unit: the headers take most of the time.
        unit = program.with_suffix(".cc")
        unit.write_text("".join(f'#include "{source}"\n' for source in listed.sources(name)))
        done = run(
            compiler, *flags, "-I", str(ROOT), "-I", str(NATIVE / "model/fake_cuda"),
            "-I", jax.ffi.include_dir(), unit, "-o", program, timeout_s=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return program

    return compiled


def marks(tier: str, build: str = "plain") -> list[pytest.MarkDecorator]:
    full = [pytest.mark.full] * (tier != "quick" or build != "plain")
    return full + [pytest.mark.timeout(1200)] * (tier == "long")


@pytest.mark.parametrize(
    ("build", "name", "arguments"),
    [
        pytest.param(build, name, text, marks=marks(tier, build), id=f"{build}-{name}-{text}")
        for name, one in listed.PROGRAMS.items()
        for build in (FLAGS if one.sanitized else ["plain"])
        for tier, text in one.runs()
    ],
)
def test_sound(program: Program, build: str, name: str, arguments: str) -> None:
    outcome = run(program(name, build), *arguments.split(), timeout_s=1200)
    assert outcome.returncode == 0, outcome.stdout
    last = outcome.stdout.splitlines()[-1]
    assert last == "done" or " wrong 0 sequences " in last, outcome.stdout
    print(last)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param(name, text, marks=marks(tier), id=f"plain-{name}-{text}")
        for name, text, tier in listed.BROKEN
    ],
)
def test_broken_is_found(program: Program, name: str, arguments: str) -> None:
    outcome = run(program(name, "plain"), *arguments.split(), timeout_s=1200)
    assert outcome.returncode == 1, outcome.stdout
    ends = listed.BROKEN_ENDS.format(*arguments.split())
    assert any(line.startswith(ends) for line in outcome.stdout.splitlines()), outcome.stdout
