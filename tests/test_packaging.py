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
not_editable = pytest.mark.skipif(
    _URL.get("dir_info", {}).get("editable", False), reason="an editable install has other files"
)


def run_python(code: str, *flags: str, **where: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process, on CPU devices."""
    return python(*flags, "-c", code, stderr=subprocess.PIPE, JAX_PLATFORMS="cpu", **where)


def output_of(code: str) -> str:
    """The output of code that succeeds in a fresh process with the installed package."""
    # -P: the current directory may hold the source tree, in which nothing is built.
    done = run_python(code, "-P")
    assert done.returncode == 0, done.stderr
    return done.stdout


# Files.


@not_editable
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


# The files of a release.

PYPROJECT = ROOT / "pyproject.toml"
in_the_sources = pytest.mark.skipif(not PYPROJECT.exists(), reason="the sources are not here")


@in_the_sources
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


@not_editable
def test_import_from_the_source_tree() -> None:
    done = run_python("import jax_intranode", cwd=ROOT)
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith("ImportError: jax_intranode is imported from its source tree")
    assert "`pip install .`" in message


# The runtime is older than the headers of the build. The import must fail before it registers any
# handler: JAX starts no backend if one handler is too new.

_IMPORT = """
import jax
jax.ffi.include_dir = lambda: {include!r}
registered = []
jax.ffi.register_ffi_target = lambda name, *_, **__: registered.append(name)
try:
    import jax_intranode
except ImportError as error:
    print(error)
print(registered, jax.numpy.ones(3).sum())
"""


def write_header(include: Path, major: int, minor: int) -> None:
    header = include / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text(f"#define XLA_FFI_API_MAJOR {major}\n#define XLA_FFI_API_MINOR {minor}\n")


def test_old_runtime(tmp_path: Path) -> None:
    major, minor = extension.module("cpu").FFI_API_VERSION
    write_header(tmp_path, major, minor - 1)
    message, rest = output_of(_IMPORT.format(include=str(tmp_path))).split("\n", 1)
    assert f"built against FFI headers {major}.{minor}, but" in message
    assert f"jaxlib has {major}.{minor - 1}. Install a newer jaxlib" in message
    assert rest == "[] 3.0\n"


# CMake's choice of a CUDA compiler.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("JAX_INTRANODE_CUDA=MAYBE",), "JAX_INTRANODE_CUDA=MAYBE: use one of AUTO, ON, OFF."),
        (("JAX_INTRANODE_CUDA=1",), "JAX_INTRANODE_CUDA=1: use one of AUTO, ON, OFF."),
        (("JAX_INTRANODE_CUDA=ON",), "JAX_INTRANODE_CUDA=ON, but no nvcc was found that works;"),
        (("JAX_INTRANODE_CUDA=AUTO", "NVIDIA_DEVICE=/not/there"), None),
        (
            ("JAX_INTRANODE_CUDA=AUTO", f"NVIDIA_DEVICE={__file__}"),
            "but no nvcc was found that works; set CUDACXX, CUDA_HOME or JAX_INTRANODE_CUDA_WH",
        ),
        (
            ("JAX_INTRANODE_CUDA=ON", "JAX_INTRANODE_CUDA_WHEELS=ON", "Python_EXECUTABLE=false"),
            "JAX_INTRANODE_CUDA_WHEELS=1, but false has no nvcc.",
        ),
        (("JAX_INTRANODE_CUDA=OFF", f"NVIDIA_DEVICE={__file__}"), None),
    ],
)
def test_cuda_options(options: tuple[str, ...], message: str | None, tmp_path: Path) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake on PATH")
    script = ROOT / "cmake" / "FindCudaCompiler.cmake"
    command = [cmake, *(f"-D{option}" for option in options), "-P", str(script)]
    done = subprocess.run(
        command,
        cwd=tmp_path,  # CMake tries the compiler there
        env={**os.environ, "CUDACXX": "false"},  # a compiler that does not work
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode == 0) == (message is None)
    if message is not None:
        assert message in " ".join(done.stderr.split())


# Versions of JAX.


def test_the_oldest_jax_is_that_of_pyproject() -> None:
    oldest = jax_intranode._OLDEST_JAX
    for name in ("jax", "jaxlib"):
        assert f"{name}>={oldest}" in (_DISTRIBUTION.requires or []), name


OLD_JAX = """
import sys
import jax
jax.__version__, jax.__version_info__ = "0.10.1", (0, 10, 1)
"""
SAYS = "needs jax 0.10.2 or newer, and jax 0.10.1 is installed: pip install -U jax"


def test_a_jax_that_is_too_old_is_refused(tmp_path: Path) -> None:
    done = run_python(f"{OLD_JAX}\nimport jax_intranode", "-P", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ImportError: jax_intranode {SAYS}"
