"""What the rendezvous makes of records that no process of this version would send.

A second process is played by a client that changes what the first one has sent. Whatever it sends,
the rendezvous ends in a verdict: a reason to fall back, or none if the change does not matter.
"""

import copy
import json
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from test_key_value_store import FakeClient
from tiers import full

from jax_intranode._src.group import agreed, key_value_store, rendezvous, slabs
from jax_intranode._src.health import peers
from jax_intranode._src.native import extension
from jax_intranode._src.selection import quoting

pytestmark = pytest.mark.one_version

STRANGE = [
    None, True, -1, 0, 1, 2**70, 1e400, float("nan"), "", "x" * 5000, "\x00", "/../etc/passwd",
    "00", "zz", [], [[]], {}, {"error": ""}, {"error": "no"}, {"error": 7}, {"": None},
]  # fmt: skip
REMOTE = 1000  # is added to device ids


class Peer(FakeClient):
    """Process 5, which `change` makes send something else, follows each record of process 0."""

    def __init__(self, change: Any):
        super().__init__()
        self._change = change

    def key_value_set(self, key: str, value: str) -> None:
        super().key_value_set(key, value)
        stage, _, process = key.partition("/")
        if process == "0":
            self.values[f"{stage}/5"] = self._change(stage, of_peer(stage, json.loads(value)))


def of_peer(stage: str, record: Any) -> Any:
    """What process 5 would send: the same for its own devices."""
    if stage == "hello":
        for device in record["devices"]:
            device["id"] += REMOTE
    if stage == "slabs" and isinstance(record, dict) and "error" not in record:
        return {str(int(i) + REMOTE): handle for i, handle in record.items()}
    return record


def meet(monkeypatch: pytest.MonkeyPatch, change: Any) -> str | None:
    """Why a rendezvous of two devices of this process and two of process 5 ends."""
    devices = {device.id: device for device in jax.devices("cpu")[:2]}
    for device in list(devices.values()):
        devices[device.id + REMOTE] = SimpleNamespace(
            id=device.id + REMOTE, process_index=5, platform="cpu", device_kind="cpu"
        )
    client = Peer(change)
    store = key_value_store.KeyValueStore(client, "", 0, (0, 5))
    monkeypatch.setattr(key_value_store, "store", lambda *_: store)

    def no_watch(_: int) -> None:
        raise RuntimeError("no watch in this test")

    monkeypatch.setattr(peers, "Watch", no_watch)
    monkeypatch.setattr(slabs, "probe", lambda *_, **__: None)
    met = agreed.Rendezvous(devices, "cpu", "multi")
    rendezvous._perform(met, [0, 5])
    assert quoting.shown(client.values["verdict"]) == (met.reason or "")
    return met.reason


def places(record: Any) -> Iterator[tuple[Any, Any]]:
    """All places below a record: what has them, and their index or key there."""
    for key, value in [*(record.items() if isinstance(record, dict) else enumerate(record))]:
        yield record, key
        if isinstance(value, dict | list):
            yield from places(value)


def changed(record: Any, dice: random.Random) -> Any:
    """The record with a strange value, or without a value, in one place."""
    whole = [copy.deepcopy(record)]
    parent, key = dice.choice([*places(whole)])
    how = dice.randrange(4)
    if how == 0:
        del parent[key]
    elif how == 1 and isinstance(parent, list):
        parent.append(dice.choice(STRANGE))
    elif how == 1:
        parent[str(dice.choice(STRANGE))] = dice.choice(STRANGE)
    else:
        parent[key] = dice.choice(STRANGE)
    return whole[0] if whole else None


def test_a_sound_record_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert meet(monkeypatch, lambda _, record: json.dumps(record)) is None


def sends(stage: str, text: str) -> Any:
    """A change: this text for one record."""
    return lambda at, record: text if at == stage else json.dumps(record)


def says(**fields: Any) -> Any:
    """A change: these fields in the first record."""
    return lambda at, record: json.dumps({**record, **fields} if at == "hello" else record)


def other_variables(at: str, record: Any) -> str:
    its = {"SLAB_MIB": "7", "RING_MIB": "512", "STRICT": "1", "TOPOLOGY": "unknown"}
    its = {f"JAX_INTRANODE_{name}": value for name, value in its.items()}
    return says(config=record["config"] | its)(at, record) if at == "hello" else json.dumps(record)


DIFFERENT = "processes 0 and 5 of the mesh have a different "


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (sends("hello", "{"), "process 5 sent a record (hello) that is no JSON"),
        (sends("slabs", "[" * 100_000), "process 5 sent a record (slabs) that is no JSON"),
        (sends("hello", "[1]"), "a process sent a record (hello) of another form"),
        (sends("hello", "{}"), f"{DIFFERENT}version"),
        (sends("hello", '{"error": "no"}'), "no"),
        (sends("hello", json.dumps({"error": "\x1b[2J" + "x" * 10**6})), "?[2Jxxx"),
        (sends("slabs", "{}"), "a process sent a record (slabs) of another form"),
        (sends("slabs", '"x"'), "a process sent a record (slabs) of another form"),
        *((says(**{what: "no"}), f"{DIFFERENT}{what}: ") for what in ("version", "protocol")),
        (says(table="no"), f"{DIFFERENT}table: "),
        (says(tuning="no"), f"{DIFFERENT}JAX_INTRANODE_TUNING (digest of the file): "),
        (
            other_variables,
            f"{DIFFERENT}JAX_INTRANODE_TOPOLOGY: not set and unknown, JAX_INTRANODE_SLAB_MIB: not "
            "set and 7, JAX_INTRANODE_STRICT: 0 and 1; give them the same version and environment",
        ),
    ],
)
def test_malformed_records_are_refused(
    monkeypatch: pytest.MonkeyPatch, change: Any, reason: str
) -> None:
    """And those of processes that would decide differently."""
    found = meet(monkeypatch, change)
    assert found is not None and found.startswith(reason), found
    assert len(found) < 600


def test_a_segment_that_is_too_small_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    small = extension.module("cpu").allocate(0, 4096, True)

    def change(stage: str, record: Any) -> str:
        if stage == "slabs":
            record = {i: small.handle().hex() for i in record}
        return json.dumps(record)

    found = meet(monkeypatch, change)
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

        refused += meet(monkeypatch, change) is not None
    assert refused >= rounds / 3
