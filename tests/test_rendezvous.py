"""What the rendezvous makes of records that no process of this version would send.

A second process is played by a store that changes what the first one has sent. Whatever it sends,
the rendezvous ends in a verdict: a reason to fall back, or none if the change does not matter.
"""

import copy
import json
import random
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from tiers import full

from jax_intranode._src.group import agreed, key_value_store, rendezvous, slabs
from jax_intranode._src.health import peers
from jax_intranode._src.selection import quoting

pytestmark = pytest.mark.one_version

STRANGE = [
    None, True, -1, 0, 1, 2**70, 1e400, float("nan"), "", "x" * 5000, "\x00", "/../etc/passwd",
    "00", "zz", [], [[]], {}, {"error": ""}, {"error": "no"}, {"error": 7}, {"": None},
]  # fmt: skip
REMOTE = 1000  # is added to device ids


class Malformed(key_value_store.KeyValueStore):
    """The store of process 0. The records of process 1 are changed by `change`."""

    def __init__(self, change: Any):
        self._change = change
        self.verdict: str | None = None
        self.stages: list[str] = []
        client = SimpleNamespace(
            key_value_set=self._set, blocking_key_value_get=lambda key, _: self._values[key]
        )
        self._values: dict[str, str] = {}
        super().__init__(client, "", 0, (0, 1))

    def _set(self, key: str, value: str) -> None:
        stage, _, process = key.partition("/")
        if key == "verdict":
            if self.verdict is not None:
                raise RuntimeError("ALREADY_EXISTS")
            self.verdict = value
        self._values[key] = value
        if process == "0":
            self.stages.append(stage)
            self._values[f"{stage}/1"] = self._change(stage, of_peer(stage, json.loads(value)))


def of_peer(stage: str, record: Any) -> Any:
    """What process 1 would send: the same for its own devices."""
    if stage == "hello":
        for device in record["devices"]:
            device["id"] += REMOTE
    if stage == "slabs" and isinstance(record, dict) and "error" not in record:
        return {str(int(i) + REMOTE): handle for i, handle in record.items()}
    return record


def meet(monkeypatch: pytest.MonkeyPatch, change: Any) -> tuple[str | None, Malformed]:
    """A rendezvous of two devices of this process and two of process 1."""
    devices = {device.id: device for device in jax.devices("cpu")[:2]}
    for device in list(devices.values()):
        devices[device.id + REMOTE] = SimpleNamespace(
            id=device.id + REMOTE, process_index=1, platform="cpu", device_kind="cpu"
        )
    store = Malformed(change)
    monkeypatch.setattr(key_value_store, "store", lambda *_: store)

    def no_watch(_: int) -> None:
        raise RuntimeError("no watch in this test")

    monkeypatch.setattr(peers, "Watch", no_watch)
    monkeypatch.setattr(slabs, "probe", lambda *_, **__: None)
    met = agreed.Rendezvous(devices, "cpu", "multi")
    rendezvous._perform(met, [0, 1])
    assert quoting.shown(store.verdict) == (met.reason or "")
    return met.reason, store


