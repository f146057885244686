"""Failures as users see them: the record, the exception, XLA's errors, and what is printed last."""

import dataclasses
import logging
import re
import traceback
from collections.abc import Iterator
from unittest import mock

import jax
import pytest
from processes import free_port, python
from tiers import full

import jax_intranode
from jax_intranode._src.group import rendezvous
from jax_intranode._src.health import failures
from jax_intranode._src.jax_private import runtime_errors
from jax_intranode._src.native import extension

FAILURE = failures.Failure(
    message="jax_intranode: psum timed out: rank 0 (device 4) waited for rank 1 (device 5).",
    reason="timeout",
    platform="cpu",
    operation="psum",
    nbytes=4096,
    rank=0,
    device_ids=(4, 5),
    missing_rank=1,
    missing_process=1,
    source="train.py:10 (step)",
)
XLA_TEXT = "INTERNAL: CUDA error: unspecified launch failure"
ON_GPUS = dataclasses.replace(FAILURE, platform="gpu")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No failure before, and none after; a native module that says what a test has it say."""
    monkeypatch.setattr(failures, "_last", None)
    monkeypatch.setattr(failures, "_in_force", False)
    monkeypatch.setattr(failures, "_process_of", lambda device_id: device_id - 4)
    module = mock.Mock()
    module.take_failures.return_value = []
    monkeypatch.setattr(extension, "_modules", {"cpu": module})
    runtime_errors.show_in_runtime_errors(failures._shown_in)
    yield


@pytest.mark.parametrize("failure", [FAILURE, ON_GPUS])
def test_a_failure_concerns_the_devices_of_its_group(
    failure: failures.Failure, clean: None
) -> None:
    """On CPU devices until shutdown()."""
    failures.report(failure)
    devices = {id: mock.Mock(id=id, platform=failure.platform) for id in (3, 5, 6)}
    rendezvous.raise_if_failed([devices[3], devices[6]])
    with pytest.raises(jax_intranode.CommunicationError, match=r"rank 0 \(device 4\) waited"):
        rendezvous.raise_if_failed([devices[3], devices[5]])
    failures.forget()
    over = failure.platform == "cpu"
    assert jax_intranode.last_failure() is not None
    assert (failures.current() is None) == over
    assert failures.report(dataclasses.replace(failure, reason="mismatch")) == over


def test_the_first_failure_is_kept(clean: None, caplog: pytest.LogCaptureFixture) -> None:
    assert jax_intranode.last_failure() is None
    assert failures.report(FAILURE)
    with caplog.at_level(logging.INFO, "jax_intranode"):
        assert not failures.report(dataclasses.replace(FAILURE, message="a later one"))
    found = jax_intranode.last_failure()
    assert found == FAILURE
    assert [r.levelname for r in caplog.records if r.message == found.message] == ["ERROR"]
    assert [r.levelname for r in caplog.records if "a later one" in r.message] == ["INFO"]


# What the native monitor says of FAILURE.
FIELDS = {
    "message": FAILURE.message, "reason": 1, "platform": "cpu", "operation": "psum", "nbytes": 4096,
    "site": "jit_step psum", "shared": False, "calls": -1, "rank": 0, "missing_rank": 1,
    "missing_process": -1, "device_ids": [4, 5],
}  # fmt: skip
# What it says of a process that has ended.
OF_PEER = {
    **FIELDS, "message": "a peer has ended", "reason": 6, "operation": "", "nbytes": 0, "site": "",
    "rank": -1, "missing_rank": -1, "missing_process": 1,
}  # fmt: skip


def test_the_monitor_is_asked_before_the_thread_finds_it(clean: None) -> None:
    extension.module("cpu").take_failures.side_effect = [[{**FIELDS, "platform": "gpu"}], [], []]
    assert FAILURE.message in str(jax.errors.JaxRuntimeError(XLA_TEXT))
    found = jax_intranode.last_failure()
    assert found == dataclasses.replace(ON_GPUS, source=None, time=found and found.time)


def test_a_call_that_fails_says_more_than_the_loss_of_its_peer(
    clean: None, caplog: pytest.LogCaptureFixture
) -> None:
    """On GPUs a kernel that waits gives up after the loss of the process has been told."""
    other = {**FIELDS, "platform": "gpu", "missing_rank": 0}
    call = {**FIELDS, "platform": "gpu"}
    extension.module("cpu").take_failures.side_effect = [
        [OF_PEER], [other], [call], [OF_PEER], [], [],
    ]  # fmt: skip
    seen = [failures.current() for _ in range(5)]
    assert [f and f.operation for f in seen] == [None, None, "psum", "psum", "psum"]
    assert seen[-1] is not None and seen[-1].missing_process == 1
    assert FAILURE.message in str(jax.errors.JaxRuntimeError(XLA_TEXT))
    errors = [r.message for r in caplog.records if r.levelname == "ERROR"]
    assert errors == [OF_PEER["message"], FAILURE.message]


def test_errors_of_xla_show_the_message(clean: None) -> None:
    error = jax.errors.JaxRuntimeError(XLA_TEXT)
    assert str(error) == XLA_TEXT
    failures.report(ON_GPUS)
    shown = f"{FAILURE.message}\n\nXLA reported: {XLA_TEXT}"
    assert str(error) == shown
    try:
        raise error
    except jax.errors.JaxRuntimeError as raised:
        assert "".join(traceback.format_exception(raised)).endswith(f"Error: {shown}\n")
    # Where the text has the message already, it is not shown twice.
    assert str(jax.errors.JaxRuntimeError(f"INTERNAL: {FAILURE.message}")).count("timed out") == 1
    # An error that no failure causes stays as it is.
    for text in (
        "INVALID_ARGUMENT: shape",
        "RESOURCE_EXHAUSTED: out of memory",
        "INTERNAL: CpuCallback error calling callback: ValueError",
    ):
        assert str(jax.errors.JaxRuntimeError(text)) == text


def test_one_handler_for_all_failures(clean: None) -> None:
    for error in (jax.errors.JaxRuntimeError(XLA_TEXT), ValueError("jax_intranode: psum failed")):
        # Without a failure it is another error.
        with pytest.raises(type(error)), jax_intranode.communication_errors():
            raise error
    failures.report(FAILURE)
    for error in (
        jax.errors.JaxRuntimeError(f"INTERNAL: {FAILURE.message}"),
        ValueError(f"{FAILURE.message}, said by a handler"),
        jax_intranode.CommunicationError(FAILURE.message, FAILURE),
    ):
        with (
            pytest.raises(jax_intranode.CommunicationError) as info,
            jax_intranode.communication_errors(),
        ):
            raise error
        assert info.value.failure == FAILURE
    for error in (ValueError("shapes differ"), KeyError("x")):
        with pytest.raises(type(error)), jax_intranode.communication_errors():
            raise error


def run_program(code: str, before: str = "") -> tuple[int, str]:
    """Runs a program that uses JAX; returns its status and what it printed."""
    prelude = "import logging\nlogging.basicConfig()\nimport jax, jax_intranode\n"
    outcome = python("-P", "-c", before + prelude + code, JAX_PLATFORMS="cpu")
    return outcome.returncode, outcome.stdout


# After Python has ended, a destructor takes its time, and a thread comes back from C++: from where
# JAX's shutdown waits. Clang has compiled it, and ours GCC.
LATE_THREAD = """
import ctypes, threading, time
from jaxlib import _jax
from jax_intranode._src.health import failures
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.sleep, ctypes.c_void_p(2), None)
address = "127.0.0.1:{port}"
service = _jax.get_distributed_runtime_service(address, 1)
client = _jax.get_distributed_runtime_client(address, 0)
client.connect()
for kept in (service, client):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
arguments = ("a key that nobody sets", 1000)
threading.Thread(target=client.blocking_key_value_get, args=arguments, daemon=True).start()
time.sleep(0.1)  # Python has to detach it, which earlier versions than 3.13 do
failures.report(failures.Failure("jax_intranode: lost.", "timeout", "cpu"))
raise SystemExit(3)
"""


def test_a_thread_that_comes_back_late_does_not_abort() -> None:
    status, text = run_program(LATE_THREAD.replace("{port}", str(free_port())))
    assert status == 3, text
    assert text.endswith("\njax_intranode: lost.\n"), text


# What destructors print: of objects that were there before the package, and of later ones. In the
# C library perror prints its argument to stderr.
NOISE = """
import ctypes
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
def print_at_exit(text):
    copy = ctypes.c_void_p(libc.strdup(text.encode()))
    libc.__cxa_atexit(libc.perror, copy, None)
