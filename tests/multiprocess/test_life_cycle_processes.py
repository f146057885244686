"""The life cycle of communicators of several processes: shutdown and crashes."""

import os
import re
import signal
from collections.abc import Callable

import jax
import multiprocess_ranks
import pytest
from cases_of_set_up import check_sum
from devices import need_ranks
from processes import free_port, segments_of
from tiers import full

import jax_intranode
from jax_intranode._src.command_line.launcher.runs import RankError
from jax_intranode._src.jax_private.distributed import key_value_client

pytestmark = pytest.mark.one_version

# In the ranks.


def crash(rank: int) -> None:
    sums()
    key_value_client().wait_at_barrier("summed", 60_000)
    if jax.process_index() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:  # until the launcher ends it
        check_sum(1)


def sums() -> None:
    check_sum(2)
    assert jax_intranode.usage_counter() > 0, "ours did not run"
    assert segments_of(os.getpid()) == []  # their names are gone as soon as all have them
    print("DONE", os.getpid(), flush=True)


# The tests.


@pytest.mark.parametrize("rank", [0, full(1)])
def test_restart_after_a_crash(
    ranks: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
) -> None:
    """A crashed run disturbs no later one at the same port. Neither of both leaves a segment."""
    need_ranks(2)
    port = free_port()
    monkeypatch.setattr(multiprocess_ranks, "free_port", lambda: port)
    with pytest.raises(RankError) as error:
        ranks(crash, 2, arguments=[rank], env={"JAX_INTRANODE_TIMEOUT_S": "20"})
    assert error.value.exit_codes[rank] == -signal.SIGKILL
    logs = "".join([*error.value.logs, *ranks(sums, 2)])
    pids = [int(pid) for pid in re.findall(r"^DONE (\d+)$", logs, re.MULTILINE)]
    assert len(pids) == 4
    assert not any(segments_of(pid) for pid in pids)
