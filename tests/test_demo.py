"""The command `demo`: what it measures and prints."""

import re
from typing import Any

import pytest

from jax_intranode import __main__ as command_line
from jax_intranode._src.command_line import machine
from jax_intranode._src.command_line.bench import command as bench
from jax_intranode._src.command_line.bench.settings import Settings

pytestmark = pytest.mark.one_version


@pytest.mark.parametrize(("gpus", "wrong"), [(1, 0), (0, 3)])
def test_without_gpus(
    gpus: int, wrong: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With made-up rows in the place of measurements; our calls take 10 µs."""

    def run_mode(settings: Settings, *_: Any, shows_table: bool) -> dict[str, Any]:
        assert not shows_table
        assert (settings.name, settings.platform, settings.devices) == ("psum", "cpu", 2)
        row = {"time_us": 10.0, "algorithm": "one_shot", "wrong": wrong, "lax_wrong": 0}
        rows = [
            {"size": size, "lax_time_us": 250.0 / k, "ratio": 25.0 / k, **row}
            for k, size in enumerate(settings.sizes, 1)
        ]
        return {"header": {}, "rows": rows}

    monkeypatch.setattr(bench, "run_mode", run_mode)
    monkeypatch.setattr(machine, "visible_gpus", lambda: gpus)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert command_line.main(["demo"]) == (1 if wrong else 0)
    out = capsys.readouterr().out
    assert re.search(r"^ +1 KB +10\.0 +250\.0 +25\.0x  #{40}$", out, re.MULTILINE)
    assert re.search(r"^ +64 KB +10\.0 +62\.5 +6\.2x  #{10}$", out, re.MULTILINE)
    right = "12 elements are WRONG." if wrong else "All results are right."
    assert f"jax.lax takes up to 25.0 times as long. {right}" in out
    assert "gloo" in out and "doctor" in out
