"""The tools in their smallest runs. Their figures are judged by those who use them."""

import math
import random
import sys
from pathlib import Path
from typing import Any

import performance_page
import pytest
import tune_profile

from jax_intranode._src.native import definitions
from jax_intranode._src.selection.overlap import plan as overlap_plan
from jax_intranode._src.selection.overlap.profiles import H200, Profile

pytestmark = pytest.mark.one_version

ROOT = Path(__file__).parent.parent


def test_the_figures_of_the_pages_are_up_to_date(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    made = {page for page in pages if "<!-- make: " in page.read_text()}
    # tools/environment_page.py makes this one.
    assert made == {ROOT / "docs/environment.md", *performance_page.PAGES}
    monkeypatch.setattr(sys, "argv", ["performance_page.py", "--check"])
    assert performance_page._main() == 0, capsys.readouterr().err


# `tune`'s profile of the overlap model, fitted to times that the model itself makes.


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize(
    "corrections",
    [
        {},
        {"stage": 2.6, "matmul": 0.35, "sender": 0.6},
        {"fixed": 1.5, "sum": 1.4, "stage": 1.1, "copy": 0.5},
    ],
)
def test_the_fit_returns_the_constants(corrections: dict[str, float], noise: float) -> None:
    """Constants that differ no more than runs do stay, and so do the plans of H200s."""
    truth, seeded = tune_profile.corrected(H200, corrections), random.Random(3)

    def jitter() -> float:
        return math.exp(seeded.gauss(0, noise))

    def run(shape: Any, texts: list[str], settle_ms: int = 0) -> list[tuple[float, float]]:
        if settle_ms:
            h200_ms = dict(tune_profile.MATMULS)[shape[2:]]
            return [(1.0, h200_ms * H200.matmul_flops / truth.matmul_flops * jitter())]
        runs = {(c.product, c.plan): c for c in tune_profile.CALIBRATIONS}
        return [
            (of.h200_ms * of.predicted_s(truth) / of.predicted_s(H200) * jitter(), 1.0)
            for of in (runs[shape, text] for text in texts)
        ]

    def copies() -> float:
        return truth.link_bound_bytes_per_s * jitter()

    got, _ = tune_profile.tune(H200, run, copies, tune_profile.Clock(1000))
    if not corrections:
        assert got == H200
    assert isinstance(got, Profile)
    for name in ("matmul_flops", "copy_bytes_per_s", "sender_bytes_per_s"):
        assert getattr(got, name) == pytest.approx(getattr(truth, name), rel=0.03 + noise)
    for columns, tile in truth.tiles.items():
        assert got.tiles[columns].stage_s == pytest.approx(tile.stage_s, rel=0.03 + noise)


def test_every_calibration_is_a_run_that_the_kernels_take() -> None:
    for run in tune_profile.CALIBRATIONS:
        parsed = overlap_plan.parse(run.plan)
        assert definitions.has_fused_kernel(run.product.operation, parsed.tile_columns, wgrad=False)
        assert run.product.sizes.fit_fused(parsed, 512 << 20)
