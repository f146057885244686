"""Profiles of GPUs: which one a GPU gets, and that scaled ones give sensible plans."""

import dataclasses
import json
from unittest import mock

import pytest
from test_commands_on_gpus import Node
from test_overlap_plan import GATHER, RING, SCATTER, plan
from test_topology import SWITCH_LINK, bus_id, install

from jax_intranode._src.command_line.bench import settings as of_bench
from jax_intranode._src.group import agreed, rendezvous, topology
from jax_intranode._src.native import definitions
from jax_intranode._src.selection import records
from jax_intranode._src.selection.overlap import choice, profiles
from jax_intranode._src.selection.overlap.plan import Plan
from jax_intranode._src.selection.overlap.profiles import H200, H200_FACTS, GpuFacts, Profile
from jax_intranode._src.selection.overlap.sizes import Sizes

pytestmark = pytest.mark.one_version


def facts(
    kind: str,
    sms: int = 132,
    clock_mhz: int = 1980,
    links: int = 18,
    memory_tb_per_s: float = 3.35,
    capability: tuple[int, int] = (9, 0),
) -> GpuFacts:
    return GpuFacts(
        kind, capability, sms, 1e6 * clock_mhz, links * 26.5625e9, 1e12 * memory_tb_per_s
    )


# As their data sheets say.
HOPPERS = [
    facts("NVIDIA H100 80GB HBM3"),
    facts("NVIDIA H100 NVL", clock_mhz=1785, memory_tb_per_s=3.9),
    facts("NVIDIA H100 PCIe", sms=114, clock_mhz=1755, memory_tb_per_s=2.0),
    facts("NVIDIA H800", links=8),
    facts("NVIDIA H20", sms=78, memory_tb_per_s=4.0),
    facts("NVIDIA GH200 480GB", memory_tb_per_s=4.0),
    facts("NVIDIA H200 NVL", clock_mhz=1785, memory_tb_per_s=4.8),
]


def scaled(of_one: GpuFacts) -> Profile:
    profile = profiles.from_facts([of_one])
    assert isinstance(profile, Profile)
    return profile


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("NVIDIA B200", "not measured on blackwell GPUs"),
        ("NVIDIA A100-SXM4-80GB", "not measured on ampere GPUs"),
        ("NVIDIA GeForce RTX 4090", "not measured on gpu GPUs"),
    ],
)
def test_other_generations_are_not_overlapped(kind: str, says: str) -> None:
    assert profiles.known_from_kinds([kind]) == says
    assert profiles.known_from_kinds(["NVIDIA H200", kind]) == says
    assert profiles.from_facts([H200_FACTS, facts(kind)]) == says


def test_different_gpus_get_the_profile_of_the_slowest() -> None:
    h800, pcie = facts("NVIDIA H800", links=8), facts("NVIDIA H100 PCIe", sms=114, clock_mhz=1755)
    both = profiles.from_facts([h800, pcie])
    assert both == profiles.from_facts([pcie, h800])  # in whatever order the processes are
    assert isinstance(both, Profile)
    assert both.name == "NVIDIA H100 PCIe and NVIDIA H800"
    assert both.sms == 114
    assert both.copy_bytes_per_s == scaled(h800).copy_bytes_per_s
    assert both.matmul_flops == scaled(pcie).matmul_flops
    # H200s among others are no H200s.
    mixed = profiles.from_facts([H200_FACTS, facts("NVIDIA H100 80GB HBM3")])
    assert isinstance(mixed, Profile) and mixed.scaled_from


def test_measured_constants_bring_no_pipeline_that_was_slower() -> None:
    of_backward = (SCATTER, 32768, 8192, 16384)
    measured = dataclasses.replace(scaled(facts("NVIDIA H100 80GB HBM3")), scaled_from="")
    chosen = plan(*of_backward, world=2, profile=measured)
    assert chosen == "the pipeline for reduce-scatters was slower on H100s"
    chosen = plan(*of_backward, world=2)
    assert isinstance(chosen, Plan) and not chosen.fused


