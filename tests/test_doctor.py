"""The command `doctor`: verdicts of its checks on known nodes, and what a node is said to gain."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jax
import pytest
from devices import need_devices
from processes import python
from tiers import full

import jax_intranode
from jax_intranode import __main__ as command_line
from jax_intranode._src import timeouts
from jax_intranode._src.command_line import benefits, doctor, info, machine, probe
from jax_intranode._src.command_line.launcher import all_ranks
from jax_intranode._src.command_line.launcher.runs import SINGLE_PROCESS, Devices
from jax_intranode._src.selection.overlap.profiles import H200_FACTS


def node(**changes: Any) -> dict[str, Any]:
    """The report of `info` on a node with two H200s, with changes."""
    gpu = {"name": "NVIDIA H200", "compute_capability": "9.0", "memory_mib": 143771}
    gpus = [{**gpu, "bus_id": f"00000000:0{i}:00.0", "free_mib": 143000} for i in range(2)]
    architectures = ["sm_80", "sm_90", "sm_100", "compute_80", "sm_90a"]
    part = {"built": True, "ffi": [0, 3], "error": None}
    return {
        "ffi_of_jaxlib": [0, 5],
        "cpu_part": part,
        "cuda_part": {**part, "cuda": "13.0", "architectures": architectures},
        "versions": {"jax": "0.12", "jax-cuda13-plugin": "0.12"},
        "driver": {"version": "580.1", "cuda": "13.0", "reason": None},
        "gpus": gpus,
        "topology": {"kind": "fully_connected", "links": [[0, 18], [18, 0]]},
        "environment": [],
    } | changes


def verdict(check: info.Check) -> tuple[str, str]:
    """The verdict and, so that a test can search it, all other text."""
    if check.verdict in (info.FAILS, info.WARNING):
        assert check.remedy, check
    return check.verdict, str(check)


NO_DRIVER = {"version": None, "cuda": None, "reason": "NVML does not start"}
NOT_BUILT = {"built": False, "ffi": None, "error": None}
UNLINKED = {"kind": "unknown", "links": [[0, 4, 0], [4, 0, 4], [0, 4, 0]]}
# A check, what is other than on a good node, its verdict, and what its text has.
LOOKS: list[tuple[Any, dict[str, Any], str, list[str]]] = [
    *(
        (check, {}, info.OK, [])
        for check in (info.cpu_part, doctor._driver, info.cuda_part, doctor._links)
    ),
    (
        info.cpu_part,
        {"cpu_part": {"built": True, "ffi": [0, 3], "error": "built against 0.3"}},
        info.FAILS,
        ["built against 0.3", "install a newer jaxlib"],
    ),
    (info.cpu_part, {"ffi_of_jaxlib": None}, info.SKIPPED, []),
    (
        doctor._driver,
        {"driver": {"version": "550.1", "cuda": "12.4", "reason": None}},
        info.FAILS,
        ["550.1", "built with CUDA 13.0"],
    ),
    (info.cuda_part, {"cuda_part": NOT_BUILT}, info.FAILS, ["not built; this node has 2 GPU"]),
    (info.cuda_part, {"versions": {"jax": "0.12"}}, info.FAILS, ["no CUDA plugin"]),
    (info.cuda_part, {"gpus": [], "cuda_part": NOT_BUILT}, info.SKIPPED, ["not built"]),
    (doctor._links, {"topology": UNLINKED}, info.WARNING, ["not linked: GPU 0 and 2\n"]),
    (doctor._links, {"topology": {"links": [[0]]}}, info.SKIPPED, ["a single GPU has no peers"]),
]


@pytest.mark.parametrize(("check", "changes", "found", "says"), LOOKS)
def test_what_is_looked_at(
    check: Any, changes: dict[str, Any], found: str, says: list[str]
) -> None:
    got, text = verdict(check(node(**changes)))
    assert got == found, text
    for part in says:
        assert part in text


def test_a_jaxlib_that_is_older_than_the_native_modules() -> None:
    assert info._part("_host", [99, 0])["error"] is None
    error = info._part("_host", [0, 0])["error"]
    assert error.startswith("built against FFI headers ") and error.endswith("jaxlib has 0.0")


def test_a_driver_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    none = node(driver=NO_DRIVER, gpus=[])
    monkeypatch.setattr(doctor, "_device_files", list)
    assert doctor._driver(none).verdict == info.SKIPPED
    monkeypatch.setattr(doctor, "_device_files", lambda: [Path("/dev/nvidia0")])
    found, text = verdict(doctor._driver(none))
    assert found == info.FAILS and "NVML does not start" in text and "--gpus all" in text


@pytest.mark.parametrize("asked", ["cuda", "gpu", "cuda,cpu"])
def test_gpus_that_are_asked_for_and_missing(
    no_processes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: str,
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: 0)
    monkeypatch.setenv("JAX_PLATFORMS", asked)
    assert command_line.main(["doctor"]) == 1
    out = capsys.readouterr().out
    says = f"JAX_PLATFORMS={asked} asks for GPUs, and there are none: "
    assert f"fails    driver: {says}" in out and f"Your node benefits: not now: {says}" in out
    monkeypatch.setattr(machine, "visible_gpus", lambda: 2)
    assert doctor._driver(node()).verdict == info.OK


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ("sm_80,sm_90,compute_80,sm_90a", 90, True),
        ("sm_80,sm_90,compute_80", 120, True),  # by PTX
        ("sm_80,sm_90,sm_90a", 120, False),
        ("sm_80", 86, True),
        ("sm_86", 80, False),
        ("sm_90a", 90, False),  # the fused kernels alone
        ("compute_80", 75, False),
        ("90,sm_90a", 100, True),  # as CMake names machine code with PTX
        ("90-real,sm_90a", 100, False),
        ("80-virtual,sm_90a", 90, True),
        ("90a,sm_90a", 90, True),
        ("90a,sm_90a", 100, False),
        ("native,sm_90a", 90, True),
    ],
)
def test_architectures(architectures: str, capability: int, runs: bool) -> None:
    assert info.runs_on(architectures.split(","), capability) == runs
    gpu = node()["gpus"][0] | {"compute_capability": f"{capability // 10}.{capability % 10}"}
    part = node()["cuda_part"] | {"architectures": architectures.split(",")}
    found, _ = verdict(info.cuda_part(node(gpus=[gpu], cuda_part=part)))
    assert found == (info.OK if runs else info.FAILS)


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)

    def of(free_mib: int) -> tuple[str, str]:
        return verdict(doctor._memory_of(0, node()["gpus"][0] | {"free_mib": free_mib}))

    found, text = of(900)
    assert found == info.FAILS and "900 of 143771 MiB free; slab and ring need 904 MiB" in text
    found, text = of(108000)
    assert found == info.WARNING and "beside JAX's 107828 MiB" in text
    assert of(109000)[0] == info.OK
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert of(1000)[0] == info.OK
    monkeypatch.setenv("JAX_INTRANODE_RING_MIB", "1024")
    assert of(1000)[0] == info.FAILS


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    assert doctor._dev_shm(node()).verdict == info.OK
    monkeypatch.setenv("JAX_INTRANODE_SLAB_MIB", str(10**8))
    found, text = verdict(doctor._dev_shm(node()))
    assert found == info.WARNING and "needs 100000000 MiB" in text and "--shm-size" in text
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "missing")
    assert verdict(doctor._dev_shm(node(gpus=[])))[0] == info.FAILS
    found, text = verdict(doctor._dev_shm(node()))
    assert found == info.WARNING and "missing cannot be written: No such file" in text


# Tests in processes of their own.


def test_a_test_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timeouts, "DOCTOR_S", 0.1)
    found, text = verdict(doctor._self_test("two processes", "cpu", 2))
    assert found == info.FAILS
    assert "the ranks did not finish within 0.1 s" in text


def outcome(**changes: Any) -> dict[str, Any]:
    good = {"right": True, "algorithm": "one_shot", "reason": "", "operations": 40}
    return good | changes


@pytest.mark.parametrize("name", ["all_to_all", *map(full, ("psum", "psum_scatter", "all_gather"))])
def test_values_under_load(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_devices(2)
    monkeypatch.setattr(probe, "_LOAD_S", 0.1)
    rank = all_ranks.Rank(Devices(jax.devices()[0].platform, 2, SINGLE_PROCESS), tmp_path / "none")
    found = probe.values_under_load(rank)
    assert found["wrong"] == 0 and found["elements"] > 0
    right = getattr(jax_intranode, name)

    def wrong(*arguments: Any, **options: Any) -> Any:
        """The result, but for one element on one rank."""
        y = right(*arguments, **options)
        return y.at[(0,) * y.ndim].add((jax.lax.axis_index("x") == 1).astype(y.dtype))

    monkeypatch.setattr(jax_intranode, name, wrong)
    found = probe.values_under_load(rank)
    compared = sum(2 * n + n // 2 + n * 2 for n in probe._SIZES) * 2  # on two ranks, in a step
    assert found["wrong"] == found["elements"] // compared * len(probe._SIZES) > 0


# The command.


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Puts made-up results in the place of the tests in processes of their own."""
    result = outcome()

    def run_test(name: str, *_: Any) -> tuple[Any, None]:
        made_up = {"operations": result, "values_under_load": {"wrong": 0, "elements": 4}}
        return made_up.get(name, []), None

    monkeypatch.setattr(doctor, "_run_test", run_test)
    monkeypatch.setattr(doctor, "_usable_gpus", lambda found: 0)
    return result


