"""What another user of the machine has put in the way: links, files, segments. Run as root."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import python

from jax_intranode import __main__ as command_line
from jax_intranode._src.command_line.launcher import own_files
from jax_intranode._src.command_line.launcher.all_ranks import Rank
from jax_intranode._src.command_line.launcher.output import RankOutput
from jax_intranode._src.command_line.launcher.runs import SINGLE_PROCESS, Devices
from jax_intranode._src.command_line.launcher.service import coordination_service
from jax_intranode._src.native import extension

_STRANGER = 65534

pytestmark = [
    pytest.mark.one_version,
    pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, as root"),
]


# The beginning of another user's program.
_BECOMES_A_STRANGER = f"""
os.setgroups([])
os.setresgid({_STRANGER}, {_STRANGER}, {_STRANGER})
os.setresuid({_STRANGER}, {_STRANGER}, {_STRANGER})
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that all users reach; they don't reach tmp_path."""
    directory = Path(tempfile.mkdtemp(prefix="strangers_", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize("kind", ["link", "hard link", "file", "fifo"])
def test_logs_go_to_own_files_only(tmp_path: Path, kind: str) -> None:
    tmp_path.chmod(0o1777)
    victim, log = tmp_path / "victim", tmp_path / "rank0.log"
    victim.write_text("precious")
    if kind == "link":
        log.symlink_to(victim)
    elif kind == "hard link":
        log.hardlink_to(victim)
    elif kind == "file":
        log.write_text("precious")
    else:
        os.mkfifo(log)
    if kind != "hard link":
        os.chown(log, _STRANGER, _STRANGER, follow_symlinks=False)
    with pytest.raises(OSError, match=str(log)):
        RankOutput(0, 1, log, print)
    with pytest.raises(OSError, match=str(log)):
        Rank(Devices("cpu", 1, SINGLE_PROCESS), log).tell(text="more")
    assert victim.read_text() == "precious"
    assert kind != "file" or log.read_text() == "precious"


def test_logs_are_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for _ in range(2):  # the second one begins anew
            output = RankOutput(0, 1, tmp_path / "rank0.log", print)
            output.write(b"text")
            output.close()
    finally:
        os.umask(before)
    assert (tmp_path / "rank0.log").read_text() == "text"
    assert stat.S_IMODE((tmp_path / "rank0.log").stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["link", "link on the way", "link to a link", "directory"])
def test_directories_of_logs_are_own_ones(
    kind: str, place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place.chmod(0o1777)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text("precious")
    planted = place / "planted"
    logs = {"link on the way": planted / "logs", "link to a link": tmp_path / "own"}.get(
        kind, planted
    )
    if kind == "directory":
        planted.mkdir(mode=0o777)
    else:
        planted.symlink_to(tmp_path if kind == "link on the way" else tmp_path / "logs")
    if kind == "link to a link":
        logs.symlink_to(planted)
    os.chown(planted, _STRANGER, _STRANGER, follow_symlinks=False)
    words = ["launch", "--platform", "cpu", "-n", "1", "--log-dir", str(logs), __file__]
    assert command_line.main(words) == 2
    _, err = capfd.readouterr()
    assert f"--log-dir: {planted}: it belongs to another user, {_STRANGER}. Name a" in err
    assert (tmp_path / "logs" / "rank0.log").read_text() == "precious"
    assert kind != "directory" or list(planted.iterdir()) == []


def test_own_links_to_directories_of_logs_are_followed(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "script.py").write_text("print('text')")
    words = ["launch", "--platform", "cpu", "-n", "1", "--log-dir", str(tmp_path / "link/logs")]
    assert python("-m", "jax_intranode", *words, tmp_path / "script.py").returncode == 0
    assert (tmp_path / "target/logs/rank0.log").read_text() == "text\n"


def test_a_directory_that_was_put_in_the_place_of_ours_stays(place: Path) -> None:
    with coordination_service(1) as address:
        ours = Path(address.removeprefix("unix:")).parent
        moved = ours.rename(place / "moved")
        ours.mkdir()
        (ours / "file").write_text("precious")
    assert (ours / "file").read_text() == "precious" and list(moved.iterdir()) == []
    shutil.rmtree(ours)


def test_users_without_a_number_are_others(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a user namespace all others have one number, also whoever has the root directory."""
    number = place / "overflowuid"
    number.write_text(f"{_STRANGER}\n")
    os.chown(place, _STRANGER, _STRANGER)
    monkeypatch.setattr(own_files, "_UNMAPPED", number)
    root = types.SimpleNamespace(stat=lambda _: os.stat(place), geteuid=os.geteuid)
    monkeypatch.setattr(own_files, "os", root)
    assert own_files._is_foreign(place)


# Who opens a file waits for the holder of a lease on it. The system tells the holder.
_LEASE = f"""
import fcntl, os, signal, sys
{_BECOMES_A_STRANGER}
signal.signal(signal.SIGIO, lambda *_: os._exit(print("was opened", flush=True) or 1))
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_CREAT | os.O_EXCL)
os.fchmod(fd, 0o666)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("action", ["allocate", "open"])
def test_segments_of_others_are_not_opened(action: str) -> None:
    module, file = extension.module("cpu"), Path(f"/dev/shm/jax_intranode.{os.getpid()}.leased")
    command, pipe = [sys.executable, "-c", _LEASE, file], subprocess.PIPE
    try:
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as lease:
            assert lease.stdout is not None and lease.stdout.readline() == "ready\n"
            if action == "allocate":
                module.allocate(0, 1 << 20, True).unlink()
            else:
                with pytest.raises(RuntimeError, match="must be this user's"):
                    module.open(0, f"/{file.name}".encode(), 0)
            assert lease.communicate()[0] == ""
    finally:
        file.unlink(missing_ok=True)


def test_segments_of_others_stay() -> None:
    files = [Path(f"/dev/shm/jax_intranode.{os.getpid()}.{kind}") for kind in ("file", "fifo")]
    # Other tests remove segments of this user that nobody uses.
    made = files[0].with_name(f"made_by_{os.getpid()}")
    made.touch(mode=0o600)
    os.chown(made, _STRANGER, _STRANGER)
    try:
        made.rename(files[0])
        os.mkfifo(files[1])
        extension.module("cpu").allocate(0, 1 << 20, True).unlink()
        assert all(file.exists() for file in files)
        os.chown(files[0], 0, 0)
        extension.module("cpu").allocate(0, 1 << 20, True).unlink()
        assert not files[0].exists()
    finally:
        for file in files:
            file.unlink(missing_ok=True)


# What a stranger does to a job while it runs. It prints a line for each attack: how the attack has
# ended, and a line for each place where it has found the secret of the job.
_ATTACKS = f"""
import os, signal, socket, sys
from pathlib import Path
from jax._src.lib import _jax

path, secret = sys.argv[1], sys.stdin.readline().strip().encode()
{_BECOMES_A_STRANGER}

def connect():
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)

def take():
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path + "2")

def join():
    client = _jax.get_distributed_runtime_client("unix:" + path, 1, init_timeout=2)
    client.connect()
    print("has joined", flush=True)
    client.key_value_delete("jax_intranode/0/")
    client.key_value_set("jax_intranode/0/verdict", "evil")
    for number in range(300):
        client.key_value_set(str(number), "x" * 2**20)

attacks = dict(
    connect=connect, take=take, join=join, unlink=lambda: os.unlink(path),
    move=lambda: os.rename(os.path.dirname(path), os.path.dirname(path) + "2"),
    list=lambda: os.listdir(os.path.dirname(path)),
)
print("begins", flush=True)
for name, attack in attacks.items():
    if not (child := os.fork()):  # JAX ends a process whose client can't connect
        signal.alarm(10)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        attack()
        os._exit(0)
    print(name, "refused" if os.waitpid(child, 0)[1] else "done", flush=True)

public = [Path("/proc/net/unix"), *Path("/dev/shm").iterdir()]
for folder in (path[: path.index("/jax_intranode_")], sys.argv[2]):
    for root, _, names in os.walk(folder):
        public += [Path(root, name) for name in names if "jax_intranode" in root or ".log" in name]
public += [file for name in ("cmdline", "environ") for file in Path("/proc").glob("[0-9]*/" + name)]
for file in public:
    try:
        if secret in file.read_bytes():
            print("the secret is in", file)
    except OSError:
        pass
"""

# A rank of the job that is attacked. It uses JAX while the stranger attacks.
_RANK = f"""
import os, socket, subprocess, sys
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
import jax_intranode

path = os.environ["JAX_INTRANODE_COORDINATOR"].removeprefix("unix:")
with socket.socket(socket.AF_UNIX) as client:
    client.connect(path)  # this user can
if os.environ["JAX_INTRANODE_RANK"] == "0":
    stranger = subprocess.Popen(
        [sys.executable, "-c", {_ATTACKS!r}, path, sys.argv[1]],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    stranger.stdin.write(os.environ["JAX_INTRANODE_SECRET"] + chr(10))
    stranger.stdin.flush()
    assert stranger.stdout.readline() == "begins" + chr(10), stranger.communicate()
mesh = jax.make_mesh((2,), "x", axis_types=(jax.sharding.AxisType.Auto,))
x = jax.make_array_from_callback((2,), NamedSharding(mesh, P("x")), lambda i: jax.numpy.ones(1))
total = jax.shard_map(
    lambda x: jax_intranode.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
)
print("sum", jax.jit(total)(x).addressable_data(0), jax_intranode.usage_counter() > 0)
if os.environ["JAX_INTRANODE_RANK"] == "0":
    out, _ = stranger.communicate(timeout=100)
    print(*sorted(out.splitlines()), sep=", ")
"""


def test_a_launched_job_goes_on_beside_strangers(tmp_path: Path) -> None:
    script, logs = tmp_path / "rank.py", tmp_path / "logs"
    script.write_text(_RANK)
    launch = ["-m", "jax_intranode", "launch", "--platform", "cpu", "-n", "2", "--log-dir"]
    done = python(*launch, logs, script, logs, stderr=subprocess.PIPE, timeout_s=200)
    assert done.returncode == 0, done.stderr
    attacks = ("connect", "join", "list", "move", "take", "unlink")
    assert f"[0] {', '.join(f'{attack} refused' for attack in attacks)}\n" in done.stdout
    for rank in range(2):
        assert f"[{rank}] sum [2.] True\n" in done.stdout
