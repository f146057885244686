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
    if settings.shapes:
        (m, k, n), *_ = settings.shapes
        times = {"time_us": 10.0, "lax_time_us": 19.0, "ratio": 1.9, "algorithm": "fused"}
        return [{"m": m, "k": k, "n": n, **times, **common}]
    return [
        {
            "size": size,
            "time_us": 10.0,
            "lax_time_us": 250.0 / (k + 1),
            "ratio": 25.0 / (k + 1),
            "algorithm": "one_shot",
            "graph_time_us": None,
            **common,
        }
        for k, size in enumerate(settings.sizes)
    ]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Puts made-up rows in the place of measurements; returns what would be measured."""
    asked: list[Settings] = []

    def run_mode(settings: Settings, *_: Any, shows_table: bool) -> dict[str, Any]:
        assert not shows_table
        asked.append(settings)
        versions = {"jax": "0.1", "jaxlib": "0.1", "jax_intranode": "0.1", "nccl": "2"}
        device = {"platform": settings.platform, "device": settings.platform}
        more = {"devices": settings.devices, "operation": settings.name, "date": "2026-11-23T"}
        return {"header": {**versions, **device, **more}, "rows": rows_of(settings)}

    monkeypatch.setattr(bench, "run_mode", run_mode)
    return asked


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: count)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)


def test_without_gpus(
    measured: list[Settings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, 1)
    assert command_line.main(["demo"]) == 0
    (settings,) = measured
    assert (settings.name, settings.platform, settings.devices) == ("psum", "cpu", 2)
    out = capsys.readouterr().out
    assert re.search(r"^ +1 KB +10\.0 +250\.0 +25\.0x  #{40}$", out, re.MULTILINE)
    assert re.search(r"^ +64 KB +10\.0 +62\.5 +6\.2x  #{10}$", out, re.MULTILINE)
    assert "jax.lax takes up to 25.0 times as long. All results are right." in out
    assert "gloo" in out and "doctor" in out


def test_a_wrong_result_fails(
    measured: list[Settings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, 0)
    made = rows_of
    monkeypatch.setitem(globals(), "rows_of", lambda s: [row | {"wrong": 3} for row in made(s)])
    assert command_line.main(["demo"]) == 1
    assert "12 elements are WRONG" in capsys.readouterr().out
