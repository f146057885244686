"""What another user of the machine has put in the way: links, files, segments. Run as root."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import python

from jax_intranode import __main__ as command_line
from jax_intranode._src.command_line.launcher import output
from jax_intranode._src.command_line.launcher.runs import run_ranks
from jax_intranode._src.native import extension

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
        of_stranger(files[0])
        os.mkfifo(files[1])
        extension.module("cpu").allocate(0, 1 << 20, True).unlink()
        assert all(file.exists() for file in files)
        os.chown(files[0], 0, 0)
        extension.module("cpu").allocate(0, 1 << 20, True).unlink()
        assert not files[0].exists()
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def of_stranger(file: Path) -> None:
    """Makes a file. Other tests remove segments of this user that nobody uses."""
    made = file.with_name(f"made_by_{os.getpid()}")
    made.touch(mode=0o600)
    os.chown(made, _STRANGER, _STRANGER)
    made.rename(file)


@pytest.fixture
def foreign_segments() -> Iterator[list[Path]]:
    files = [Path(f"/dev/shm/jax_intranode.{os.getpid()}.{i}") for i in range(20_000)]
    try:
        of_stranger(files[0])
        for file in files[1:]:
            os.link(files[0], file)
        yield files
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def test_many_segments_of_others_stay(foreign_segments: list[Path]) -> None:
    module = extension.module("cpu")
    for _ in range(3):
        segment = module.allocate(0, 1 << 20, True)
        segment.unlink()
    present = {entry.name for entry in os.scandir("/dev/shm")}
    assert present >= {file.name for file in foreign_segments}


def test_launch_says_whose_log_is_in_the_way(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "rank1.log").symlink_to(tmp_path / "victim")
    words = ["launch", "--platform", "cpu", "-n", "2", "--log-dir", str(tmp_path), __file__]
    assert command_line.main(words) == 2
    _, err = capfd.readouterr()
    assert f"launch --log-dir: {tmp_path}/rank1.log: " in err and "Name a directory of your" in err
    assert not (tmp_path / "victim").exists()


# What a stranger does to a job while it runs. It prints a line for each attack: how the attack has
# ended, and a line for each place where it has found the secret of the job.
_ATTACKS = f"""
import os, signal, socket, sys
from pathlib import Path

path, secret = sys.argv[1], sys.stdin.readline().strip().encode()
if "jax" in sys.argv:
    from jax._src.lib import _jax
os.setgroups([])
os.setresgid({_STRANGER}, {_STRANGER}, {_STRANGER})
os.setresuid({_STRANGER}, {_STRANGER}, {_STRANGER})

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
    connect=connect, take=take, unlink=lambda: os.unlink(path),
    move=lambda: os.rename(os.path.dirname(path), os.path.dirname(path) + "2"),
    list=lambda: os.listdir(os.path.dirname(path)),
)
if "jax" in sys.argv:
    attacks["join"] = join
print("begins", flush=True)
for name, attack in attacks.items():
    if not (child := os.fork()):  # JAX ends a process whose client can't connect
        signal.alarm(10)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        attack()
        os._exit(0)
    print(name, "refused" if os.waitpid(child, 0)[1] else "done", flush=True)

public = [Path("/proc/net/unix"), *Path("/dev/shm").iterdir()]
for folder in (path[: path.index("/jax_intranode_")], *sys.argv[2:]):
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

path = os.environ["JAX_INTRANODE_COORDINATOR"].removeprefix("unix:")
with socket.socket(socket.AF_UNIX) as client:
    client.connect(path)  # this user can
if os.environ["JAX_INTRANODE_RANK"] == "0":
    stranger = subprocess.Popen(
        [sys.executable, "-c", {_ATTACKS!r}, path, *sys.argv[1:]],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    stranger.stdin.write(os.environ["JAX_INTRANODE_SECRET"] + chr(10))
    stranger.stdin.flush()
    assert stranger.stdout.readline() == "begins" + chr(10), stranger.communicate()
if "jax" in sys.argv:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec as P
    import jax_intranode
    mesh = jax.make_mesh((2,), "x", axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.make_array_from_callback(
        (2,), NamedSharding(mesh, P("x")), lambda i: jax.numpy.ones(1)
    )
    total = jax.shard_map(
        lambda x: jax_intranode.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
    )
    print("sum", jax.jit(total)(x).addressable_data(0), jax_intranode.usage_counter() > 0)
if os.environ["JAX_INTRANODE_RANK"] == "0":
    out, _ = stranger.communicate(timeout=100)
    print(*sorted(out.splitlines()), sep=", ")
"""


_REFUSED = "connect refused, list refused, move refused, take refused, unlink refused"


def test_commands_refuse_strangers(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    command = [sys.executable, str(script), str(tmp_path)]
    run_ranks([command], timeout_s=120, log_dir=tmp_path, joined=True)
    assert (tmp_path / "rank0.log").read_text() == f"{_REFUSED}\n"


def test_a_launched_job_goes_on_beside_strangers(tmp_path: Path) -> None:
    script, logs = tmp_path / "rank.py", tmp_path / "logs"
    script.write_text(_RANK)
    launch = ["-m", "jax_intranode", "launch", "--platform", "cpu", "-n", "2", "--log-dir"]
    done = python(*launch, logs, script, logs, "jax", stderr=subprocess.PIPE, timeout_s=200)
    assert done.returncode == 0, done.stderr
    with_join = _REFUSED.replace("list", "join refused, list")
    assert f"[0] {with_join}\n" in done.stdout
    for rank in range(2):
        assert f"[{rank}] sum [2.] True\n" in done.stdout
