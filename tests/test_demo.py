"""The command `demo`: what it measures and prints."""

import re
from typing import Any

import pytest

from jax_intranode import __main__ as command_line
from jax_intranode._src.command_line import machine
from jax_intranode._src.command_line.bench import command as bench
from jax_intranode._src.command_line.bench.settings import Settings

pytestmark = pytest.mark.one_version


def rows_of(settings: Settings) -> list[dict[str, Any]]:
    """Rows as ranks would measure them; our calls take 10 µs."""
    common = {"mode": settings.mode, "dtype": settings.dtypes[0], "wrong": 0, "lax_wrong": 0}
    common |= {"time_us": 10.0, "algorithm": "one_shot", "graph_time_us": None}
    return [
        {"size": size, "lax_time_us": 250.0 / k, "ratio": 25.0 / k, **common}
        for k, size in enumerate(settings.sizes, 1)
    ]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Puts made-up rows in the place of measurements; returns what would be measured."""
    asked: list[Settings] = []

    def run_mode(settings: Settings, *_: Any, shows_table: bool) -> dict[str, Any]:
        assert not shows_table
        asked.append(settings)
        return {"header": {}, "rows": rows_of(settings)}

    monkeypatch.setattr(bench, "run_mode", run_mode)
    return asked


@pytest.mark.parametrize(("gpus", "wrong"), [(1, 0), (0, 3)])
def test_without_gpus(
    gpus: int,
    wrong: int,
    measured: list[Settings],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: gpus)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    made = rows_of
    monkeypatch.setitem(globals(), "rows_of", lambda s: [row | {"wrong": wrong} for row in made(s)])
    assert command_line.main(["demo"]) == (1 if wrong else 0)
    (settings,) = measured
    assert (settings.name, settings.platform, settings.devices) == ("psum", "cpu", 2)
    out = capsys.readouterr().out
    assert re.search(r"^ +1 KB +10\.0 +250\.0 +25\.0x  #{40}$", out, re.MULTILINE)
    assert re.search(r"^ +64 KB +10\.0 +62\.5 +6\.2x  #{10}$", out, re.MULTILINE)
    right = "12 elements are WRONG." if wrong else "All results are right."
    assert f"jax.lax takes up to 25.0 times as long. {right}" in out
    assert "gloo" in out and "doctor" in out
