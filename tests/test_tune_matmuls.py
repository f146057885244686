"""`tune`: the profile of the overlap model, fitted to times that the model itself makes."""

import dataclasses
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import tune_profile as matmuls

from jax_intranode._src.selection.overlap.profiles import H200, MEASURED, Profile, TileCosts


class StandIn:
    """A node whose GPUs are exactly as a profile says, but for noise."""

    def __init__(self, truth: Profile, noise: float = 0.0, fails: tuple[int, ...] = ()):
        self._truth, self._noise, self._fails = truth, noise, fails
        self._random = random.Random(3)
        self._runs = 0

    def run(
        self, shape: Any, plan_texts: list[str], settle_ms: int = 0
    ) -> list[tuple[float, float]]:
        self._runs += 1
        if self._runs in self._fails:
            raise OSError("the probe was lost")
        if settle_ms:
            h200_ms = dict(matmuls.MATMULS)[shape[2:]]
            return [(1.0, h200_ms * H200.matmul_flops / self._truth.matmul_flops * self._jitter())]
        times = []
        for text in plan_texts:
            (run,) = (c for c in matmuls.CALIBRATIONS if (c.product, c.plan) == (shape, text))
            ratio = run.predicted_s(self._truth) / run.predicted_s(H200)
            times.append((run.h200_ms * ratio * self._jitter(), 1.0))
        return times

    def copies(self) -> float:
        return self._truth.link_bound_bytes_per_s * self._jitter()

    def _jitter(self) -> float:
        return math.exp(self._random.gauss(0, self._noise))

    def tune(self, start: Profile = H200) -> Profile:
        profile, _ = matmuls.tune(start, self.run, self.copies, matmuls.Clock(1000))
        assert isinstance(profile, Profile)
        return profile


def assert_close(got: Profile, want: Profile, relative: float) -> None:
    for name in ("matmul_flops", "copy_bytes_per_s", "link_bound_bytes_per_s"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=relative)
    assert got.sender_bytes_per_s == pytest.approx(want.sender_bytes_per_s, rel=relative)
    for columns, tile in want.tiles.items():
        assert got.tiles[columns].stage_s == pytest.approx(tile.stage_s, rel=relative), columns


@pytest.mark.parametrize("noise", [0.0, 0.015])
def test_h200s_keep_their_profile(noise: float) -> None:
    """Constants that differ no more than runs do stay, and so do the plans."""
    assert StandIn(H200, noise).tune() == H200


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize(
    "corrections",
    [
        {"stage": 1.3, "matmul": 0.75},
        {"stage": 2.6, "matmul": 0.35, "sender": 0.6},
        {"stage": 0.8, "sender": 1.25, "copy": 0.5},
        {"fixed": 1.5, "sum": 1.4, "stage": 1.1},
    ],
)
def test_the_fit_returns_the_constants(corrections: dict[str, float], noise: float) -> None:
    truth = matmuls.corrected(H200, corrections)
    got = StandIn(truth, noise).tune()
    assert_close(got, truth, 0.03 + noise)
    for columns, tile in truth.tiles.items():
        assert got.tiles[columns].gather_s == pytest.approx(tile.gather_s, rel=0.25)


def test_it_starts_from_a_scaled_profile() -> None:
    truth = matmuls.corrected(H200, {"stage": 1.5, "matmul": 0.6, "copy": 0.9})
    start = dataclasses.replace(
        matmuls.corrected(H200, {"stage": 1.2, "matmul": 0.8}), scaled_from=H200.name
    )
    assert_close(StandIn(truth).tune(start), truth, 0.03)


def test_failed_runs_leave_the_constants(capsys: pytest.CaptureFixture[str]) -> None:
    truth = matmuls.corrected(H200, {"stage": 1.3, "matmul": 0.75})
    # Some runs fail: the others are enough.
    assert_close(StandIn(truth, fails=(1, 5)).tune(), truth, 0.03)
    assert "the probe was lost" in capsys.readouterr().err
    # All of the probe's runs fail, or there is no probe.
    assert StandIn(truth, fails=tuple(range(100))).tune() == H200
    assert "too few runs" in capsys.readouterr().err
    profile, corrections = matmuls.tune(H200, None, lambda: None, matmuls.Clock(1000))
    assert profile == H200 and not corrections


def test_a_disturbed_run_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    class Disturbed(StandIn):
        def run(self, shape: Any, plan_texts: list[str], settle_ms: int = 0) -> Any:
            (ms, alone), *others = super().run(shape, plan_texts, settle_ms)
            return [
                (1.5 * ms if shape[:3] == ("all_gather_matmul", 4, 4096) else ms, alone),
                *others,
            ]

    assert Disturbed(H200, noise=0.01).tune() == H200
    assert "left out, as if disturbed: Product" in capsys.readouterr().err


def test_a_rate_that_is_no_copy_between_gpus_is_not_taken() -> None:
    profile, _ = matmuls.tune(H200, None, lambda: 20e9, matmuls.Clock(1000))
    assert profile == H200


