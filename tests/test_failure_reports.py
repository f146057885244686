"""Failures as users see them: the record, the exception, XLA's errors, and what is printed last."""

import dataclasses
import logging
import time
import traceback
from collections.abc import Iterator

import jax
import pytest

import jax_intranode
from jax_intranode._src import compat, failures

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


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No failure before, and none after; no listeners of other tests."""
    monkeypatch.setattr(failures, "_last", None)
    monkeypatch.setattr(failures, "_in_force", False)
    monkeypatch.setattr(failures, "_listeners", [])
    monkeypatch.setattr(failures, "_sources", [])
    compat.show_in_runtime_errors(failures._shown_in)
    yield


def test_the_first_failure_is_kept(clean: None, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[failures.Failure] = []
    failures.on_failure(heard.append)
    assert jax_intranode.last_failure() is None
    before = time.time()
    assert failures.report(dataclasses.replace(FAILURE, time=time.time()))
    with caplog.at_level(logging.INFO, "jax_intranode"):
        assert not failures.report(dataclasses.replace(FAILURE, message="a later one"))
    found = jax_intranode.last_failure()
    assert found is not None and found == dataclasses.replace(FAILURE, time=found.time)
    assert before <= found.time <= time.time()
    assert heard == [found]
    assert [r.levelname for r in caplog.records if r.message == found.message] == ["ERROR"]
    assert [r.levelname for r in caplog.records if "a later one" in r.message] == ["INFO"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.reason = "other"  # type: ignore[misc]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_after_shutdown(clean: None, platform: str) -> None:
    failures.report(dataclasses.replace(FAILURE, platform=platform))
    failures.forget()
    assert jax_intranode.last_failure() is not None
    assert (failures.current() is None) == (platform == "cpu")
    assert failures.report(dataclasses.replace(FAILURE, reason="mismatch")) == (platform == "cpu")


def test_a_source_is_asked_before_the_poll_finds_it(clean: None) -> None:
    found = [FAILURE]
    failures.add_source(lambda: [found.pop()] if found else [])
    error = jax.errors.JaxRuntimeError(XLA_TEXT)
    assert FAILURE.message in str(error)
    assert jax_intranode.last_failure() == FAILURE


def test_errors_of_xla_show_the_message(clean: None, caplog: pytest.LogCaptureFixture) -> None:
    error = jax.errors.JaxRuntimeError(XLA_TEXT)
    assert str(error) == XLA_TEXT
    failures.report(FAILURE)
    shown = f"{FAILURE.message}\n\nXLA reported: {XLA_TEXT}"
    assert str(error) == shown
    try:
        raise error
    except jax.errors.JaxRuntimeError as raised:
        assert "".join(traceback.format_exception(raised)).endswith(f"Error: {shown}\n")
        logging.getLogger("of the user").exception("failed")
    with pytest.raises(jax.errors.JaxRuntimeError) as info:
        raise error
    assert shown in info.exconly() and info.match("timed out")
    assert FAILURE.message in str(info.getrepr()) and XLA_TEXT in str(info.getrepr())
    assert shown in caplog.text
    # Where the text has the message already, it is not shown twice.
    assert str(jax.errors.JaxRuntimeError(f"INTERNAL: {FAILURE.message}")).count("timed out") == 1
    # An error that no failure causes stays as it is.
    assert str(jax.errors.JaxRuntimeError("INVALID_ARGUMENT: shape")) == "INVALID_ARGUMENT: shape"
    failures.forget()
    assert str(error) == XLA_TEXT


def test_the_exception_is_a_runtime_error_with_the_record() -> None:
    error = jax_intranode.CommunicationError(FAILURE.message, FAILURE)
    assert isinstance(error, RuntimeError)
    assert str(error) == FAILURE.message and error.failure is FAILURE
