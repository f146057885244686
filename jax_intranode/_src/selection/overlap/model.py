"""Predicts what an overlapped matmul costs under each plan, and chooses one: pure functions.

Overlapping hides the time of what travels. The cuBLASLt pipeline costs the waits for the first and
the last piece, which are the same for all sizes. It also loses time where the matmul of one shard
fills the GPU less well than that of all rows, and where the operands of a sum of several terms have
to be copied into one. The fused kernel has none of these costs, but multiplies and sends slower.
"""

import dataclasses
from dataclasses import dataclass

from jax_intranode._src.native import definitions
from jax_intranode._src.selection.overlap.plan import Plan
from jax_intranode._src.selection.overlap.profiles import Profile
from jax_intranode._src.selection.overlap.sizes import Sizes, ring_room


def choose(sizes: Sizes, profile: Profile, ring_bytes: int, wgrads: int = 0) -> Plan | str:
    """Chooses the plan of an operation, or says why it is faster not overlapped.

    `wgrads` is the number of weight gradients, [N, K] each, that the same call should compute.
    """
    chosen = _choose_without_wgrads(Costs(sizes, profile), ring_bytes)
    if isinstance(chosen, str):
        return chosen
    if not (sizes.gathers or chosen.fused or profile.pipelines_scatters):
        return "the pipeline for reduce-scatters was slower on H100s"
    if wgrads == 0:
        return chosen
    return _with_wgrads(Costs(sizes, profile), chosen, wgrads, ring_bytes)


def _choose_without_wgrads(costs: "Costs", ring_bytes: int) -> Plan | str:
    sizes, profile = costs.sizes, costs.profile
    pipeline = _pipeline(costs)
    unsure = sizes.out_of_step and isinstance(pipeline, str)
    fused = _fused(costs, profile.fused_margin_out_of_step if unsure else profile.fused_margin)
    if isinstance(fused, str):
        return fused if isinstance(pipeline, str) else pipeline
    fused = _in_rounds(costs, fused, ring_bytes)
    if not sizes.fit_fused(fused, ring_bytes):
        return pipeline
    # For a sum of several terms the fused kernel also takes longer matmuls than were measured, if
    # copying the operands into one leaves the pipeline nothing to hide.
    if isinstance(pipeline, str) or costs.matmul_s < costs.fused_longest_s:
        return fused
    return pipeline