def test_it_ends_in_time() -> None:
    stand_in = StandIn(H200)
    profile, corrections = matmuls.tune(H200, stand_in.run, stand_in.copies, matmuls.Clock(5))
    assert profile == H200 and set(corrections) == {"copy"}


def test_the_output_of_the_probe_is_understood() -> None:
    fields = "first_pieces=1,last_pieces=1,tile_columns=256,band_pairs=8,wgrad=0"
    line = f"all_gather_matmul      2 ranks   8192   8192   1024  {fields}: "
    text = f"{line}  0.2228 ms, share 0.781, matmul alone 0.1742, #wrong 0\n"
    assert matmuls.parse_probe(text * 2) == [(0.2228, 0.1742)] * 2
    with pytest.raises(ValueError, match="wrong results"):
        matmuls.parse_probe(text.replace("#wrong 0", "#wrong 3"))


def test_the_printed_source_is_the_profile() -> None:
    source = matmuls.to_source(H200)
    name, _, expression = source.partition(" = ")
    assert name == "NVIDIA_H200"
    got = eval(expression, {"Profile": Profile, "TileCosts": TileCosts})
    assert got == dataclasses.replace(H200, arrivals_before_wgrad=0.3333)


def test_compare_says_which_plans_change(capsys: pytest.CaptureFixture[str]) -> None:
    def run(shape: Any, plan_texts: list[str], settle_ms: int = 0) -> list[tuple[float, float]]:
        assert settle_ms and all("tile_columns=" in text for text in plan_texts)
        return [(1.0 + 0.01 * i, 1.0) for i in range(len(plan_texts))]

    clock = matmuls.Clock(0)  # no time for what takes `bench`
    matmuls.compare(H200, H200, run, clock)
    cases = matmuls.reference_cases()
    assert f"{len(cases)} of {len(cases)} plans are the same" in capsys.readouterr().out
    matmuls.compare(H200, matmuls.corrected(H200, {"stage of 224": 1.1}), run, clock)
    text = capsys.readouterr().out
    assert "1.0000 ms today, 1.0100 ms by the new plan: +1.0%, within 2 %" in text
    assert f"{len(cases)} of" not in text


def test_every_calibration_is_a_run_that_the_kernels_take() -> None:
    from jax_intranode._src.native import definitions
    from jax_intranode._src.selection.overlap import plan

    assert H200 in MEASURED.values()
    for run in matmuls.CALIBRATIONS:
        parsed = plan.parse(run.plan)
        assert definitions.has_fused_kernel(run.product.operation, parsed.tile_columns, wgrad=False)
        assert run.product.sizes.fit_fused(parsed, 512 << 20)
        # The model knows of no plan but its own.
        costs = matmuls.model.FusedCosts(
            matmuls.model.Costs(run.product.sizes, H200), parsed.tile_columns
        )
        assert costs.direct == parsed.direct


def fake_probe(directory: Path, line: str) -> Path:
    """A program that prints a line for each plan that it is given."""
    path = directory / "probe"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nfor plan in sys.argv[4:]:\n    print({line!r})\n"
    )
    path.chmod(0o755)
    return path


def test_measuring_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a probe for which everything takes 1 ms, so that short calls look slow."""
    probe = fake_probe(tmp_path, "1.0000 ms, share 0.5, matmul alone 1.0000, #wrong 0")
    monkeypatch.setattr(matmuls, "start_profile", lambda: H200)
    monkeypatch.setattr(matmuls, "measure_copies", lambda timeout_s: 384e9)
    monkeypatch.setattr(matmuls, "reference_cases", lambda: [])
    measured = matmuls.measure(235, probe, compares=True)
    text = capsys.readouterr().out
    assert "copy: 0.997, within the tolerance of 0.04" in text
    assert "0 of 0 plans are the same" in text
    assert isinstance(measured, Profile) and measured.scaled_from == ""
    assert measured.copy_bytes_per_s == H200.copy_bytes_per_s
    assert measured.matmul_flops == pytest.approx(0.71 * H200.matmul_flops)
    assert measured.tiles[192].stage_s > H200.tiles[192].stage_s


def test_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmuls, "start_profile", lambda: "not measured on ampere GPUs")
    assert matmuls.measure(10) == "not measured on ampere GPUs"
    monkeypatch.setattr(matmuls, "start_profile", lambda: H200)
    monkeypatch.setattr(matmuls, "_ROOT", Path("/"))  # as in an installed package
    monkeypatch.setattr(matmuls, "measure_copies", lambda timeout_s: None)
    assert matmuls.measure(10) == "neither the kernels nor the copies could be measured"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("GPU 0: an illegal memory access", "failed"),
        ("1 ms, share 1, matmul alone 1, #wrong 2", ""),
    ],
)
def test_a_probe_that_fails(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(ValueError, match=says or "wrong results"):
        matmuls.run_probe(
            fake_probe(tmp_path, line), ("all_gather_matmul", 2, 512, 64, 64), ["tile_columns=128"]
        )
