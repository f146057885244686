"""How the processes of a mesh meet before they rewrite a program, with a peer that is played."""

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jax_intranode._src import timeouts
from jax_intranode._src.group import key_value_store
from jax_intranode._src.health import failures, peers
from jax_intranode._src.rewrite import agreement


@pytest.mark.parametrize("comes", [True, False])
def test_a_process_may_end_as_soon_as_it_has_come(
    monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """It comes and ends just after this process has looked for it in vain, or only ends."""
    looks = 0

    def wait(*_: Any) -> str | None:
        nonlocal looks
        looks += 1
        return "" if comes and looks > 1 else None

    def absence(_: Any) -> tuple[str, str] | None:
        return ("peer_gone", "process 1 has ended") if looks else None

    device = SimpleNamespace(id=5, process_index=1, platform="cpu")
    mesh: Any = SimpleNamespace(devices=np.array([device]))
    store: Any = SimpleNamespace(wait=wait)
    reported: list[failures.Failure] = []
    monkeypatch.setattr(peers, "absence", absence)
    monkeypatch.setattr(failures, "report", reported.append)
    with contextlib.nullcontext() if comes else pytest.raises(failures.CommunicationError):
        assert agreement._missing(store, mesh, 10.0, agreement.INSTALL) == ""
    assert [(f.missing_process, f.reason) for f in reported] == [(1, "peer_gone")] * (not comes)


@pytest.mark.parametrize("auto", [True, False])
def test_a_process_may_have_ended_before_the_processes_have_met(
    monkeypatch: pytest.MonkeyPatch, auto: bool
) -> None:
    """Nothing watches it yet. It may have called install() like this one."""
    devices = [SimpleNamespace(id=i, process_index=i, platform="cpu") for i in range(2)]
    mesh: Any = SimpleNamespace(devices=np.array(devices))
    store = key_value_store.Store()
    monkeypatch.setattr(key_value_store, "store", lambda *_: store)
    monkeypatch.setattr(timeouts, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(agreement, "_meetings", {})
    body: Any = SimpleNamespace(invars=[], eqns=[])
    reason = (
        agreement.reason_for_no_auto(mesh, agreement.INSTALL_AUTO, str)
        if auto
        else agreement.reason_not_to_rewrite(mesh, body)
    )
    assert reason is not None
    assert reason.startswith("process 1 has not lowered ")
    assert "it has ended or is late, or it has not called jax_intranode.install(" in reason
