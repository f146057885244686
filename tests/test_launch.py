"""`python -m jax_intranode launch`: what the ranks get, what is shown, and how a run ends."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import assert_gone, children_of, is_running
from tiers import full, quick

from jax_intranode import __main__ as command_line
from jax_intranode._src.command_line import machine
from jax_intranode._src.group import nvml

pytestmark = pytest.mark.one_version

Launch = Callable[..., tuple[int, str, str]]

# The ranks begin like this where they use JAX. The variable has to be set before JAX is imported.
JAX = """
    import os
    os.environ["JAX_ENABLE_X64"] = "1"
    import jax
    from jax.sharding import PartitionSpec as P

    def total():
        mesh = jax.make_mesh((jax.device_count(),), "x", axis_types=(jax.sharding.AxisType.Auto,))
        add = jax.shard_map(
            lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
        )
        a = jax.make_array_from_callback(
            (jax.device_count(),), jax.NamedSharding(mesh, P("x")),
            lambda index: jax.numpy.array([index[0].start + 0.5]),
        )
        return jax.jit(add)(a).addressable_data(0)
"""


@pytest.fixture
def launch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Launch:
    """Runs the command: launch(its arguments, the script) -> its exit code, stdout, stderr."""

    def run(arguments: str, *script: str) -> tuple[int, str, str]:
        words = ["launch", "--platform", "cpu", *arguments.split()]
        if script:
            path = tmp_path / "script.py"
            path.write_text("".join(map(textwrap.dedent, script)))
            words = [str(path) if word == "SCRIPT" else word for word in words]
        code = command_line.main(words)
        shown = capfd.readouterr()
        return code, shown.out, shown.err

    return run


def started(tmp_path: Path, script: str, *options: str) -> subprocess.Popen[str]:
    """The command as a process of its own, of two ranks, which have printed "ready"."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    command = ["-m", "jax_intranode", "launch", "--platform", "cpu", "-n", "2"]
    process = subprocess.Popen(
        [sys.executable, *command, *options, str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    ready = 0
    while ready < 2:
        line = process.stdout.readline()
        assert line, "the command has ended"
        ready += "ready" in line
    return process


def lines_of(text: str, rank: int) -> list[str]:
    """What a rank has printed, without what XLA's transport between processes prints."""
    prefix = f"[{rank}] "
    lines = [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]
    return [line for line in lines if not line.startswith("[Gloo]")]


# Ordinary runs.


def test_lines_have_the_rank_in_front_and_files_have_them_as_they_are(
    launch: Launch, tmp_path: Path
) -> None:
    code, out, err = launch(
        f"-n 2 --log-dir {tmp_path}/logs SCRIPT --steps 10",
        """
        import os, sys
        print("arguments", sys.argv[1:])
        print(os.environ["JAX_INTRANODE_RANK"], os.environ["JAX_INTRANODE_WORLD_SIZE"])
        print("to stderr", file=sys.stderr)
        print("10 %\\r20 %\\r30 %\\r")
        print("no end of the line", end="")
        """,
    )

    assert code == 0
    for rank in range(2):
        expected = ["arguments ['--steps', '10']", f"{rank} 2"]
        assert lines_of(out, rank) == [*expected, "30 %", "no end of the line"]
        assert lines_of(err, rank) == ["to stderr"]
        written = (tmp_path / "logs" / f"rank{rank}.log").read_bytes().decode()
        for part in (*expected, "to stderr\n", "10 %\r20 %\r30 %\r\n", "no end of the line"):
            assert part in written


# Sockets of the process in which others could connect to it.
LISTENS = """
    files = [f"/proc/self/fd/{fd}" for fd in range(3, 200)]
    own = [os.readlink(file) for file in files if os.path.lexists(file)]
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if f"socket:[{inode}]" in own and state == "0A" and "0100007F:" not in address:
                print("listens on", address)
"""

CALLS = {
    "no call": "",
    "no arguments": "jax.distributed.initialize()",
    "the same arguments": """
        jax.distributed.initialize(
            "localhost:12345", 2, int(os.environ["JAX_INTRANODE_RANK"]),
            heartbeat_timeout_seconds=30,
        )
        """,
}


@pytest.mark.parametrize("call", quick(CALLS, ("no call",)))
def test_the_ranks_are_one_program(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    # None is for the ranks: a proxy, what jobs on a network need, and the host devices of a test in
    # one process.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "192.0.2.1:9")
    for name in ("CERT", "KEY", "CA"):
        monkeypatch.setenv(f"JAX_MTLS_{name}_FILE", "/no/such/file")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    code, out, err = launch(
        "-n 2 SCRIPT",
        JAX,
        CALLS[call],
        "\nprint(jax.process_index(), jax.local_device_count(), total(), total().dtype)",
        LISTENS,
    )

    assert code == 0, err
    # 64 bits: the script has set the variable before JAX read it. XLA listens on loopback only.
    assert [lines_of(out, rank) for rank in range(2)] == [
        ["0 1 [2.] float64"],
        ["1 1 [2.] float64"],
    ], err
    assert "proxy" not in err
    assert ("the processes meet at unix:" in err) == (call == "the same arguments")


# Faults.


def test_the_first_failure_is_the_last_thing_shown(launch: Launch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    code, _, err = launch(
        "-n 3 --grace 3 SCRIPT",
        f"""
        import os, signal, sys, time
        rank, fifo = int(os.environ["JAX_INTRANODE_RANK"]), {str(tmp_path / "fifo")!r}
        if rank == 1:
            os.open(fifo, os.O_WRONLY)
            raise ValueError("rank 1 broke")
        if rank == 2:
            open(fifo).read()  # until rank 1 has ended
            sys.exit("rank 2 broke as a consequence")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as JAX does
        time.sleep(60)
        """,
    )

    assert code == 1
    head, _, report = err.rpartition("Its last lines:\n")
    assert "launch: rank 1 failed first, after " in head
    assert "; ending ranks 0, 2" in head
    *traceback, after = report.splitlines()
    assert traceback[0] == "[1] Traceback (most recent call last):"
    assert traceback[-1] == "[1] ValueError: rank 1 broke"
    assert not any("runpy" in line or "start_rank" in line for line in traceback)
    assert after == "launch: after it, rank 0: SIGKILL, rank 2: exit code 1"


@pytest.mark.parametrize("end", ["sys.exit(3)", "os._exit(3)", "fails('timeout'); sys.exit(3)"])
def test_the_rank_that_fails_first_may_end_last(launch: Launch, tmp_path: Path, end: str) -> None:
    """Its peer learns of it from an exit handler, or by a socket, and ends at once."""
    os.mkfifo(tmp_path / "fifo")
    code, _, err = launch(
        "-n 2 --grace 0.6 SCRIPT",
        f"""
        import atexit, os, sys, time, types
        fifo = {str(tmp_path / "fifo")!r}

        def fails(reason):
            from jax_intranode._src.health import failures
            failures.current = lambda: types.SimpleNamespace(reason=reason)

        if os.environ["JAX_INTRANODE_RANK"] == "0":
            open(fifo).read()  # until the peer closes it
            if {"fails" in end}:
                fails("peer_gone")
            sys.exit("rank 0 broke as a consequence")
        told = os.open(fifo, os.O_WRONLY)

        @atexit.register
        def takes_long():
            os.close(told)
            time.sleep(60)

        {end}
        """,
    )
    assert code == 3, err
    assert "launch: rank 1 failed first, after " in err and ": exit code 3" in err, err


def test_restarts(launch: Launch, tmp_path: Path) -> None:
    script = """
        import os, sys
        rank, restart = os.environ["JAX_INTRANODE_RANK"], os.environ["JAX_INTRANODE_RESTART"]
        print("restart", restart)
        sys.exit(3 if rank == "1" and int(restart) < 2 else 0)
        """
    code, out, err = launch(f"-n 2 --grace 1 --restarts 1 --log-dir {tmp_path} SCRIPT", script)
    assert code == 3
    assert lines_of(out, 1) == ["restart 0", "restart 1"]
    assert "launch: restart 1 of 1\n" in err
    assert (tmp_path / "rank1.log").read_text() == "restart 0\n"
    assert (tmp_path / "rank1.restart1.log").read_text() == "restart 1\n"

    code, out, err = launch("-n 2 --grace 1 --restarts 5 SCRIPT", script)
    assert code == 0
    assert lines_of(out, 1) == ["restart 0", "restart 1", "restart 2"]


def test_the_time_limit_shows_where_the_ranks_are(launch: Launch) -> None:
    """And ends what they have left behind, also one that has ended in time."""
    code, out, err = launch(
        "-n 2 --timeout 5 --restarts 5 SCRIPT",
        """
        import os, subprocess, time
        print(os.getpid(), subprocess.Popen(["sleep", "60"]).pid)
        def stuck_here():
            time.sleep(60)
        if os.environ["JAX_INTRANODE_RANK"] == "1":
            stuck_here()
        """,
    )
    assert code == 124
    assert "launch: ending rank 1: not finished after 5 s\n" in err
    assert any("in stuck_here" in line for line in lines_of(err, 1))
    assert "restart" not in err
    pids = [int(pid) for rank in range(2) for line in lines_of(out, rank) for pid in line.split()]
    assert len(pids) == 4
    assert_gone(pids)


# Signals to the command.


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, full(signal.SIGINT), full(signal.SIGTERM), full(signal.SIGHUP)],
)
def test_nothing_outlives_the_command(tmp_path: Path, number: signal.Signals) -> None:
    process = started(
        tmp_path,
        """
        import signal, subprocess, os, time
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: print("got", number, flush=True))
        child = subprocess.Popen(["sleep", "60"])
        print("ready", os.getpid(), child.pid, flush=True)
        while True:
            time.sleep(1)
        """,
        *("--grace", "1"),
    )
    pids = children_of(process.pid)
    assert len(pids) == 5  # two ranks, a child of each, and the guard
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)

    if number is signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number
        assert f"launch: {number.name}: ending the ranks\n" in output
        assert all(f"[{rank}] got {number:d}\n" in output for rank in range(2))
    assert_gone(pids)


def test_a_full_pipe_that_nobody_reads_delays_nothing(tmp_path: Path) -> None:
    process = started(
        tmp_path,
        """
        import os, sys, time
        print("ready", flush=True)
        if os.environ["JAX_INTRANODE_RANK"] == "1":
            time.sleep(0.5)
            sys.exit(5)
        while True:
            print("x" * 100)
        """,
        *("--grace", "0.5"),
    )
    ranks = children_of(process.pid)
    deadline = time.monotonic() + 20
    while any(map(is_running, ranks)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, ranks))
    time.sleep(0.3)
    assert process.poll() is None  # the report waits for somebody who reads it
    assert "rank 1 failed first" in process.communicate(timeout=30)[0]
    assert process.returncode == 5


# Wrong input.


@pytest.mark.parametrize(
    ("variable", "expected"),
    [(None, 4), ("0,1", 2), ("", 0), ("-1", 0), ("2,-1,1", 1), ("0,1,2,3,4,5", 4)],
)
def test_gpus_that_cuda_sees(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: int
) -> None:
    monkeypatch.setattr(
        nvml,
        "session",
        lambda: contextlib.nullcontext(types.SimpleNamespace(nvmlDeviceGetCount=lambda: 4)),
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert machine.visible_gpus() == expected
