"""The installed package: its files, and its import, also where it can't be used."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import python

import jax_intranode
from jax_intranode._src.native import extension

ROOT = Path(__file__).resolve().parent.parent
_DISTRIBUTION = importlib.metadata.distribution("jax_intranode")
_URL = json.loads(_DISTRIBUTION.read_text("direct_url.json") or "{}")


def run_python(code: str, *flags: str, **where: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process, on CPU devices."""
    return python(*flags, "-c", code, stderr=subprocess.PIPE, JAX_PLATFORMS="cpu", **where)


# Files.


@pytest.mark.skipif(
    _URL.get("dir_info", {}).get("editable", False), reason="an editable install has other files"
)
def test_files() -> None:
    files = {str(file) for file in _DISTRIBUTION.files or () if file.suffix != ".pyc"}
    info = {file for file in files if ".dist-info/" in file}
    for name in ("LICENSE", "NOTICE"):
        assert any(file.endswith(f".dist-info/licenses/{name}") for file in info)
    wanted = (
        r"jax_intranode/(py\.typed|_(host|cuda)\.(pyi|[\w.-]+\.so)|(_src/(\w+/)*)?\w+\.py"
        r"|include/jax_intranode/\w+\.h)"
    )
    assert [file for file in sorted(files - info) if not re.fullmatch(wanted, file)] == []
    header = "jax_intranode/include/jax_intranode/peer.h"
    assert {"jax_intranode/py.typed", "jax_intranode/_host.pyi", header} <= files
    in_the_tree = {str(path.relative_to(ROOT)) for path in ROOT.glob("jax_intranode/**/*.py")}
    assert in_the_tree == {file for file in files if file.endswith(".py")}


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="the sources are not here")
def test_the_version_is_in_one_place() -> None:
    version = jax_intranode.__version__
    names = ("pyproject.toml", "CMakeLists.txt", "CITATION.cff", "docs/conf.py")
    files = [ROOT / name for name in names]
    assert [file.name for file in files if file.exists() and version in file.read_text()] == []
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


# Importing.


def test_import_is_light_and_quiet_and_starts_no_backend() -> None:
    code = """
import json, sys
import jax
before = set(sys.modules)
import jax_intranode
names = sorted(set(sys.modules) - before)
jax.config.update("jax_num_cpu_devices", 3)  # which JAX refuses once a backend has started
print(json.dumps([names, jax.device_count()]))
"""
    done = run_python(code, "-P", "-W", "error")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    names, devices = json.loads(done.stdout)
    assert devices == 3
    packages = {name.split(".")[0] for name in names} - sys.stdlib_module_names
    packages.discard("__mp_main__")  # multiprocessing's name of the main module
    assert packages <= {"jax", "jaxlib", "jax_intranode"}
    # Only the command line needs these.
    assert set(names).isdisjoint(
        {"jax_intranode._src.command_line.bench", "jax_intranode._src.command_line.launcher"}
    )


# The runtime is older than the headers of the build. The import must fail before it registers any
# handler: JAX starts no backend if one handler is too new.

IMPORT = """
import jax
jax.ffi.include_dir = lambda: "."
registered = []
jax.ffi.register_ffi_target = lambda name, *_, **__: registered.append(name)
try:
    import jax_intranode
except ImportError as error:
    print(error)
print(registered, jax.numpy.ones(3).sum())
"""


def test_old_runtime(tmp_path: Path) -> None:
    major, minor = extension.module("cpu").FFI_API_VERSION
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    versions = (("MAJOR", major), ("MINOR", minor - 1))
    header.write_text("".join(f"#define XLA_FFI_API_{name} {n}\n" for name, n in versions))
    # -P: the current directory may hold the source tree, in which nothing is built.
    done = run_python(IMPORT, "-P", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    message, rest = done.stdout.split("\n", 1)
    assert f"built against FFI headers {major}.{minor}, but" in message
    assert f"jaxlib has {major}.{minor - 1}. Install a newer jaxlib" in message
    assert rest == "[] 3.0\n"


# CMake's choice of a CUDA compiler. Options after JAX_INTRANODE_CUDA, and the error.
CUDA_OPTIONS = [
    ("=MAYBE", "JAX_INTRANODE_CUDA=MAYBE: use one of AUTO, ON, OFF."),
    ("=1", "JAX_INTRANODE_CUDA=1: use one of AUTO, ON, OFF."),
    ("=ON", "JAX_INTRANODE_CUDA=ON, but no nvcc was found that works;"),
    ("=AUTO -DNVIDIA_DEVICE=/not/there", None),
    (
        f"=AUTO -DNVIDIA_DEVICE={__file__}",
        "but no nvcc was found that works; set CUDACXX, CUDA_HOME or JAX_INTRANODE_CUDA_WH",
    ),
    (
        "=ON -DJAX_INTRANODE_CUDA_WHEELS=ON -DPython_EXECUTABLE=false",
        "JAX_INTRANODE_CUDA_WHEELS=1, but false has no nvcc.",
    ),
    (f"=OFF -DNVIDIA_DEVICE={__file__}", None),
]


@pytest.mark.skipif(not shutil.which("cmake"), reason="no cmake on PATH")
@pytest.mark.parametrize(("options", "message"), CUDA_OPTIONS)
def test_cuda_options(options: str, message: str | None, tmp_path: Path) -> None:
    command = f"cmake -DJAX_INTRANODE_CUDA{options} -P {ROOT}/cmake/FindCudaCompiler.cmake"
    done = subprocess.run(
        command.split(),
        cwd=tmp_path,  # CMake tries the compiler there
        env={**os.environ, "CUDACXX": "false"},  # a compiler that does not work
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode == 0) == (message is None)
    assert (message or "") in " ".join(done.stderr.split())


# Versions of JAX.


def test_the_oldest_jax_is_that_of_pyproject() -> None:
    oldest = jax_intranode._OLDEST_JAX
    for name in ("jax", "jaxlib"):
        assert f"{name}>={oldest}" in (_DISTRIBUTION.requires or []), name


def test_a_jax_that_is_too_old_is_refused(tmp_path: Path) -> None:
    code = (
        "import jax\njax.__version__, jax.__version_info__ = '0.10.1', (0, 10, 1)\n"
        "import jax_intranode"
    )
    done = run_python(code, "-P", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: jax_intranode needs jax 0.10.2 or newer, and jax 0.10.1 is installed: "
        "pip install -U jax"
    )
