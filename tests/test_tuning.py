"""JAX_INTRANODE_TUNING: files that are read, refused, and obeyed."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jax_intranode._src.native import definitions
from jax_intranode._src.selection import select, table, tuning
from jax_intranode._src.selection.overlap.profiles import H200, Profile

pytestmark = pytest.mark.one_version

ROW = table.Row(4096, "two_shot", 1, 1)


def fields_of(
    rows: dict[tuple[str, str, str, int], tuple[table.Row, ...]],
    platform: str = "cpu",
    device: str = "cpu",
    profile: Profile | None = None,
) -> dict[str, Any]:
    return {
        "platform": platform,
        "device": device,
        "devices": 8,
        "versions": {"jax": "0.12.0.1"},
        "date": "2026-11-23T12:00:00+00:00",
        "tables": [tuning.table_fields(*key, of_key) for key, of_key in rows.items()],
        "profile": None if profile is None else dataclasses.asdict(profile),
    }


def of_psum(*rows: table.Row) -> dict[tuple[str, str, str, int], tuple[table.Row, ...]]:
    return {("multi", "psum", "bare", definitions.MAX_WORLD_SIZE): rows}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "node.json"
    tuning.write(path, fields_of(of_psum(ROW)))
    return path


# Reading.


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rows = {
        ("single", "psum", "bare", 2): (
            table.Row(1 << 10, "one_shot", 64, 128),
            table.Row(1 << 20, "two_shot", 512, 256),
            table.Row(1 << 30, "two_shot", 512, 256, 4 << 20),
        ),
        ("multi", "all_gather", "flagged", 4): (),
    }
    profile = dataclasses.replace(H200, sms=100, exposed_s=1.25e-5)
    path = tmp_path / "node.json"
    tuning.write(path, fields_of(rows, "gpu", H200.name, profile))
    read = tuning.read(str(path))
    assert read.rows == rows and (read.platform, read.device) == ("gpu", "NVIDIA H200")
    assert read.profile == dataclasses.replace(profile, tuned_by=f"JAX_INTRANODE_TUNING={path}")
    assert f"JAX_INTRANODE_TUNING={path}" in read.profile.note
    assert str(path) in str(read) and read.digest in str(read)


def test_digest_is_of_what_decides(file: Path) -> None:
    def digest(*rows: table.Row, profile: Profile | None = H200, **others: Any) -> str:
        fields = fields_of(of_psum(*rows), "gpu", H200.name, profile)
        tuning.write(file, fields | others)
        return tuning.read(str(file)).digest

    found = [
        digest(),
        digest(ROW),
        digest(dataclasses.replace(ROW, nbytes=4097)),
        digest(dataclasses.replace(ROW, threads=64)),
        digest(device="NVIDIA H100", profile=None),
        digest(profile=None),
        digest(profile=dataclasses.replace(H200, sms=131)),
    ]
    assert len(set(found)) == len(found)
    assert digest(date="2027-01-01", seconds=5) == found[0]


# What is said of a content that is not the one that was measured.
DIGEST = "content has the digest"


def damaged(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        fields = json.loads(path.read_text())
        change(fields)
        path.write_text(json.dumps(fields))

    return apply


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


def put_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_text(path.read_text()[:-20]), "not JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "not JSON"),
        (lambda path: path.write_text("[]"), "not a file of `tune`"),
        (damaged(lambda f: f.update(format=0)), "the file has layout 0, and this is 1"),
        (damaged(lambda f: f.update(jax_intranode="0.0.1")), "has jax_intranode 0.0.1, and this"),
        (damaged(lambda f: f.pop("tables")), "damaged ('tables')"),
        # Whatever else has changed, it is not what was measured.
        (damaged(lambda f: f["tables"][0].update(ranks=9)), DIGEST),
        (damaged(lambda f: f.pop("digest")), "damaged ('digest')"),
        (lambda path: path.write_text("[" * 1_000_000), "not JSON: maximum recursion depth"),
        (damaged(lambda f: f.update(profile={"tiles": nested(500)})), "damaged"),
        (damaged(lambda f: f.update(format="\x1b[2J" + "x" * 3_000_000)), "layout ?[2Jxxx"),
        (lambda path: os.truncate(path, 1 << 30), "a regular file of at most 16 MiB"),
        (put_fifo, "a regular file of at most 16 MiB"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    file: Path, damage: Callable[[Path], object], says: str
) -> None:
    damage(file)
    with pytest.raises(ValueError) as error:
        tuning.read(str(file))
    assert says in str(error.value) and f"JAX_INTRANODE_TUNING={str(file)!r}" in str(error.value)
    assert len(str(error.value)) < 1000 and str(error.value).isprintable()


# Selection.


def test_tuned_rows_take_the_place_of_shipped_ones() -> None:
    tuned = table.Tuned(
        {
            ("multi", "psum", "bare", 4): (table.Row(1 << 16, "two_shot", 64, 7),),
            ("multi", "all_gather", "bare", 4): (),
        },
        "node.json",
    )

    def choose(operation: str, world: int, nbytes: int, **more: Any) -> select.Selection:
        usual = {
            "dtype": "bfloat16", "hardware": "hopper", "mode": "multi", "tuned": tuned,
            "epoch_buffer_bytes": 1 << 30,
        }  # fmt: skip
        return select.select(operation, world_size=world, nbytes=nbytes, **usual | more)

    for world in (2, 3, 4):  # those of the next larger group hold
        chosen = choose("psum", world, 1 << 16)
        assert (chosen.algorithm, chosen.threads, chosen.blocks) == ("two_shot", 64, 7)
        assert "(measured by node.json)" in chosen.reason
        above = choose("psum", world, (1 << 16) + 16)
        assert above.algorithm == "lax" and "up to 65536" in above.reason
        none = choose("all_gather", world, 16)
        assert none.algorithm == "lax" and "up to 0 are faster than lax" in none.reason
        # A forced algorithm takes a row of its own, or the launch of the last one.
        forced = choose("psum", world, 16, algorithm="one_shot")
        assert (forced.algorithm, forced.threads) == ("one_shot", 64)
    for operation, world, more in (
        ("psum", 8, {}),
        ("psum", 4, {"mode": "single"}),
        ("psum", 4, {"dtype": "int32"}),
        ("psum_scatter", 4, {}),
    ):
        with_tuning = choose(operation, world, 4096, **more)
        without = choose(operation, world, 4096, tuned=None, **more)
        assert with_tuning == without and "measured on Hopper GPUs" in without.reason


def test_a_tuned_profile_is_for_its_device_only(tmp_path: Path) -> None:
    mine = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3", sms=114)
    path = tmp_path / "node.json"
    tuning.write(path, fields_of({}, "gpu", mine.name, mine))
    with tuning.using(tuning.read(str(path))):
        profile = tuning.profile_for([mine.name] * 2)
        assert profile is not None and profile.sms == 114
        assert tuning.profile_for(["NVIDIA H200"] * 2) is None
        assert tuning.profile_for([mine.name, "NVIDIA H200"]) is None
    assert tuning.profile_for([mine.name]) is None
