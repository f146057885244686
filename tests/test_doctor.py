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


def node(gpu: Any = None, **changes: Any) -> dict[str, Any]:
    """The report of `info` on a node with two H200s, with changes, also of each GPU."""
    h200 = {"name": "NVIDIA H200", "compute_capability": "9.0", "memory_mib": 143771}
    h200 |= {"free_mib": 143000, **(gpu or {})}
    architectures = ["sm_80", "sm_90", "sm_100", "compute_80", "sm_90a"]
    part = {"built": True, "ffi": [0, 3], "error": None}
    return {
        "ffi_of_jaxlib": [0, 5],
        "cpu_part": part,
        "cuda_part": {**part, "cuda": "13.0", "architectures": architectures},
        "versions": {"jax": "0.12", "jax-cuda13-plugin": "0.12"},
        "driver": {"version": "580.1", "cuda": "13.0", "reason": None},
        "gpus": [{**h200, "bus_id": f"00000000:0{i}:00.0"} for i in range(2)],
        "topology": {"kind": "fully_connected", "links": [[0, 18], [18, 0]]},
        "environment": [],
    } | changes


def built_for(architectures: str, capability: str) -> dict[str, Any]:
    part = node()["cuda_part"] | {"architectures": architectures.split(",")}
    return {"cuda_part": part, "gpu": {"compute_capability": capability}}


def memory(found: dict[str, Any]) -> info.Check:
    return doctor._memory_of(0, found["gpus"][0])


OK, SKIPPED, WARNING, FAILS = info.OK, info.SKIPPED, info.WARNING, info.FAILS
OLD_DRIVER = {"version": "550.1", "cuda": "12.4", "reason": None}
NO_DRIVER = {"version": None, "cuda": None, "reason": "NVML does not start"}
NO_GPU = {"driver": NO_DRIVER, "gpus": []}
NEWER = {"built": True, "ffi": [0, 3], "error": "built against 0.3"}
NOT_BUILT = {"built": False, "ffi": None, "error": None}
UNLINKED = {"kind": "unknown", "links": [[0, 4, 0], [4, 0, 4], [0, 4, 0]]}
NO_PREALLOCATION = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
MISSING = {"SHARED_MEMORY": Path("/missing")}
# A check, what is other than on a good node, variables and what looks at the machine, the verdict,
# and what its text has.
LOOKS: list[tuple[Any, dict[str, Any], dict[str, Any], str, str]] = [
    (info.cpu_part, {}, {}, OK, ""),
    (info.cpu_part, {"cpu_part": NEWER}, {}, FAILS, "install a newer jaxlib"),
    (info.cpu_part, {"ffi_of_jaxlib": None}, {}, SKIPPED, ""),
    (doctor._driver, {}, {}, OK, ""),
    (doctor._driver, {}, {"JAX_PLATFORMS": "cuda", "visible_gpus": lambda: 2}, OK, ""),
    (doctor._driver, {"driver": OLD_DRIVER}, {}, FAILS, "built with CUDA 13.0"),
    (doctor._driver, NO_GPU, {"_device_files": list}, SKIPPED, ""),
    (doctor._driver, NO_GPU, {"_device_files": lambda: ["nvidia0"]}, FAILS, "NVML does not start"),
    (info.cuda_part, {}, {}, OK, ""),
    (info.cuda_part, {"cuda_part": NOT_BUILT}, {}, FAILS, "not built; this node has 2 GPU"),
    (info.cuda_part, {"versions": {"jax": "0.12"}}, {}, FAILS, "no CUDA plugin"),
    (info.cuda_part, {"gpus": [], "cuda_part": NOT_BUILT}, {}, SKIPPED, "not built"),
    (info.cuda_part, built_for("sm_80,sm_90,compute_80,sm_90a", "9.0"), {}, OK, ""),
    (info.cuda_part, built_for("sm_80,sm_90,compute_80", "12.0"), {}, OK, ""),  # by PTX
    (info.cuda_part, built_for("sm_80,sm_90,sm_90a", "12.0"), {}, FAILS, ""),
    (info.cuda_part, built_for("sm_80", "8.6"), {}, OK, ""),
    (info.cuda_part, built_for("sm_86", "8.0"), {}, FAILS, ""),
    (info.cuda_part, built_for("sm_90a", "9.0"), {}, FAILS, ""),  # the fused kernels alone
    (info.cuda_part, built_for("compute_80", "7.5"), {}, FAILS, ""),
    (info.cuda_part, built_for("90,sm_90a", "10.0"), {}, OK, ""),  # PTX, as CMake names it
    (info.cuda_part, built_for("90-real,sm_90a", "10.0"), {}, FAILS, ""),
    (info.cuda_part, built_for("80-virtual,sm_90a", "9.0"), {}, OK, ""),
    (info.cuda_part, built_for("90a,sm_90a", "9.0"), {}, OK, ""),
    (info.cuda_part, built_for("90a,sm_90a", "10.0"), {}, FAILS, ""),
    (info.cuda_part, built_for("native,sm_90a", "9.0"), {}, OK, ""),
    (doctor._links, {}, {}, OK, ""),
    (doctor._links, {"topology": UNLINKED}, {}, WARNING, "not linked: GPU 0 and 2\n"),
    (doctor._links, {"topology": {"links": [[0]]}}, {}, SKIPPED, "a single GPU has no peers"),
    (memory, {"gpu": {"free_mib": 900}}, {}, FAILS, "900 of 143771 MiB free; slab and ring need 9"),
    (memory, {"gpu": {"free_mib": 108000}}, {}, WARNING, "beside JAX's 107828 MiB"),
    (memory, {"gpu": {"free_mib": 109000}}, {}, OK, ""),
    (memory, {"gpu": {"free_mib": 1000}}, NO_PREALLOCATION, OK, ""),
    (
        memory,
        {"gpu": {"free_mib": 1000}},
        {"JAX_INTRANODE_RING_MIB": "1024", **NO_PREALLOCATION},
        *(FAILS, ""),
    ),
    (doctor._dev_shm, {}, {}, OK, ""),
    (doctor._dev_shm, {}, {"JAX_INTRANODE_SLAB_MIB": "99999999"}, WARNING, "needs 99999999 MiB"),
    (doctor._dev_shm, {"gpus": []}, MISSING, FAILS, "--shm-size"),
    (doctor._dev_shm, {}, MISSING, WARNING, "missing cannot be written: No such file"),
]


