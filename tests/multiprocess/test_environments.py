"""Two processes in places that restrict them: either everything works, or the reason is named.

The places are made with Linux namespaces and capabilities, for which most systems ask for root.
"""

import functools
import shutil
import subprocess

import jax
import pytest
from devices import need_devices
from stress.faults import job, matrix, verdict

pytestmark = pytest.mark.full

SLACK = 6

# A program inside of `unshare --pid` must not be the first process there: that one ignores SIGKILL.
_NOT_THE_FIRST = ["sh", "-c", '"$@"; exit $?', "sh"]
# By name: commands in front of rank 0's and of rank 1's.
PLACES: dict[str, tuple[list[str], list[str]]] = {
    "pid_namespace": ([], ["unshare", "--pid", "--fork", "--mount-proc", *_NOT_THE_FIRST]),
    # /proc shows the processes of another namespace.
    "pid_namespace_wrong_proc": ([], ["unshare", "--pid", "--fork", *_NOT_THE_FIRST]),
    "pid_namespaces": (["unshare", "--pid", "--fork", "--mount-proc", *_NOT_THE_FIRST],) * 2,
    # As containers that share /dev/shm.
    "ipc_namespaces": (
        ["unshare", "--mount", "--ipc", "--pid", "--fork", "--mount-proc", *_NOT_THE_FIRST],
    )
    * 2,
    "no_ptrace": (["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"],) * 2,
}
_READ_ONLY = "mount --bind /dev/shm /dev/shm && mount -o remount,bind,ro /dev/shm"
_MOUNT = ["unshare", "--mount", "sh", "-c"]
# The same, and a part of the reason why jax.lax is used there.
REFUSED: dict[str, tuple[list[str], list[str], str]] = {
    "small_files": (
        *(["sh", "-c", 'ulimit -f 1024 && exec "$@"', "sh"],) * 2,
        "/dev/shm may be full",
    ),
    "read_only_shm": (
        *([*_MOUNT, f'{_READ_ONLY} && exec "$@"', "sh"],) * 2,
        "creating the shared-memory segment",
    ),
    "separate_shm": (
        [],
        [*_MOUNT, 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"],
        "on one machine, with a /dev/shm of their own each",
    ),
}


@functools.cache
def works(command: tuple[str, ...]) -> bool:
    return not command or subprocess.run([*command, "true"], capture_output=True).returncode == 0


def need_place(*commands: list[str]) -> None:
    if jax.devices()[0].platform != "cpu":
        pytest.skip("the places are tried with CPU devices")
    need_devices(2)
    for command in commands:
        if command and (shutil.which(command[0]) is None or not works(tuple(command))):
            pytest.skip(f"this system does not allow {' '.join(command)}")


@pytest.mark.parametrize("place", PLACES)
def test_a_lost_process_is_noticed_in(place: str) -> None:
    prefixes = PLACES[place]
    need_place(*prefixes)
    case = matrix.parse("psum:second_run:kill:1of2")
    seen = job.run(case, "cpu", SLACK, prefixes)
    # A shell in front of the victim has a code of its own.
    found = [what for what in verdict.problems(case, "cpu", seen, SLACK) if "-9" not in what]
    assert found == [], seen


@pytest.mark.parametrize("place", REFUSED)
def test_reason_is_named_in(place: str) -> None:
    """And `jax.lax` takes over."""
    *prefixes, reason = REFUSED[place]
    need_place(*prefixes)
    case = matrix.parse("psum:idle:none:1of2")
    seen = job.run(case, "cpu", SLACK, prefixes)
    assert verdict.problems(case, "cpu", seen, SLACK) == [], seen
    (said,) = {event["text"] for p in seen.processes for event in p.all("explained")}
    assert reason in said, said