@dataclass(frozen=True)
class Costs:
    """What an operation takes outside the fused kernel, in seconds."""

    sizes: Sizes
    profile: Profile

    @property
    def link_s(self) -> float:
        """Receiving the peers' rows or products, by copy engines."""
        return self.sizes.received_bytes / self.profile.copy_bytes_per_s

    @property
    def matmuls_s(self) -> list[float]:
        """The matmul of all rows with each matrix, by cuBLASLt."""
        flops = [2 * self.sizes.all_rows * self.sizes.k * n for n in self.sizes.ns]
        return [of_one / self.profile.matmul_flops for of_one in flops]

    @property
    def matmul_s(self) -> float:
        """All of these matmuls."""
        return sum(self.matmuls_s)

    @property
    def link_ratio(self) -> float:
        """Link time / matmul time."""
        return self.link_s / self.matmul_s

    @property
    def joining_s(self) -> float:
        """Copying the operands of a sum of several terms into one, which the pipeline needs."""
        sizes = self.sizes
        copied = 2 * sizes.k * (sizes.all_rows + sizes.ns[0]) if len(sizes.ks) > 1 else 0
        return 2 * copied / self.profile.memory_bytes_per_s  # read and written

    @property
    def fused_longest_s(self) -> float:
        """Matmul time up to which the fused kernel is faster than the pipeline."""
        profile = self.profile
        of_shard = (
            profile.fused_longest_gather_shard_s
            if self.sizes.gathers
            else profile.fused_longest_scatter_shard_s
        )
        return max(profile.fused_longest_s, self.sizes.world_size * of_shard)

    @property
    def shards_lose_s(self) -> float:
        """What the matmuls of single shards lose, because they fill the GPU less well."""
        return sum(
            s * (1 / self._filled(n) - 1)
            for s, n in zip(self.matmuls_s, self.sizes.ns, strict=True)
        )

    def _filled(self, columns: int) -> float:
        """Fraction of the GPU that the matmul of one shard uses, in waves of whole tiles."""
        sizes, sms, tile = self.sizes, self.profile.sms, self.profile.pipeline_tile
        tiles = sizes.outer * -(-sizes.rows // tile) * -(-columns // tile)
        waves = -(-tiles // sms)
        return sizes.outer * sizes.rows * columns / (waves * sms * tile**2)


# The cuBLASLt pipeline.


def _pipeline(costs: Costs) -> Plan | str:
    """Returns the pipeline's plan, or why it is slower than no overlap."""
    sizes, profile = costs.sizes, costs.profile
    ranks = max(1, sizes.world_size / profile.pipeline_least_bytes_ranks)
    least = profile.pipeline_least_bytes * ranks
    if sizes.received_bytes < least:
        return _too_few_bytes(sizes, least)
    hidden_s = costs.link_s - costs.joining_s
    if hidden_s < 0:
        return (
            f"joining the operands of the sum takes {_us(costs.joining_s)} of copying and hides "
            f"{_us(costs.link_s)}"
        )
    lost_s = costs.shards_lose_s
    if lost_s > hidden_s:
        return (
            f"matmuls of {sizes.rows} rows fill the GPU badly: they lose {_us(lost_s)} to hide "
            f"{_us(hidden_s)}"
        )
    if sizes.gathers:
        return Plan(last_pieces=2 if costs.link_ratio > profile.gather_pieces_ratio else 1)
    if costs.link_ratio > profile.scatter_pieces_ratio:
        return Plan(first_pieces=3, last_pieces=2)
    return Plan()


# The fused kernel.


@dataclass(frozen=True)
class FusedCosts:
    """What the fused kernel takes with tiles of one width, in seconds.

    It counts cluster tiles: one row pair x one column tile, which a cluster of two blocks
    computes. A wave is as many of them as there are clusters.
    """

    costs: Costs
    columns: int

    @property
    def row_pairs(self) -> int:
        """Row pairs of a shard."""
        return -(-self.costs.sizes.row_tiles // 2)

    @property
    def tiles(self) -> int:
        """Cluster tiles of a shard."""
        return self.row_pairs * self.costs.sizes.column_tiles(self.columns)

    @property
    def _all_tiles(self) -> int:
        return self.costs.sizes.world_size * self.tiles

    @property
    def _alternating(self) -> bool:
        """Whether one warpgroup stores its tile while the other multiplies the next one."""
        return self.columns <= definitions.MAX_ALTERNATING_COLUMNS

    @property
    def direct(self) -> bool:
        """Whether products are better stored straight into the peers' rings."""
        costs, profile = self.costs, self.costs.profile
        if costs.sizes.gathers or not self._alternating:
            return False
        waves = self._all_tiles / profile.clusters
        return any(
            costs.link_ratio <= ratio and waves >= least
            for ratio, least in profile.direct_waves.items()
        )

    @property
    def _fixed_tile_s(self) -> float:
        """What a tile takes in addition to its stages."""
        tile = self.costs.profile.tiles[self.columns]
        fixed_s = tile.gather_s if self.costs.sizes.gathers else tile.scatter_s
        assert fixed_s is not None  # or it is no tile of this operation
        return fixed_s

    @property
    def tile_s(self) -> float:
        """One cluster tile that is not summed with the peers' products."""
        profile = self.costs.profile
        multiply_s = self.costs.sizes.stages * profile.tiles[self.columns].stage_s
        multiply_s *= profile.direct_stage if self.direct else 1
        return multiply_s + self._fixed_tile_s

    @property
    def matmul_s(self) -> float:
        """All cluster tiles, if nothing has to wait for the link."""
        sizes, profile = self.costs.sizes, self.costs.profile
        tile, tile_s = profile.tiles[self.columns], self.tile_s
        waves: float = -(-self._all_tiles // profile.clusters)
        if sizes.gathers:
            return waves * tile_s * (tile.out_of_step if sizes.out_of_step else 1)
        # The last tiles are those of the rank's own rows. Its peers' products are added to them.
        own: float = -(-self.tiles // profile.clusters)
        multiply_s = tile_s - self._fixed_tile_s
        assert tile.sum_s is not None  # or it is no tile of this operation
        sum_s = (sizes.world_size - 1) * tile.sum_s
        if not self._alternating:
            own_s = own * max(tile_s, multiply_s + sum_s)
        else:
            # One warpgroup sums while the other multiplies, which gets a little slower. Either
            # multiplying decides, and the last sum comes after it; or summing decides, and each
            # warpgroup multiplies and sums every second tile.
            even = self._all_tiles / profile.clusters
            evenly = even >= profile.even_waves and sizes.stages <= profile.even_stages
            if evenly and not sizes.out_of_step:
                waves, own = even, self.tiles / profile.clusters
            own_s = max(
                own * (tile_s + sum_s * profile.sum_interference) + sum_s,
                own / 2 * (multiply_s + sum_s) + multiply_s / 2,
            )
        # If all tiles are multiplied at once, nothing hides the transfer of the products.
        return (waves - own) * tile_s + own_s + (profile.exposed_s if waves == own else 0)

    @property
    def link_s(self) -> float:
        """Sending whole tiles to the peers."""
        return self.costs.sizes.ring_bytes(self.columns) / self.costs.profile.sender_bytes_per_s

    @property
    def seconds(self) -> float:
        """The kernel, without the fixed time of a call."""
        return max(self.matmul_s, self.link_s)

    @property
    def plan(self) -> Plan:
        """The plan: the order in which it goes through its tiles."""
        return self._gather_plan if self.costs.sizes.gathers else self._scatter_plan

    @property
    def _scatter_plan(self) -> Plan:
        sizes, profile = self.costs.sizes, self.costs.profile
        peers = sizes.world_size - 1
        parts = 1
        if sizes.out_of_step or (self.costs.link_ratio > profile.parts_ratio and peers > 1):
            # One part of all peers' tiles is one wave.
            parts = -(-self.tiles // max(1, profile.clusters // peers))
        return Plan(
            tile_columns=self.columns,
            band_pairs=profile.out_of_step_band_pairs if sizes.out_of_step else profile.band_pairs,
            parts=parts,
            direct=self.direct,
        )

    @property
    def _gather_plan(self) -> Plan:
        sizes, profile = self.costs.sizes, self.costs.profile
        band_pairs = profile.band_pairs
        if self.costs.link_ratio > profile.arrival_band_ratio:
            band_pairs = max(1, profile.clusters // sizes.column_tiles(self.columns))
        elif self.row_pairs < band_pairs:
            # The rank's own rows come first. If one band takes more than these, bands should end
            # where the peers' rows do.
            arriving = (sizes.world_size - 1) * self.row_pairs
            band_pairs = max(n for n in range(1, band_pairs + 1) if arriving % n == 0)
        return Plan(tile_columns=self.columns, band_pairs=band_pairs)


def _fastest(costs: Costs) -> FusedCosts:
    """The fused kernel with the width of tiles that is fastest."""
    gathers = costs.sizes.gathers
    operation = costs.sizes.operation
    widths = [
        c
        for c in definitions.TILE_COLUMNS
        if definitions.has_fused_kernel(operation, c, wgrad=False)
    ]
    # If the link limits a reduce-scatter with several widths, the narrowest tiles are best: their
    # products are sent most evenly.
    return min(
        (FusedCosts(costs, columns) for columns in sorted(widths)),
        key=lambda fused: fused.matmul_s if gathers else fused.seconds,
    )


def _fused(costs: Costs, margin: float) -> Plan | str:
    """Returns the fused kernel's plan, or why it is not faster than no overlap by `margin`."""
    sizes, profile = costs.sizes, costs.profile
    peers = sizes.world_size - 1
    least = min(profile.fused_least_bytes * peers, profile.pipeline_least_bytes)
    if sizes.received_bytes < least:
        return _too_few_bytes(sizes, least)
    fused = _fastest(costs)
    fused_s = fused.seconds + profile.fused_call_s
    apart_s = costs.link_s + costs.matmul_s + profile.apart_s
    if fused_s * margin > apart_s:
        return (
            f"the fused kernel would take {_us(fused_s)}, the collective and the matmul "
            f"{_us(apart_s)}"
        )
    return fused.plan


def _in_rounds(costs: Costs, plan: Plan, ring_bytes: int) -> Plan:
    """Returns the plan in as many rounds as the ring needs, where rounds beat the pipeline."""
    sizes, profile = costs.sizes, costs.profile
    if sizes.gathers or costs.link_ratio <= profile.rounds_ratio:
        return plan
    tiles = sizes.column_tiles(plan.tile_columns)
    tile_bytes = sizes.ring_bytes(plan.tile_columns) // tiles
    tiles_of_round = ring_room(ring_bytes) // tile_bytes
    if min(tiles, tiles_of_round) * tile_bytes < profile.round_least_bytes:
        return plan
    rounds = -(-tiles // tiles_of_round)
    return dataclasses.replace(plan, rounds=rounds, parts=-(-plan.parts // rounds))


# The fused kernel with weight gradients.


def _with_wgrads(costs: Costs, alone: Plan, wgrads: int, ring_bytes: int) -> Plan | str:
    """Returns the plan with weight gradients, or why these are faster as matmuls after it."""
    sizes, profile = costs.sizes, costs.profile
    if not alone.fused or alone.rounds > 1:
        return "weight gradients are separate matmuls after anything but one launch of the kernel"
    fused = FusedCosts(costs, definitions.WGRAD_COLUMNS)
    row_pairs = -(-sizes.ns[0] // (2 * definitions.TILE_ROWS))
    wgrad_tiles = row_pairs * sum(-(-k // fused.columns) for k in sizes.ks[:wgrads])
    tile = profile.tiles[fused.columns]
    stages = 2 * sizes.world_size * sizes.row_tiles  # the contracted dimension is that of all rows
    wgrad_tile_s = stages * tile.stage_s + tile.gather_s
    wgrad_waves = -(-wgrad_tiles // profile.clusters)
    both_s = max(fused.matmul_s + wgrad_waves * wgrad_tile_s, fused.link_s)
    before = last = 0
    if sizes.gathers:
        before, last, arrives_s = _wgrads_among_arrivals(fused, wgrad_tiles, wgrad_tile_s)
        both_s = max(both_s, arrives_s)
    # A weight gradient takes as many flops as the product with its matrix.
    wgrads_s = costs.matmul_s * sum(sizes.ks[:wgrads]) / sizes.k
    apart_s = _fastest(costs).seconds + wgrads_s
    call_s = profile.fused_call_s
    if (both_s + call_s) * profile.wgrad_margin > apart_s + call_s:
        return (
            f"the fused kernel would take {_us(both_s)} with weight gradients, {_us(apart_s)} "
            "with these as matmuls after it"
        )
    plan = dataclasses.replace(
        fused.plan, wgrad=True, row_pairs_before_wgrad=before, wgrad_tiles_last=last
    )
    return plan if sizes.fit_fused(plan, ring_bytes) else "wider tiles do not fit the ring"


def _wgrads_among_arrivals(
    fused: FusedCosts, wgrad_tiles: int, wgrad_tile_s: float
) -> tuple[int, int, float]:
    """Places the weight gradients among the rows that arrive in an all-gather.

    Returns:
        How many arriving row pairs are multiplied before them, how many of their cluster tiles come
        after all arriving rows, and the seconds until everything is done.
    """
    sizes, profile = fused.costs.sizes, fused.costs.profile
    arriving = (sizes.world_size - 1) * fused.row_pairs
    before = 0
    # If all rows are multiplied at once, they may as well all arrive by columns. Between two ranks
    # a rank's own rows are enough to begin with.
    if sizes.world_size > 2 and sizes.world_size * fused.tiles > profile.clusters:
        before = int(arriving * profile.arrivals_before_wgrad)
    rest = (arriving - before) * sizes.column_tiles(fused.columns)
    rest_s = -(-rest // profile.clusters) * fused.tile_s
    waves = -(-wgrad_tiles // profile.clusters)

    def seconds(waves_first: int) -> float:
        arrived = before / arriving + (1 - before / arriving) * waves_first / waves
        begins = max(
            fused.matmul_s - rest_s + waves_first * wgrad_tile_s,
            arrived * fused.link_s + wgrad_tile_s / 2,
        )
        # No tile of the rest has all its columns before the last columns arrive.
        ends = max(begins + rest_s, fused.link_s + rest_s - fused.tile_s)
        return ends + (waves - waves_first) * wgrad_tile_s

    waves_first = min(range(1, waves + 1), key=seconds)
    last = max(0, wgrad_tiles - waves_first * profile.clusters)
    return before, last, seconds(waves_first)


def _too_few_bytes(sizes: Sizes, least: float) -> str:
    return (
        f"{sizes.received_bytes} bytes from peers; overlapping is faster from {least:.0f} bytes on"
    )


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us"
