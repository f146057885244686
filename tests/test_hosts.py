"""Which processes are on one host. cases_of_set_up.py has a mesh over several."""

from pathlib import Path

import pytest

from jax_intranode._src.group import rendezvous

pytestmark = pytest.mark.one_version


def test_the_same_dev_shm_is_one_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = rendezvous._host("cpu")
    assert here == rendezvous._host("cpu") and all(here)
    # Two directories of one device, for instance of containers that have no tmpfs there.
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    hosts = [here]
    for name in ("first", "second", "missing"):
        monkeypatch.setattr(rendezvous, "_SHARED_MEMORY", tmp_path / name)
        hosts.append(rendezvous._host("cpu"))
    assert len(set(hosts)) == 4
    assert {host[:2] for host in hosts} == {here[:2]}
    assert here.difference(hosts[1]) == "on one machine, with a /dev/shm of their own each"
    here = rendezvous._host("gpu")
    monkeypatch.setattr(rendezvous, "_SHARED_MEMORY", tmp_path)
    assert rendezvous._host("gpu") == here  # where it does not matter
