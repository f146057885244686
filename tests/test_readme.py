"""The programs that README.md and the pages in docs print run as they are printed."""

import ast
import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import line, sharded
from devices import need_devices
from jax.sharding import PartitionSpec as P
from processes import python
from tiers import quick

import jax_intranode

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = (README, *sorted(ROOT.glob("docs/*.md")))

pytestmark = [
    pytest.mark.one_version,
    pytest.mark.skipif(not README.exists(), reason="the README is not here"),
]


TEXT = "".join(page.read_text() for page in PAGES if page.exists())
# Each Python block whose first line is a comment with the name of a file.
BLOCKS = re.findall(r"^```python\n(# \w+\.py\n.*?)^```$", TEXT, re.M | re.S)
PROGRAMS = {block.split()[1]: block for block in BLOCKS}
OF_PROCESSES = [name for name, text in PROGRAMS.items() if "jax.distributed.initialize" in text]
# .ci/run runs those of the other pages once, after pytest.
QUICK = ("layer.py", "process_per_gpu.py")


# Runs each program in a fork of a process that has imported the package, which takes longer than
# most programs. A line for each says its exit code.
FORKS = """
import os, runpy, sys
import jax_intranode
for name in sys.argv[1:]:
    if not (child := os.fork()):
        os.dup2(os.open(f"{name}.out", os.O_WRONLY | os.O_CREAT, 0o600), 1)
        os.dup2(1, 2)
        runpy.run_path(name, run_name="__main__")
        sys.exit()
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def missing_modules(program: str) -> list[str]:
    """The packages that a program imports and that are not installed here."""
    names = []
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(str(node.module))
    packages = {name.partition(".")[0] for name in names}
    return [package for package in packages if importlib.util.find_spec(package) is None]


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> dict[str, tuple[str, str]]:
    """The exit code and the output of each program of one process that this tier runs."""
    need_devices(2)
    folder = tmp_path_factory.mktemp("programs")
    names = [
        name
        for name, text in PROGRAMS.items()
        if name not in OF_PROCESSES and not missing_modules(text)
        if name in QUICK or pytestconfig.getoption("full")
    ]
    for name in names:
        (folder / name).write_text(PROGRAMS[name])
    done = python("-c", FORKS, *names, cwd=folder)
    assert done.returncode == 0, done.stdout
    codes = dict(line.split() for line in done.stdout.splitlines())
    return {name: (codes[name], (folder / f"{name}.out").read_text()) for name in names}


def test_programs_and_the_command_that_ci_runs_are_there() -> None:
    assert {*QUICK} <= PROGRAMS.keys()
    command = re.findall(r'grep -m1 -o "(.*)" README', (ROOT / ".ci" / "run").read_text())
    assert re.search(command[0], README.read_text())


@pytest.mark.parametrize("name", quick([p for p in PROGRAMS if p not in OF_PROCESSES], QUICK))
def test_one_process(name: str, ran: dict[str, tuple[str, str]]) -> None:
    if missing := missing_modules(PROGRAMS[name]):
        pytest.skip(f"{missing[0]} is not installed")
    code, output = ran[name]
    assert code == "0" and output, output


@jax.default_matmul_precision("highest")
@pytest.mark.parametrize("name", ["ring_attention", "pipeline"])
def test_functions_of_the_page_about_permutes(name: str) -> None:
    """They give what one device computes, and so do their gradients."""
    need_devices(4)
    (text,) = re.findall(rf"^```python\n(def {name}\(.*?)^```$", TEXT, re.M | re.S)
    defined: dict[str, Any] = {"jax": jax, "jnp": jnp, "jax_intranode": jax_intranode}
    exec(text, defined)
    printed = defined[name]

    def attention(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.softmax(q @ k.T) @ v

    def stage(weights: Any, v: Any) -> Any:
        return jnp.tanh(v @ weights[0])

    def stages(weights: Any, batches: Any) -> Any:
        return functools.reduce(lambda v, w: stage(w[None], v), weights, batches)

    if name == "ring_attention":
        shapes, one = [(16, 8)] * 3, attention
        f = sharded(lambda *qkv: printed(*qkv, "x", 4), line(4), P("x"), P("x"), True)
    else:
        shapes, one = [(4, 8, 8), (5, 4, 8)], stages
        specs = (P("x"), P()), P("x")
        each = sharded(lambda w, b: printed(stage, w, b, "x", 4)[None], line(4), *specs, True)
        f = lambda *args: each(*args)[-1]  # noqa: E731
    args = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    found, wanted = (
        jax.jit(jax.value_and_grad(lambda xs, g=g: (g(*xs) ** 2).sum()))(args) for g in (f, one)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_the_output_in_the_readme(ran: dict[str, tuple[str, str]]) -> None:
    """That of CPU devices, up to the line of dots."""
    (shown,) = re.findall(r"^```\n(16384\n.*?)^\.\.\.$", README.read_text(), re.M | re.S)
    if jax.default_backend() != "cpu":
        pytest.skip("the README shows the output of CPU devices")
    assert ran["layer.py"][1].startswith(shown)


@pytest.mark.parametrize("name", quick(OF_PROCESSES, QUICK))
def test_process_per_device(name: str, tmp_path: Path) -> None:
    need_devices(2)
    (tmp_path / name).write_text(PROGRAMS[name])
    command = re.search(rf"^    (python -m jax_intranode launch -n 2 (?:.* )?{name})$", TEXT, re.M)
    assert command, name
    done = python(*command[1].split()[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        assert re.search(rf"^\[{rank}\] rank {rank} has .*: 1\.0$", done.stdout, re.M), done.stdout


@pytest.mark.full
def test_the_program_of_the_readme_with_a_process_per_device(tmp_path: Path) -> None:
    """The README says that `launch` starts it as it is."""
    need_devices(2)
    assert "`python -m jax_intranode launch layer.py`" in README.read_text()
    (tmp_path / "layer.py").write_text(PROGRAMS["layer.py"])
    done = python("-m", "jax_intranode", "launch", "-n", "2", "layer.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    n = 8192 if jax.default_backend() == "gpu" else 64
    for rank in range(2):
        # A dot of ones with n elements, and one with 4 n.
        (first,) = re.findall(rf"^\[{rank}\] ([\d.e+]+)$", done.stdout, re.M)
        assert float(first) == 4 * n * n, done.stdout
        assert re.search(rf"^\[{rank}\] all_gather_matmul .* jax_intranode$", done.stdout, re.M)
