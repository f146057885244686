"""The C++ tests: the protocols, the CPU groups, the watch and the order of fused kernels' tiles.

tests/native/programs.py lists them. Models run the protocols in all behaviours of few ranks
(tests/native/model). The full tier runs more of them. There the protocols, the CPU groups and the
watch also run under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
# Exit status 66 is that of a race. The programs themselves never exit with it.
_SANITIZER = {"TSAN_OPTIONS": "halt_on_error=1 atexit_sleep_ms=100 exitcode=66"}
_RACE = """
#include <thread>
int shared = 0;
int main() {
  std::thread a([] { for (int i = 0; i < 100000; ++i) ++shared; });
  std::thread b([] { for (int i = 0; i < 100000; ++i) ++shared; });
  a.join();
  b.join();
}
"""


def run(*command: str | Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, **_SANITIZER},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )


class Programs:
    """Compiles each program when a test first asks for it."""

    def __init__(self, directory: Path, of_models: str):
        self._directory, self._of_models = directory, of_models
        found = shutil.which("c++") or shutil.which("g++")
        if found is None:
            pytest.skip("no C++ compiler (c++ or g++) on PATH")
        self._compiler = found

    def _compile(self, program: Path, sources: list[str], build: str) -> str:
        """Returns the compiler's messages if it fails."""
        # Models search long in the full tier. Others compile long.
        optimize = "-O0" if build == "plain" else "-O1"
        optimize = self._of_models if program.name.endswith("_model") else optimize
        flags = ["-std=c++20", optimize, "-pthread", *FLAGS[build]]
        flags += ["-g1"] * (build != "plain")  # lines for the sanitizers' reports
        flags += ["--param", "ggc-min-heapsize=524288"]  # GCC collects garbage a fifth of its time
        # One unit: the headers take most of the time.
        unit = program.with_suffix(".cc")
        unit.write_text("".join(f'#include "{source}"\n' for source in sources))
        done = run(
            self._compiler, *flags, "-I", str(ROOT), "-I", str(NATIVE / "model/fake_cuda"),
            "-I", jax.ffi.include_dir(), unit, "-o", program, timeout_s=400,
        )  # fmt: skip
        return done.stdout if done.returncode else ""

    def _skip_unless_sanitizer_works(self) -> None:
        source, program = self._directory / "races.cc", self._directory / "race"
        source.write_text(_RACE)
        if message := self._compile(program, [str(source)], "thread"):
            pytest.skip(f"ThreadSanitizer can't be linked: {message[-300:]}")
        outcome = run(program, timeout_s=100)
        if outcome.returncode != 66:
            pytest.skip(f"ThreadSanitizer does not run here: {outcome.stdout[-300:]}")

    def get(self, name: str, build: str) -> Path:
        program = self._directory / build / name
        if not program.exists():
            program.parent.mkdir(exist_ok=True)
            if build == "thread":
                self._skip_unless_sanitizer_works()
            message = self._compile(program, listed.sources(name), build)
            assert not message, message
        return program


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Programs:
    of_models = "-O2" if pytestconfig.getoption("full") else "-O1"
    return Programs(tmp_path_factory.mktemp("native"), of_models)


def marks(tier: str, build: str = "plain") -> list[pytest.MarkDecorator]:
    full = [pytest.mark.full] * (tier != "quick" or build != "plain")
    return full + [pytest.mark.timeout(1200)] * (tier == "long")


def sound() -> Iterator[Any]:
    for name, program in listed.PROGRAMS.items():
        for build in FLAGS if program.sanitized else ["plain"]:
            for tier, tests in program.tiers().items():
                for text in tests:
                    yield pytest.param(
                        build, name, text, marks=marks(tier, build), id=f"{build}-{name}-{text}"
                    )


@pytest.mark.parametrize(("build", "name", "arguments"), [*sound()])
def test_sound(programs: Programs, build: str, name: str, arguments: str) -> None:
    words = arguments.split()
    outcome = run(programs.get(name, build), *words, timeout_s=1200)
    assert outcome.returncode == 0, outcome.stdout
    expected = listed.PROGRAMS[name].output.format(*(words or [""]), *[""] * 3)
    assert re.fullmatch(expected, outcome.stdout), outcome.stdout
    print(outcome.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param(name, text, marks=marks(tier), id=f"plain-{name}-{text}")
        for name, text, tier in listed.BROKEN
    ],
)
def test_broken_is_found(programs: Programs, name: str, arguments: str) -> None:
    outcome = run(programs.get(name, "plain"), *arguments.split(), timeout_s=1200)
    assert outcome.returncode == 1, outcome.stdout
    ends = listed.BROKEN_ENDS.format(*arguments.split())
    assert any(line.startswith(ends) for line in outcome.stdout.splitlines()), outcome.stdout