@pytest.mark.parametrize("of_one", HOPPERS, ids=lambda of_one: of_one.device_kind)
def test_scaled_profiles_give_sensible_plans(of_one: GpuFacts) -> None:
    """Every shape gets a plan that the kernels take, or a reason that says what it is based on."""
    profile = scaled(of_one)
    overlapped_shapes = 0
    for world in (2, 4, 8):
        for operation in (GATHER, SCATTER):
            for m, k, n in of_bench.of_presets(["reference", "sweep"], operation, world):
                for wgrads in (0, 1):
                    of = {"world": world, "profile": profile, "wgrads": wgrads}
                    chosen = plan(operation, m, k, n, **of)
                    if isinstance(chosen, str):
                        assert chosen.endswith("; model scaled from NVIDIA H200, not measured")
                        continue
                    overlapped_shapes += 1
                    # The pipeline for reduce-scatters lost where it was measured.
                    assert chosen.fused or operation == GATHER
                    if chosen.fused:
                        sizes = Sizes(operation, 1, m // world, (k,), (n,), world)
                        assert sizes.fit_fused(chosen, RING)
                        assert definitions.has_fused_kernel(
                            operation, chosen.tile_columns, chosen.wgrad
                        )
                    assert min(chosen.band_pairs, chosen.parts, chosen.rounds) >= 1
    assert overlapped_shapes > 100


def test_what_no_gpu_takes_needs_no_rendezvous() -> None:
    for k, profile, says in (
        (64, None, None),
        (63, None, "multiples of 8"),
        (64, "not measured on blackwell GPUs", "not measured on blackwell"),
        # Whether it is faster, and whether a ring is large enough, is asked later.
        (64, H200, None),
        (1 << 20, H200, None),
    ):
        sizes = Sizes(GATHER, 1, 128, (k,), (64,), 4)
        reason = choice.static_reason(sizes, dtype="bfloat16", profile=profile)
        assert reason is says is None or (reason is not None and str(says) in reason)


def test_facts_are_read_from_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithFacts(Node):
        speed = 26562

        def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[object]:
            assert fields == [90]
            value = type("Value", (), {"uiVal": self.speed})
            return [type("Field", (), {"nvmlReturn": 0, "value": value})]

    nvml = WithFacts([[SWITCH_LINK] * 18, [SWITCH_LINK] * 8])
    install(monkeypatch, nvml)
    found = topology.read_facts(bus_id(0), "NVIDIA H200")
    assert found == dataclasses.replace(H200_FACTS, link_bytes_per_s=18 * 26562e6)
    assert topology.read_facts(bus_id(1), "x").link_bytes_per_s == 8 * 26562e6
    fields = json.loads(json.dumps(dataclasses.asdict(found)))
    assert records.from_json(GpuFacts, fields) == found
    # A GPU that is not there, and a driver that answers nothing.
    assert not topology.read_facts(bus_id(5), "x").complete
    monkeypatch.delattr(Node, "nvmlDeviceGetNumGpuCores")
    assert not topology.read_facts(bus_id(0), "x").complete
    install(monkeypatch, None)
    assert not topology.read_facts(bus_id(0), "x").complete
    assert nvml.users == 0


def test_the_digest_covers_all_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = choice.digest()
    slower = dataclasses.replace(H200, fused_call_s=16e-6)
    with mock.patch.dict(profiles.MEASURED, {H200.name: slower}):
        assert choice.digest() != digest
    with choice.forced(Plan(tile_columns=256)):
        assert choice.digest() != digest
    assert choice.digest() == digest
    monkeypatch.setattr(definitions, "MAX_MATRICES", definitions.MAX_MATRICES + 1)
    assert choice.digest() != digest


def test_the_processes_of_a_mesh_agree_on_a_profile() -> None:
    """It follows from what all of them have said, in whatever order."""
    ours, theirs = facts("NVIDIA H20", sms=78), facts("NVIDIA H100 80GB HBM3")

    def met(*of_processes: GpuFacts) -> agreed.Rendezvous:
        record = agreed.Rendezvous({}, "gpu", "multi")
        hellos = [
            {"matmuls": 130000, "devices": [{"id": i, "links": None, "facts": vars(of_one)}]}
            for i, of_one in enumerate(of_processes)
        ]
        record.reason_for_no_matmuls = rendezvous._reason_for_no_matmuls(record, hellos)
        return record

    both = met(ours, theirs)
    assert both.reason_for_no_matmuls is None and isinstance(both.shipped_profile, Profile)
    assert both.shipped_profile == met(theirs, ours).shipped_profile
    assert met(H200_FACTS, H200_FACTS).shipped_profile is H200
    without, says = met(H200_FACTS, facts("NVIDIA B200")), "not measured on blackwell GPUs"
    assert without.reason_for_no_matmuls == without.shipped_profile == says
