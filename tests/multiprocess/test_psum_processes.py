"""psum with one process a device: all cases in one start of the processes."""

import traceback
from pathlib import Path

import cases
import jax
import pytest
from multiprocess_ranks import run_in_ranks, worlds

from jax_intranode._src import launcher


def run_cases() -> None:
    """In a rank: runs all cases, and says how each went."""
    from jax_intranode._src.compat import key_value_client

    for name, case in cases.CASES.items():
        if case.devices > len(jax.devices()):
            print(f"CASE {name} skipped: needs {case.devices} devices", flush=True)
            continue
        try:
            case.run()
        except BaseException:
            traceback.print_exc()
            print(f"CASE {name} failed", flush=True)
            raise
        # A case ends on all ranks before the next one begins: a failure is found where it is.
        key_value_client().wait_at_barrier(f"case {name}", 60_000)
        print(f"CASE {name} passed", flush=True)


@pytest.fixture(scope="module", params=worlds(), ids=lambda n: f"{n}_processes")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    logs: Path = tmp_path_factory.mktemp("cases") / "logs"
    try:
        run_in_ranks(run_cases, request.param, logs, timeout_s=280)
    except launcher.RankError as error:
        return (logs / "rank0.log").read_text() + "\n" + str(error)
    return (logs / "rank0.log").read_text()


@pytest.mark.parametrize("name", cases.CASES)
def test_case(name: str, outcome: str) -> None:
    if f"CASE {name} skipped" in outcome:
        pytest.skip(outcome.split(f"CASE {name} skipped: ")[1].splitlines()[0])
    assert f"CASE {name} passed\n" in outcome, outcome[-6000:]
