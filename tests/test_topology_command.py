"""The command `topology`: links as text, as JSON and as a picture."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from test_topology import make_reports

from jax_intranode import __main__ as command_line
from jax_intranode._src.group import topology as topo
from jax_intranode._src.group.topology import LinkReport


def recorded(directory: Path, reports: list[LinkReport]) -> str:
    """A file as `topology --json` prints it on such a node."""
    file = directory / "node.json"
    file.write_text(json.dumps({"gpus": [dataclasses.asdict(report) for report in reports]}))
    return str(file)


SWITCHED = make_reports(4, {}, [18] * 4)
RING = make_reports(4, {(0, 1): 4, (1, 2): 4, (2, 3): 4, (0, 3): 2})


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["topology", "--from", recorded(tmp_path, SWITCHED)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fully_connected, 4 GPU(s)"
    assert lines[1].split() == ["GPU0", "GPU1", "GPU2", "GPU3"]
    assert lines[3].split()[:5] == ["GPU1", "NV18", "X", "NV18", "NV18"]
    assert "all GPUs are linked" in lines[-1]
    assert command_line.main(["topology", "--from", recorded(tmp_path, RING)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:5] == ["GPU0", "X", "NV4", "-", "NV2"]
    assert "falls back to jax.lax" in lines[-1]


@pytest.mark.parametrize("reports", [SWITCHED, RING], ids=["switched", "ring"])
def test_json_is_what_from_reads(
    reports: list[LinkReport], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["topology", "--json", "--from", recorded(tmp_path, reports)]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert found["links"] == [list(row) for row in topo.link_matrix(reports)]
    (tmp_path / "again.json").write_text(out)
    assert command_line.main(["topology", "--json", "--from", str(tmp_path / "again.json")]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")
@pytest.mark.parametrize("reports", [SWITCHED, RING, SWITCHED[:1]], ids=["switched", "ring", "one"])
def test_picture(reports: list[LinkReport], tmp_path: Path) -> None:
    file = tmp_path / "links.png"
    source = recorded(tmp_path, reports)
    assert command_line.main(["topology", "--from", source, "--png", str(file)]) == 0
    assert file.read_bytes()[:4] == b"\x89PNG"


def test_a_node_without_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert command_line.main(["topology"]) == 0
    assert "no GPUs: the Python package nvidia-ml-py cannot" in capsys.readouterr().out
    assert command_line.main(["topology", "--png", str(tmp_path / "links.png")]) == 2
    assert "there are no GPUs to draw" in capsys.readouterr().err
