"""The launcher: a failure reaches the parent with its cause, and no process is left behind."""

import errno
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import pytest

from jax_intranode._src.command_line.launcher import own_files
from jax_intranode._src.command_line.launcher.rank import connect, rank_env
from jax_intranode._src.command_line.launcher.runs import RankError, run_ranks
from jax_intranode._src.command_line.launcher.service import coordination_service

pytestmark = pytest.mark.one_version


def test_a_rank_that_fails_does_not_wait_for_the_others(tmp_path: Path) -> None:
    code = (
        "from jax_intranode._src.command_line.launcher.rank import connect\n"
        "import time\n"
        "if connect('cpu') == 1: raise ValueError('rank 1 broke')\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-P", "-c", code]
    with pytest.raises(RankError) as caught:
        run_ranks([command] * 2, timeout_s=60, log_dir=tmp_path, grace_s=0.5, joined=True)
    # JAX's shutdown barrier would have kept rank 1 for longer than its peer's grace.
    assert (caught.value.first_failed, caught.value.exit_codes[1]) == (1, 1)
    assert "ValueError: rank 1 broke" in caught.value.logs[1]


@pytest.mark.parametrize(("chosen", "expected"), [(None, [1]), ([0], [0]), ([2, 3], [2, 3])])
def test_a_rank_takes_the_gpu_of_its_number_or_those_chosen_for_it(
    monkeypatch: pytest.MonkeyPatch, chosen: list[int] | None, expected: list[int]
) -> None:
    for name, value in rank_env(1, 2, 1234, chosen).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # Restores what connect changes.
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **kwargs: calls.append(kwargs))

    assert connect("gpu") == 1

    (given,) = calls
    assert given["coordinator_address"] == given["coordinator_bind_address"] == "127.0.0.1:1234"
    assert (given["num_processes"], given["process_id"]) == (2, 1)
    assert given["local_device_ids"] == expected


# Where the service of the processes listens.


@pytest.mark.parametrize(
    "what", ["plain", "of a group", "spaces", "long", "writable", "foreign", "no sockets"]
)
def test_the_socket_is_where_grpc_finds_it_and_nobody_can_replace_it(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    # Not tmp_path, which is almost as long as a socket's path may be.
    name = {"spaces": "a b%20", "long": "a" * 100}.get(what, "place")
    place = tmp_path_factory.mktemp("s") / name
    place.mkdir()
    if what == "of a group":
        place.chmod(0o2750)  # folders in it get the bit, too
    elif what == "writable":
        place.chmod(0o777)
        place = place / "inner"
        place.mkdir()
    elif what == "foreign":
        if os.geteuid() != 0:
            pytest.skip("only root can give a directory to another user")
        os.chown(place, 65534, 65534)
    elif what == "no sockets":

        class Socket(socket.socket):
            def bind(self, address: Any) -> None:
                if address.startswith(str(place)):
                    raise PermissionError(errno.EPERM, "no sockets here")
                super().bind(address)

        monkeypatch.setattr(socket, "socket", Socket)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with coordination_service(1) as address:
        path = Path(address.removeprefix("unix:"))
        assert path.is_socket() and path.parent.stat().st_mode & 0o777 == 0o700
        assert (place in path.parents) == (what in ("plain", "of a group"))
    assert not path.parent.exists() and list(place.iterdir()) == []


def test_a_place_that_others_can_change_is_the_last_choice_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_files, "_replaceable", lambda place: Path("/folder"))
    with coordination_service(1):
        pass
    assert "Another user may rename what is in /folder" in caplog.text

    def refuse(place: str) -> str:
        raise OSError(errno.ENOSPC, "it is full")

    monkeypatch.setattr(own_files, "_new_directory", refuse)
    with (
        pytest.raises(RuntimeError, match=r"set TMPDIR to one .*/tmp: it is full"),
        coordination_service(1),
    ):
        pass