def test_command(no_processes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    code = command_line.main(["doctor"])
    out = capsys.readouterr().out
    assert code == int(bool(re.search("^fails ", out, re.MULTILINE)))
    assert re.search(r"^\d+ checks: \d failed, \d with a warning\.$", out, re.MULTILINE)
    assert "\nYour node benefits: between processes with a CPU device each, psum up to 64 KB" in out
    assert re.search(
        r"^  psum +one process per device +1 KB to 64 KB +one-shot$", out, re.MULTILINE
    )


def test_a_failed_check_fails_the_command(
    no_processes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    no_processes["right"] = False
    assert command_line.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "2 failed" in out
    assert "Your node benefits: not now: a psum or an all-gather was wrong." in out


@pytest.mark.full
def test_on_this_machine(tmp_path: Path) -> None:
    of = {"cwd": tmp_path, "stderr": subprocess.PIPE, "timeout_s": 280, "JAX_PLATFORMS": "cpu"}
    done = python("-m", "jax_intranode", "doctor", "--json", **of)
    found = json.loads(done.stdout)
    checks = {check["name"]: check["verdict"] for check in found["checks"]}
    assert checks["memory of another process"] == "ok"
    assert checks["values under load"] == "ok"
    assert checks["one process with two CPU devices"] == "ok"
    assert checks["two processes, two CPU devices"] == "ok"


# What a node gains.


def test_benefits_of_gpus() -> None:
    found = benefits.of_node("gpu", "NVIDIA H200", 2, [H200_FACTS] * 2)
    text = benefits.table_of(found)
    assert re.search(r"^  psum +one process +1 KB to 4 MB +one-shot$", text, re.MULTILINE)
    assert re.search(r"^  all_gather_matmul +any +8192 x 8192 x 1024 +fused kernel$", text, re.M)
    assert "psum up to 16 MB" in benefits.summary(found)
    assert benefits.summary([b for b in found if b.path == "jax.lax"]).startswith("nothing")