def paths(record: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a record."""
    found = [at]
    if isinstance(record, dict):
        for key in record:
            found += paths(record[key], (*at, key))
    if isinstance(record, list):
        for i, entry in enumerate(record):
            found += paths(entry, (*at, i))
    return found


def changed(record: Any, dice: random.Random) -> Any:
    """The record with a strange value, or without a value, in one place."""
    record = copy.deepcopy(record)
    path = dice.choice(paths(record))
    if not path:
        return dice.choice(STRANGE)
    parent = record
    for key in path[:-1]:
        parent = parent[key]
    how = dice.randrange(4)
    if how == 0:
        del parent[path[-1]]
    elif how == 1 and isinstance(parent, list):
        parent.append(dice.choice(STRANGE))
    elif how == 1:
        parent[str(dice.choice(STRANGE))] = dice.choice(STRANGE)
    else:
        parent[path[-1]] = dice.choice(STRANGE)
    return record


def test_a_sound_record_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    reason, store = meet(monkeypatch, lambda _, record: json.dumps(record))
    assert reason is None
    assert store.stages == ["hello", "watch", "slabs", "open", "write", "read"]


@pytest.mark.parametrize(
    ("stage", "text", "reason"),
    [
        ("hello", "{", "process 1 sent a record (hello) that is no JSON"),
        ("slabs", "[" * 100_000, "process 1 sent a record (slabs) that is no JSON"),
        ("hello", "[1]", "a process sent a record (hello) of another form"),
        ("hello", "{}", "processes 0 and 1 of the mesh have a different version"),
        ("hello", '{"error": "no"}', "no"),
        ("hello", json.dumps({"error": "\x1b[2J" + "x" * 10**6}), "?[2Jxxx"),
        ("slabs", "{}", "a process sent a record (slabs) of another form"),
        ("slabs", '"x"', "a process sent a record (slabs) of another form"),
    ],
)
def test_malformed_records_are_refused(
    monkeypatch: pytest.MonkeyPatch, stage: str, text: str, reason: str
) -> None:
    found, _ = meet(monkeypatch, lambda at, record: text if at == stage else json.dumps(record))
    assert found is not None and found.startswith(reason), found
    assert len(found) < 600


@pytest.mark.parametrize("what", ["version", "protocol", "table", "tuning"])
def test_processes_that_would_decide_differently_are_refused(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def other(stage: str, record: Any) -> str:
        return json.dumps(record | {what: "another"} if stage == "hello" else record)

    found, _ = meet(monkeypatch, other)
    assert found is not None
    named = {"tuning": "JAX_INTRANODE_TUNING (digest of the file)"}.get(what, what)
    assert found.startswith(f"processes 0 and 1 of the mesh have a different {named}: "), found


def test_variables_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    its = {"JAX_INTRANODE_SLAB_MIB": "7", "JAX_INTRANODE_RING_MIB": "512"}
    its |= {"JAX_INTRANODE_STRICT": "1", "JAX_INTRANODE_TOPOLOGY": "unknown"}

    def other(stage: str, record: Any) -> str:
        return json.dumps(
            record | {"config": record["config"] | its} if stage == "hello" else record
        )

    found, _ = meet(monkeypatch, other)
    assert found == (
        "processes 0 and 1 of the mesh have a different JAX_INTRANODE_TOPOLOGY: not set and "
        "unknown, JAX_INTRANODE_SLAB_MIB: not set and 7, JAX_INTRANODE_STRICT: 0 and 1; "
        "give them the same version and environment"
    )


def test_processes_that_differ_are_named_by_their_numbers() -> None:
    same, other = {"version": "1"}, {"version": "2"}
    with pytest.raises(key_value_store.Refused, match=r"processes 2 and 5 .* version: 1 and 2;"):
        rendezvous._refuse_differences([same, same, other], [2, 3, 5])


def test_a_segment_that_is_too_small_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_intranode import _host

    small = _host.allocate(0, 4096, True)

    def change(stage: str, record: Any) -> str:
        if stage == "slabs":
            record = {i: small.handle().hex() for i in record}
        return json.dumps(record)

    found, _ = meet(monkeypatch, change)
    small.unlink()
    assert found is not None and "has fewer than" in found, found


@pytest.mark.parametrize("rounds", [40, full(500)])
def test_random_records(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    refused = 0
    for seed in range(rounds):
        dice = random.Random(seed)
        stage = dice.choice(["hello", "hello", "watch", "slabs", "slabs", "open"])

        def change(at: str, record: Any, dice: random.Random = dice, stage: str = stage) -> str:
            return json.dumps(changed(record, dice) if at == stage else record)

        reason, _ = meet(monkeypatch, change)
        refused += reason is not None
    assert refused >= rounds / 3