print_at_exit("Error destroying CUDA event")
"""
LATER = "print_at_exit('Error destroying CUDA event of XLA')\n"
LOST = LATER + (
    "from jax_intranode._src.health import failures\n"
    "failures.report(failures.Failure('jax_intranode: lost.', 'timeout', 'gpu'))\n"
)


@pytest.mark.parametrize(
    ("code", "status", "last"),
    [
        (
            f"{LOST}raise jax.errors.JaxRuntimeError('INTERNAL: CUDA error')",
            1,
            "jax_intranode: lost.",
        ),
        full(f"{LOST}print('caught')", 0, "jax_intranode: lost."),
        full(f"{LATER}raise SystemExit(3)", 3, "Error destroying CUDA event: .*"),
    ],
    ids=["raised", "caught", "no_failure"],
)
def test_the_failure_is_printed_last(code: str, status: int, last: str) -> None:
    """On GPUs. tests/stress/faults looks at the last line on CPU devices."""
    found, text = run_program(code, before=NOISE)
    assert found == status, text
    printed = text.splitlines()
    assert re.fullmatch(last, printed[-1]), text
    assert sum(line == printed[-1] for line in printed) == 1, text
    assert text.count("Error destroying CUDA event") == 2, text
    if "raise jax" in code:
        assert "JaxRuntimeError: jax_intranode: lost.\n\nXLA reported: INTERNAL: CUDA" in text
