"""What commands have in the source tree only: an installed package says where to find it."""

import sys
from pathlib import Path

import pytest

from jax_intranode import __main__ as command_line
from jax_intranode._src.command_line import source_tree


@pytest.mark.parametrize(
    ("line", "package"),
    [
        ("bench psum --peers all", "bench_peers"),
        ("bench psum --platform cpu --plot x.png", "bench_plots"),
        ("bench mlp_block", "bench_programs"),
        ("demo --platform cpu --png x.png", "bench_plots"),
        ("plot rows.json -o x.png", "bench_plots"),
        ("soak --faults --platform cpu", "soak_faults"),
    ],
)
def test_without_the_source_tree(
    line: str,
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(source_tree, "_ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    try:
        code = command_line.main(line.split())
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert f"needs {package} in the folder tools, which only the source tree has: run" in message
