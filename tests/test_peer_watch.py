"""The native watch of peers, with a peer that is played by sockets of this process."""

import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from processes import python

from jax_intranode._src.health import peers
from jax_intranode._src.native import extension

pytestmark = pytest.mark.one_version

SECRET = bytes(range(32))
MAGIC = 0x57494E4A
PEER = 1  # its number; this process is number 0


def hello(magic: int = MAGIC, process: int = PEER, secret: bytes = SECRET) -> bytes:
    return struct.pack("=IiI32s", magic, process, os.getpid(), secret)


def connected(address: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect("\0" + address)
    client.settimeout(10)
    return client


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def connecting(timeout_s: float = 20) -> Iterator[Any]:
    """A watch that waits for its peer; all errors of connect() are raised at the end."""
    watch = extension.module("cpu").PeerWatch(0)
    errors: list[Exception] = []

    def connect() -> None:
        try:
            watch.connect([(PEER, "not used", [10**6])], SECRET, timeout_s)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    try:
        yield watch
    finally:
        thread.join()
    if errors:
        raise errors[0]


def test_strangers_are_refused() -> None:
    """And delay nobody: those that say nothing are half open, or slower than the peer."""
    before = descriptors()
    with connecting(timeout_s=60) as watch:
        strangers = [connected(watch.address) for _ in range(7)]
        # The one that is too short comes when memory still has the secret's last byte.
        packets = (
            b"", b"x", hello(process=0), hello()[:-1], hello() + b"x", hello(magic=1),
            hello(secret=bytes(32)),
        )  # fmt: skip
        for stranger, packet in zip(strangers, packets, strict=True):
            stranger.send(packet)
        for stranger in strangers:
            assert stranger.recv(100) == b""  # closed
        quiet = [connected(watch.address) for _ in range(20)]
        quiet[0].shutdown(socket.SHUT_WR)
        peer = connected(watch.address)
        time.sleep(0.3)  # all are accepted; the peer is slow, too
        quiet[1].send(b"slow")
        # Descriptors that come with it are closed.
        pipes = [fd for _ in range(5) for fd in os.pipe()]
        socket.send_fds(peer, [hello()], pipes)
        assert peer.recv(100) == hello(process=0)
        assert peer.fileno() >= 0
    assert all(one.recv(100) == b"" for one in quiet)  # closed
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late,
        pytest.raises(ConnectionRefusedError),  # all peers have connected
    ):
        late.connect("\0" + watch.address)
    for one in (*strangers, *quiet, peer):
        one.close()
    for fd in pipes:
        os.close(fd)
    watch.close()
    del watch
    assert descriptors() <= before


def test_a_process_without_free_descriptors_waits_with_pauses() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    pauses: list[int] = []

    def connect() -> None:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        with pytest.raises(RuntimeError, match="process 1 did not connect in time"):
            watch.connect([(PEER, "not used", [10**6])], SECRET, 1)
        pauses.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)

    watch = extension.module("cpu").PeerWatch(0)
    client = connected(watch.address)
    thread = threading.Thread(target=connect)
    first_free = os.dup(0)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
    try:
        thread.start()
        thread.join()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.close()
    assert pauses[0] >= 5  # one that spins makes none


# The program of another user: it connects to the address in its first argument.
STRANGER = """
import os, socket, sys
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.setresuid(65534, 65534, 65534)
peer.connect("\\0" + sys.argv[1])
peer.settimeout(10)
try:
    peer.send(bytes.fromhex(sys.argv[2]))
    print(peer.recv(100) or "refused")
except OSError:
    print("refused")
"""


def test_another_user_is_refused() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with connecting() as watch:
        assert python("-c", STRANGER, watch.address, hello().hex()).stdout == "refused\n"
        peer = connected(watch.address)
        peer.send(hello())
        assert peer.recv(100) == hello(process=0)
    peer.close()


def test_a_failure_is_told_and_cleaned() -> None:
    """Packets before it that make no sense, and notes of waits that do not, change nothing."""
    huge = b"w" + b" ".join([b"f" * 16] * 5)
    strange = (b"x", b"w", b"w1 2 3", b"w" + bytes(600), huge, huge + b"0 \xff", b"h" * 501)
    with connecting() as watch:
        peer = connected(watch.address)
        peer.send(hello())
        assert peer.recv(100) == hello(process=0)
    watch.arm(extension.module("cpu").platform(), 60)
    for packet in (*strange, b"fKeyError: \n\x1b[31m\xff" + b"x" * 400, b"h", b"s"):
        peer.send(packet)
    end, state = time.monotonic() + 10, ""
    while state != "failed" and time.monotonic() < end:
        time.sleep(0.01)
        ((process, pid, state, _, what, _),) = watch.peers()
    assert (process, pid, state) == (PEER, os.getpid(), "failed")
    assert what.endswith("has failed: KeyError: ??[31m?" + "x" * 400)
    time.sleep(0.1)
    assert watch.peers()[0][2] == "failed"
    watch.close()
    peer.close()


def test_why_a_process_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    for state, reason in {
        "unheard": None, "running": None, "silent": "peer_stopped", "finished": "peer_gone",
        "left": "peer_gone", "failed": "peer_gone", "lost": "peer_gone",
    }.items():  # fmt: skip
        found = [(PEER, 7, state, False, "process 1 is so", False)]
        watch = SimpleNamespace(peers=lambda found=found: found, device_ids={PEER: (4, 5)})
        monkeypatch.setattr(peers, "_watches", [watch])
        assert peers.absence([0, 5]) == (reason and (reason, "process 1 is so"))
        assert peers.absence([0, 1]) is None
