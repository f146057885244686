"""The key-value stores of a rendezvous, on a fake of JAX's client."""

import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import jax_intranode
from jax_intranode._src.command_line.launcher.rank import rank_env
from jax_intranode._src.group import key_value_store
from jax_intranode._src.jax_private import distributed
from jax_intranode._src.selection import config

pytestmark = pytest.mark.one_version


class FakeClient:
    """A dict with the errors of JAX's key-value client."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.broken: str | None = None

    def key_value_set(self, key: str, value: str) -> None:
        if self.broken:
            raise RuntimeError(self.broken)
        if key in self.values:
            raise RuntimeError(f"ALREADY_EXISTS: Config key {key} already exists.")
        self.values[key] = value

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        if self.broken:
            raise RuntimeError(self.broken)
        assert isinstance(timeout_in_ms, int) and timeout_in_ms > 0
        if key not in self.values:
            raise RuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
        return self.values[key]


def stores(client: FakeClient, processes: tuple[int, ...]) -> list[Any]:
    return [key_value_store.KeyValueStore(client, "p/", p, processes) for p in processes]


def test_gather_names_the_missing_process_and_the_stage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    soon = config.parse({"JAX_INTRANODE_REPORT_AFTER_S": "0.01"})
    monkeypatch.setattr(config, "get", lambda: soon)
    client = FakeClient()
    store = stores(client, (0, 3))[0]
    with pytest.raises(key_value_store.Refused, match=r"process 3 .*\(slabs\)"):
        store.gather("slabs", 1, key_value_store.Deadline(0.5))
    assert [r.getMessage() for r in caplog.records] == [
        "Process 0 has waited 0.01 s for process 3, which has not entered the rendezvous (slabs). "
        "It gives up after 0.5 s."
    ]
    # The value of this process stays, for processes that come later.
    assert client.values == {"p/slabs/0": "1"}


def test_first_claim_wins() -> None:
    first, second = stores(FakeClient(), (0, 1))
    assert first.claim("region/0", "a") == "a"
    assert second.claim("region/0", "b") == "a"
    assert first.claim("region/0", "c") == "a"
    assert second.claim("region/1", "b") == "b"


def test_other_errors_are_not_swallowed() -> None:
    client, soon = FakeClient(), key_value_store.Deadline(0.05)
    client.broken = "UNAVAILABLE: failed to connect"
    store = stores(client, (0, 1))[0]
    for call, *arguments in (
        (store.claim, "k", "v"), (store.wait, "k", soon), (store.gather, "s", 1, soon)
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="UNAVAILABLE"):
            call(*arguments)


def test_keys_of_a_launched_job_cannot_be_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    monkeypatch.setattr(distributed, "key_value_client", lambda: client)
    ranks = [rank_env(rank, 2, "unix:/path") for rank in range(2)]
    assert ranks[0][config.SECRET] == ranks[1][config.SECRET]
    monkeypatch.setenv(config.SECRET, ranks[0][config.SECRET])
    config.check(ranks[0])
    client.values["p/verdict"] = "a stranger's"
    assert key_value_store.store("p/", 1, [0, 1]).claim("verdict", "") == ""
    (key,) = set(client.values) - {"p/verdict"}
    assert re.fullmatch("p/[0-9a-f]{32}/verdict", key)


def test_claim_ends_when_the_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the process that has JAX's coordination service is stopped."""
    answer = threading.Event()
    client = FakeClient()
    monkeypatch.setattr(client, "key_value_set", lambda key, value: answer.wait(60))
    monkeypatch.setattr(config, "get", lambda: SimpleNamespace(meeting_s=0.1))
    store = stores(client, (0, 1))[0]
    with pytest.raises(jax_intranode.CommunicationError, match=r"did not answer within 0\.1 s"):
        store.claim("region/0", "x")
    answer.set()
