"""Low-latency collectives for JAX programs on one multi-GPU node."""

import os as _os
import sys as _sys

from jax_intranode._src.version import __version__ as __version__

_OLDEST_JAX = "0.10.2"  # as in pyproject.toml

# What failed below, where `python -m jax_intranode` goes on: `info` says what is broken.
_import_error: Exception | None = None
# Whether this is `python -m jax_intranode`. While Python looks for what -m names, argv[0] is "-m".
_words = _sys.orig_argv[1 : len(_sys.orig_argv) - len(_sys.argv) + 1]
_is_command = _sys.argv[:1] == ["-m"] and _words[-1:] in (["jax_intranode"], ["-mjax_intranode"])
_before = set(_os.environ)

try:
    if _is_command and _sys.argv[1:2] == ["run"]:
        raise ImportError("`run` starts Python again, and needs nothing of what follows")
    import jax as _jax

    if _jax.__version_info__ < tuple(map(int, _OLDEST_JAX.split("."))):
        raise ImportError(
            f"jax_intranode needs jax {_OLDEST_JAX} or newer, and jax {_jax.__version__} is "
            "installed: pip install -U jax"
        )
    from jax_intranode._src.group.communicator import initialize, shutdown, usage_counter
    from jax_intranode._src.group.peer_buffer import (
        PeerBuffer,
        get_include,
        peer_buffer,
        register_ffi_library,
    )
    from jax_intranode._src.group.topology import LinkReport, Topology, TopologyKind, topology
    from jax_intranode._src.health.failures import (
        CommunicationError,
        Failure,
        communication_errors,
        last_failure,
    )
    from jax_intranode._src.ops.all_gather import all_gather
    from jax_intranode._src.ops.all_gather_matmul import all_gather_matmul
    from jax_intranode._src.ops.all_to_all import all_to_all
    from jax_intranode._src.ops.column_parallel_matmul import column_parallel_matmul
    from jax_intranode._src.ops.experts import MoeState, moe_combine, moe_dispatch
    from jax_intranode._src.ops.matmul_all_reduce import matmul_all_reduce
    from jax_intranode._src.ops.matmul_reduce_scatter import matmul_reduce_scatter
    from jax_intranode._src.ops.pmax import pmax, pmin
    from jax_intranode._src.ops.ppermute import ppermute
    from jax_intranode._src.ops.psum import pmean, psum
    from jax_intranode._src.ops.psum_scatter import psum_scatter
    from jax_intranode._src.ops.ragged_all_to_all import ragged_all_to_all
    from jax_intranode._src.ops.residual_norm import (
        psum_residual_layer_norm,
        psum_residual_rms_norm,
        psum_scatter_residual_layer_norm,
        psum_scatter_residual_rms_norm,
    )
    from jax_intranode._src.ops.row_parallel_matmul import row_parallel_matmul
    from jax_intranode._src.report.calls import Call
    from jax_intranode._src.report.explain import Explanation, explain
    from jax_intranode._src.report.stats import Fallback, Lowered, Stats, stats
    from jax_intranode._src.rewrite.switch import accelerate, install, uninstall
    from jax_intranode._src.selection import config as _config
    from jax_intranode._src.selection.tuning import current as _current_tuning

    # A wrong value raises here, once, and not in the middle of a compilation.
    _config.start_log(_os.environ)
    _config.check(_os.environ)
    _current_tuning()
except Exception as _error:
    if not _is_command:
        raise
    _import_error = _error
# Environment variables that JAX has set when it was imported.
_set_by_jax = set(_os.environ) - _before

__all__ = [
    "Call",
    "CommunicationError",
    "Explanation",
    "Failure",
    "Fallback",
    "LinkReport",
    "Lowered",
    "MoeState",
    "PeerBuffer",
    "Stats",
    "Topology",
    "TopologyKind",
    "accelerate",
    "all_gather",
    "all_gather_matmul",
    "all_to_all",
    "column_parallel_matmul",
    "communication_errors",
    "explain",
    "get_include",
    "initialize",
    "install",
    "last_failure",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "moe_combine",
    "moe_dispatch",
    "peer_buffer",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_residual_layer_norm",
    "psum_residual_rms_norm",
    "psum_scatter",
    "psum_scatter_residual_layer_norm",
    "psum_scatter_residual_rms_norm",
    "ragged_all_to_all",
    "register_ffi_library",
    "row_parallel_matmul",
    "shutdown",
    "stats",
    "topology",
    "uninstall",
    "usage_counter",
]
