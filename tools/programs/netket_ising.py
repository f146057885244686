"""NetKet: the ground state of an Ising chain by variational Monte Carlo with divided samples."""

from collections.abc import Iterator
from typing import Any

import numpy as np

REPOSITORY = "https://github.com/netket/netket"
COMMIT = "v3.23.0"
FOLDER = "netket"
PACKAGES = ("netket==3.23.0",)
TOLERANCE = 1e-6  # float64
AUTO = True


def steps(small: bool) -> Iterator[dict[str, Any]]:
    """Takes steps of optimization; yields the energy of each."""
    import netket as nk

    graph = nk.graph.Chain(16 if small else 64)
    space = nk.hilbert.Spin(1 / 2, graph.n_nodes)
    sampler = nk.sampler.MetropolisLocal(space, n_chains=16)
    state = nk.vqs.MCState(sampler, nk.models.RBM(alpha=2), n_samples=256, seed=0, sampler_seed=1)
    energy = nk.operator.IsingJax(space, graph, h=1.0)
    driver = nk.driver.VMC_SR(
        energy, nk.optimizer.Sgd(0.05), diag_shift=0.01, variational_state=state
    )
    while True:
        driver.run(1, out=(), show_progress=False)
        yield {"energy": np.asarray(state.expect(energy).mean)}
