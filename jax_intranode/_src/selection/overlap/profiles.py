"""What the cost model knows about a GPU: one `Profile`, measured or scaled from a measured one.

Every measured constant of the overlap model is a field of `Profile`. A GPU whose exact device kind
is in `MEASURED` has its own profile. Every other GPU of the same generation gets the H200's, scaled
by what the GPU reports about itself. Product names are not compared with anything but that table:
"H20" is a prefix of "H200", and PCIe, NVL and MIG variants share the name of a faster GPU.

All ranks must use the same profile. It follows from the device kinds and from the facts that the
processes of a mesh exchange at rendezvous, and the digest that they compare covers these constants.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_intranode._src import reasons
from jax_intranode._src.selection import generations


@dataclass(frozen=True)
class GpuFacts:
    """What a GPU reports about its speed. Zeros stand for what it does not report.

    Attributes:
        device_kind: JAX's name of the GPU.
        compute_capability: Major and minor.
        sms: Number of streaming multiprocessors.
        sm_clock_hz: Highest clock of the SMs.
        link_bytes_per_s: Rate of all active NVLinks together, in one direction.
        memory_bytes_per_s: Peak rate of the memory.
    """

    device_kind: str
    compute_capability: tuple[int, int]
    sms: int
    sm_clock_hz: float
    link_bytes_per_s: float
    memory_bytes_per_s: float

    @property
    def complete(self) -> bool:
        """Whether the GPU has reported everything."""
        return min(self.sms, self.sm_clock_hz, self.link_bytes_per_s, self.memory_bytes_per_s) > 0


@dataclass(frozen=True, kw_only=True)
class TileCosts:
    """Times of one cluster tile of the fused kernel (two row tiles x one column tile), in seconds.

    `python tools/tune_profile.py` fits all but `out_of_step` to runs of tools/fused_probe.cu.

    Attributes:
        stage_s: multiplying one stage, 64 of K.
        gather_s: everything else about a tile of an all-gather, mostly storing it.
        scatter_s: everything else about a tile of a reduce-scatter. None: no kernel has such tiles.
        sum_s: adding the products of one peer to a tile of the rank's own rows. None: likewise.
        out_of_step: factor on an all-gather's tiles among more ranks than `MAX_RANKS_IN_STEP`. The
            probe shows it with 8 ranks; its cause is not known.
    """

    stage_s: float
    gather_s: float
    scatter_s: float | None = None
    sum_s: float | None = None
    out_of_step: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The constants of the cost model for one GPU.

    A comment on a field gives its unit, its meaning and the measurement that yields it:
    [tune] is tools/tune_profile.py, which measures a node.
    [bench OPERATION] is `python -m jax_intranode bench OPERATION --preset sweep`, run twice, the
    second time with `--plan` forcing the other choice; the constant is where the two cross over.
    [probe] is `tools/fused_probe.cu`, run with both choices in turns, likewise.
    """

    # The exact device kind, as `jax.Device.device_kind` gives it.
    name: str
    # Empty if the constants were measured on this GPU; else what they were scaled from.
    scaled_from: str = ""
    # Where the constants come from if they were measured on this node (tuning.py); else empty.
    tuned_by: str = ""
    # Whether reduce-scatters run as the pipeline. Between H100s that was slower than none: the
    # backward pass of 32768 x 16384 x 8192 was 0.93 times as fast. [bench matmul_reduce_scatter]
    pipelines_scatters: bool = False

    # The GPU.

    # Streaming multiprocessors. The fused kernel runs one block on each, in clusters of two.
    sms: int
    # FLOP/s of a large cuBLASLt matmul, settled. [tune]
    matmul_flops: float
    # Bytes/s read plus written by a kernel that streams through the GPU's memory, such as the sum
    # at the end of the pipeline (docs/measurements/experiments.md).
    memory_bytes_per_s: float
    # Bytes/s that a rank receives from its peers by copy engines, piece after piece. [tune]
    copy_bytes_per_s: float
    # The same in one large piece: the link's share of the bound in the tables of `bench`. [tune]
    link_bound_bytes_per_s: float
    # Bytes/s that the fused kernel's sender warps deliver to the peers. [tune]
    sender_bytes_per_s: float

    # The cuBLASLt pipeline.

    # Rows and columns of the output that cuBLASLt computes on an SM at a time; decides how badly
    # the matmul of a single shard fills the GPU. A property of cuBLASLt's kernels.
    pipeline_tile: int
    # Fewest bytes from peers, among up to `pipeline_least_bytes_ranks` ranks, for which the
    # pipeline is faster than the collective and the matmul; proportionally more among more ranks.
    # [bench all_gather_matmul, matmul_reduce_scatter]
    pipeline_least_bytes: float
    pipeline_least_bytes_ranks: int
    # From this ratio of link time to matmul time on, the last shard of an all-gather is divided
    # into two pieces, and the first and last shards of a reduce-scatter into three and two.
    # [bench, --plan last_pieces=2 and --plan first_pieces=3,last_pieces=2]
    gather_pieces_ratio: float
    scatter_pieces_ratio: float

    # The fused kernel against the pipeline and against no overlap.

    # Seconds. The fused kernel is faster than the pipeline if the whole matmul takes less than
    # the first of these, or if the matmul of one rank's shard takes less than the operation's own
    # limit. [bench --plan tile_columns=256, on matmuls of 0.3 to 10 ms]
    fused_longest_s: float
    fused_longest_gather_shard_s: float
    fused_longest_scatter_shard_s: float
    # Fewest bytes from each peer for which the fused kernel is faster than no overlap; never more
    # than `pipeline_least_bytes` in all. [bench --plan, on M of 512 to 2048]
    fused_least_bytes: float
    # Seconds that a call takes in addition to its tiles: launch, ring grants, the end. [probe]
    fused_call_s: float
    # Seconds that the collective and the matmul, one after the other, take in addition to the time
    # for their bytes and flops. [bench, the rows of jax.lax on M of 512]
    apart_s: float
    # The model has to predict that the fused kernel is this many times faster than no overlap.
    # The second margin is for more ranks than `MAX_RANKS_IN_STEP`, where no pipeline would be
    # faster either: the model was checked less there. [bench --preset sweep: the model's errors]
    fused_margin: float
    fused_margin_out_of_step: float

    # The fused kernel's times.

    # By tile columns. [tune]
    tiles: Mapping[int, TileCosts]
    # In a reduce-scatter whose warpgroups take turns, from this many waves on, with at most this
    # many stages, a partial last wave costs only its fraction of a wave. [probe, K of 512 to 8192]
    even_waves: int
    even_stages: int
    # While one warpgroup sums a tile, the other one's multiplication takes longer by this fraction
    # of the time of the sum. [probe, 8 ranks]
    sum_interference: float
    # Seconds that the last products take to their owner, where no further tile hides it. [probe]
    exposed_s: float

    # The fused kernel's order of tiles.

    # Row pairs per band where the matmul decides. [probe, band_pairs=4,8,16]
    band_pairs: int
    # From this ratio of link time to matmul time on, a band of an all-gather is as large as can be
    # multiplied at the same time, because its rows arrive that fast. [probe, band_pairs]
    arrival_band_ratio: float
    # Row pairs per band of a reduce-scatter among more ranks than `MAX_RANKS_IN_STEP`. [probe]
    out_of_step_band_pairs: int
    # From this ratio of link time to matmul time on, a reduce-scatter among more than two ranks
    # multiplies a part of each peer's tiles in turn. [probe, parts]
    parts_ratio: float
    # {ratio: waves}: products are stored directly if link time / matmul time is at most `ratio` and
    # there are at least `waves` waves; the last tiles arrive later then. [probe, direct=0 and 1]
    direct_waves: Mapping[float, int]
    # Factor on the time of a stage under direct stores. [probe, direct=0 and 1]
    direct_stage: float
    # A reduce-scatter that does not fit the ring is faster in rounds than as a pipeline from this
    # ratio of link time to matmul time on, if a round sends this many bytes. [probe, rounds]
    rounds_ratio: float
    round_least_bytes: float

    # The fused kernel with weight gradients.

    # The model has to predict that one kernel for both gradients is this many times faster than
    # the fused kernel and a matmul after it. [probe with wgrad=1 and with a matmul after it]
    wgrad_margin: float
    # Fraction of the arriving row pairs that an all-gather among more than two ranks multiplies
    # before the weight gradients. [probe, row_pairs_before_wgrad]
    arrivals_before_wgrad: float

    @property
    def clusters(self) -> int:
        """Clusters of two blocks that run at the same time."""
        return max(1, self.sms // 2)

    @property
    def note(self) -> str:
        """What `explain` has to say about the constants; empty if they are shipped and measured."""
        if self.tuned_by:
            return f"model measured by {self.tuned_by}"
        return self.scaled_from and f"model scaled from {self.scaled_from}, not measured"


# docs/measurements/experiments.md has what the plans of the model reach. On 8 GPUs the orders for
# more than four ranks were only measured with four GPUs that stood for eight
# (tools/fused_probe.cu).
H200 = Profile(
    name="NVIDIA H200",
    sms=132,
    matmul_flops=680e12,
    memory_bytes_per_s=3.5e12,
    copy_bytes_per_s=375e9,
    link_bound_bytes_per_s=385e9,
    sender_bytes_per_s=330e9,
    pipelines_scatters=True,
    pipeline_tile=128,
    pipeline_least_bytes=24e6,
    pipeline_least_bytes_ranks=4,
    gather_pieces_ratio=1.0,
    scatter_pieces_ratio=0.8,
    fused_longest_s=1e-3,
    fused_longest_gather_shard_s=0.19e-3,
    fused_longest_scatter_shard_s=2e-3,
    fused_least_bytes=4e6,
    fused_call_s=15e-6,
    apart_s=25e-6,
    fused_margin=1.05,
    fused_margin_out_of_step=1.15,
    tiles={
        128: TileCosts(stage_s=0.375e-6, gather_s=0.3e-6, scatter_s=1.3e-6, sum_s=3.3e-6),
        192: TileCosts(
            stage_s=0.52e-6, gather_s=0.3e-6, scatter_s=2e-6, sum_s=4.8e-6, out_of_step=1.04
        ),
        224: TileCosts(stage_s=0.62e-6, gather_s=2.2e-6, out_of_step=1.06),
        256: TileCosts(stage_s=0.67e-6, gather_s=2.2e-6, scatter_s=5.5e-6, sum_s=3.4e-6),
    },
    even_waves=8,
    even_stages=64,
    sum_interference=0.25,
    exposed_s=10e-6,
    band_pairs=8,
    arrival_band_ratio=0.25,
    out_of_step_band_pairs=2,
    parts_ratio=1.0,
    direct_waves={0.5: 10, 0.8: 64},
    direct_stage=0.975,
    rounds_ratio=0.8,
    round_least_bytes=200e6,
    wgrad_margin=1.09,
    arrivals_before_wgrad=1 / 3,
)

# By exact device kind. Add what `python tools/tune_profile.py` prints for another
# GPU here.
MEASURED = {profile.name: profile for profile in (H200,)}

# What an H200 reports (SXM: 132 SMs, 18 links of NVLink 4, six stacks of HBM3e).
H200_FACTS = GpuFacts(
    device_kind="NVIDIA H200",
    compute_capability=(9, 0),
    sms=132,
    sm_clock_hz=1980e6,
    link_bytes_per_s=18 * 26.5625e9,
    memory_bytes_per_s=6144 / 8 * 2 * 3201e6,
)

# Sustained FLOP/s of a large bfloat16 matmul on GPUs whose Tensor Cores are slower than the number
# of SMs and the clock suggest, which NVML does not report. The H20's data sheet promises 148
# TFLOP/s; power does not bound it, so 95 % of that is assumed.
_SUSTAINED_FLOPS = {"NVIDIA H20": 0.95 * 148e12, "NVIDIA H20-3e": 0.95 * 148e12}


def fused_for(kind: str) -> tuple[int, int] | None:
    """The compute capability that the fused kernel is compiled for, for GPUs of a kind."""
    generation = generations.GENERATIONS.get(generations.hardware_of("gpu", kind))
    return None if generation is None else generation.fused


def known_from_kinds(kinds: Collection[str]) -> Profile | str | None:
    """Returns what the kinds of a mesh's GPUs decide, which are known before the rendezvous.

    Returns:
        The profile if all are GPUs of one measured kind; why there is none, if one of them is no
        GPU that the kernels are compiled for; None if it takes the facts of the GPUs to say.
    """
    first, *others = dict.fromkeys(kinds)
    if not others and first in MEASURED:
        return MEASURED[first]
    for kind in (first, *others):
        if fused_for(kind) is None:
            return reasons.GPUS_NOT_MEASURED.of(gpus=generations.hardware_of("gpu", kind))
    return None


def from_facts(facts: Sequence[GpuFacts]) -> Profile | str:
    """Returns the shipped profile of the GPUs of a mesh, or why there is none.

    GPUs that differ get the profile of the slowest: of one with the smallest of each fact.
    """
    known = known_from_kinds([of_one.device_kind for of_one in facts])
    if known is not None:
        return known
    for of_one in facts:
        if of_one.compute_capability != fused_for(of_one.device_kind):
            return reasons.GPUS_NOT_MEASURED.of(gpus=of_one.device_kind)
        if not of_one.complete:
            return reasons.GPUS_WITHOUT_FACTS.of(gpus=of_one.device_kind)
    return scaled(_slowest(facts))


def _slowest(facts: Sequence[GpuFacts]) -> GpuFacts:
    """The smallest of each fact; the device kinds of all."""
    least: dict[str, Any] = {
        field.name: min(getattr(of_one, field.name) for of_one in facts)
        for field in dataclasses.fields(GpuFacts)
    }
    least["device_kind"] = " and ".join(sorted({of_one.device_kind for of_one in facts}))
    return GpuFacts(**least)


def scaled(facts: GpuFacts) -> Profile:
    """Returns the H200's profile, scaled to a GPU of the same generation.

    Rates scale with what produces them: matmuls with SMs x clock, copies with the NVLinks' rate,
    the sender warps with the links or the SMs, whichever is less. The times of a tile scale with
    the speed of one SM. Thresholds in bytes scale with the link, so that they stand for the same
    time. Latencies, ratios and margins stay.
    """
    sms = facts.sms / H200_FACTS.sms
    clock = facts.sm_clock_hz / H200_FACTS.sm_clock_hz
    link = facts.link_bytes_per_s / H200_FACTS.link_bytes_per_s
    memory = facts.memory_bytes_per_s / H200_FACTS.memory_bytes_per_s
    flops = min(
        H200.matmul_flops * sms * clock,
        *(_SUSTAINED_FLOPS.get(kind, float("inf")) for kind in facts.device_kind.split(" and ")),
    )
    stage = sms * H200.matmul_flops / flops
    return dataclasses.replace(
        H200,
        name=facts.device_kind,
        scaled_from=H200.name,
        pipelines_scatters=False,
        sms=facts.sms,
        matmul_flops=flops,
        memory_bytes_per_s=H200.memory_bytes_per_s * memory,
        copy_bytes_per_s=H200.copy_bytes_per_s * link,
        link_bound_bytes_per_s=H200.link_bound_bytes_per_s * link,
        sender_bytes_per_s=H200.sender_bytes_per_s * min(link, sms),
        pipeline_least_bytes=H200.pipeline_least_bytes * link,
        fused_least_bytes=H200.fused_least_bytes * link,
        round_least_bytes=H200.round_least_bytes * link,
        tiles={
            columns: dataclasses.replace(
                tile,
                stage_s=tile.stage_s * stage,
                gather_s=tile.gather_s / clock,
                scatter_s=None if tile.scatter_s is None else tile.scatter_s / clock,
                sum_s=None if tile.sum_s is None else tile.sum_s / clock,
            )
            for columns, tile in H200.tiles.items()
        },
    )
