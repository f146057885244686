"""What another user of the machine has put in the way: links, files, segments. Run as root."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jax_intranode._src import launcher, native
from jax_intranode._src.launcher import output

_STRANGER = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, as root")


@pytest.mark.parametrize("kind", ["link", "file", "fifo"])
def test_logs_go_to_own_files_only(tmp_path: Path, kind: str) -> None:
    tmp_path.chmod(0o1777)
    victim, log = tmp_path / "victim", tmp_path / "rank0.log"
    victim.write_text("precious")
    if kind == "link":
        log.symlink_to(victim)
    elif kind == "file":
        log.write_text("precious")
    else:
        os.mkfifo(log)
    os.chown(log, _STRANGER, _STRANGER, follow_symlinks=False)
    with pytest.raises(OSError, match=str(log)):
        output.open_log(log)
    assert victim.read_text() == "precious"
    assert kind != "file" or log.read_text() == "precious"


def test_logs_are_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for _ in range(2):  # the second one begins anew
            with output.open_log(tmp_path / "rank0.log") as log:
                log.write(b"text")
    finally:
        os.umask(before)
    assert (tmp_path / "rank0.log").read_text() == "text"
    assert stat.S_IMODE((tmp_path / "rank0.log").stat().st_mode) == 0o600


def test_segments_of_others_stay() -> None:
    files = [Path(f"/dev/shm/jax_intranode.{os.getpid()}.{kind}") for kind in ("file", "fifo")]
    try:
        files[0].touch()
        os.mkfifo(files[1])
        os.chown(files[0], _STRANGER, _STRANGER)
        native.module("cpu").allocate(0, 1 << 20, True).unlink()
        assert all(file.exists() for file in files)
        os.chown(files[0], 0, 0)
        native.module("cpu").allocate(0, 1 << 20, True).unlink()
        assert not files[0].exists()
    finally:
        for file in files:
            file.unlink(missing_ok=True)


@pytest.fixture
def foreign_segments() -> Iterator[list[Path]]:
    files = [Path(f"/dev/shm/jax_intranode.{os.getpid()}.{i}") for i in range(20_000)]
    try:
        for file in files:
            file.touch(mode=0o600)
            os.chown(file, _STRANGER, _STRANGER)
        yield files
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def test_many_segments_of_others_stay(foreign_segments: list[Path]) -> None:
    module = native.module("cpu")
    for _ in range(3):
        segment = module.allocate(0, 1 << 20, True)
        segment.unlink()
    present = {entry.name for entry in os.scandir("/dev/shm")}
    assert present >= {file.name for file in foreign_segments}


# A rank of a job. A stranger tries what JAX's service would let him do: to store 300 MB, to set and
# delete keys, to join as a task. All of it begins with a connection. He can't take the address
# either. This user can connect.
_RANK = f"""
import os, socket, subprocess, sys

STRANGER = '''
import os, socket, sys
path = sys.argv[1]
os.setresgid({_STRANGER}, {_STRANGER}, {_STRANGER})
os.setresuid({_STRANGER}, {_STRANGER}, {_STRANGER})

def flood():
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        for _ in range(300):
            client.sendall(bytes(1 << 20))

def take():
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path + "2")

calls = dict(
    flood=flood, take=take, unlink=lambda: os.unlink(path),
    move=lambda: os.rename(os.path.dirname(path), os.path.dirname(path) + "2"),
    list=lambda: os.listdir(os.path.dirname(path)),
)
for name, call in calls.items():
    try:
        call()
        print(name, "done")
    except PermissionError:
        print(name, "refused")
'''
path = os.environ["JAX_INTRANODE_COORDINATOR"].removeprefix("unix:")
with socket.socket(socket.AF_UNIX) as client:
    client.connect(path)
out = subprocess.run(
    [sys.executable, "-c", STRANGER, path], capture_output=True, text=True, check=True, timeout=60
)
print(*sorted(out.stdout.splitlines()), sep=", ")
"""


@pytest.mark.parametrize("how", ["launch", "run_ranks"])
def test_the_service_refuses_strangers(tmp_path: Path, how: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    command = [sys.executable, str(script)]
    if how == "launch":
        done = subprocess.run(
            [sys.executable, "-m", "jax_intranode", "launch", "-n", "1", str(script)],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        text = done.stdout
    else:
        launcher.run_ranks([command], timeout_s=120, log_dir=tmp_path, joined=True)
        text = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    names = ("flood", "list", "move", "take", "unlink")
    assert ", ".join(f"{name} refused" for name in names) in text