@pytest.mark.parametrize(("check", "changes", "settings", "verdict", "says"), LOOKS)
def test_what_is_looked_at(
    check: Any,
    changes: dict[str, Any],
    settings: dict[str, Any],
    verdict: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        if isinstance(value, str):
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.setattr(doctor if name == "_device_files" else machine, name, value)
    found = check(node(**changes))
    assert found.verdict == verdict and says in str(found), found
    assert found.remedy or verdict in (OK, SKIPPED)


def test_a_jaxlib_that_is_older_than_the_native_modules() -> None:
    assert info._part("_host", [99, 0])["error"] is None
    error = info._part("_host", [0, 0])["error"]
    assert error.startswith("built against FFI headers ") and error.endswith("jaxlib has 0.0")


# Tests in processes of their own.


def test_a_test_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timeouts, "DOCTOR_S", 0.1)
    found = doctor._self_test("two processes", "cpu", 2)
    assert found.verdict == FAILS and found.remedy
    assert "the ranks did not finish within 0.1 s" in found.reason


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


@pytest.mark.full
def test_on_this_machine(tmp_path: Path) -> None:
    of = {"cwd": tmp_path, "stderr": subprocess.PIPE, "timeout_s": 280, "JAX_PLATFORMS": "cpu"}
    done = python("-m", "jax_intranode", "doctor", "--json", **of)
    checks = {check["name"]: check["verdict"] for check in json.loads(done.stdout)["checks"]}
    last = ("memory of another process", "values under load", "one process with two CPU devices")
    assert {checks[name] for name in (*last, "two processes, two CPU devices")} == {"ok"}


# The command.

BENEFITS = "\nYour node benefits: "
NOT_NOW = f"{BENEFITS}not now: "
ROW = "\n psum one process per device 1 KB to 64 KB one-shot\n"


@pytest.mark.parametrize(
    ("right", "platforms", "says"),
    [
        (
            True,
            "cpu",
            [f"{BENEFITS}between processes with a CPU device each, psum up to 64 KB", ROW],
        ),
        (False, "cpu", [" 2 failed, ", f"{NOT_NOW}a psum or an all-gather was wrong."]),
        *(
            (True, asked, ["fails driver: ", f"{NOT_NOW}JAX_PLATFORMS={asked} asks for GPUs, and"])
            for asked in ("cuda", "gpu", "cuda,cpu")
        ),
    ],
)
def test_command(
    right: bool,
    platforms: str,
    says: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With made-up results in the place of the tests in processes of their own."""
    made_up = {
        "operations": {"right": right, "algorithm": "one_shot", "reason": "", "operations": 40},
        "values_under_load": {"wrong": 0, "elements": 4},
    }
    monkeypatch.setattr(doctor, "_run_test", lambda name, *_: (made_up.get(name, []), None))
    monkeypatch.setattr(machine, "visible_gpus", lambda: 0)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    code = command_line.main(["doctor"])
    out = re.sub(" +", " ", capsys.readouterr().out)
    assert code == int(bool(re.search("^fails ", out, re.MULTILINE)))
    assert re.search(r"^\d+ checks: \d failed, \d with a warning\.$", out, re.MULTILINE)
    assert not [text for text in says if text not in out], out


# What a node gains.


def test_benefits_of_gpus() -> None:
    found = benefits.of_node("gpu", "NVIDIA H200", 2, [H200_FACTS] * 2)
    text = benefits.table_of(found)
    assert re.search(r"^  psum +one process +1 KB to 4 MB +one-shot$", text, re.MULTILINE)
    assert re.search(r"^  all_gather_matmul +any +8192 x 8192 x 1024 +fused kernel$", text, re.M)
    assert "psum up to 16 MB" in benefits.summary(found)
    assert benefits.summary([b for b in found if b.path == "jax.lax"]).startswith("nothing")
