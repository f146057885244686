"""The program of two processes, one after the other, for rows of the contract that need them.

It compiles and runs a program with a persistent cache, and saves its executable, or loads the one
that the first process has saved. It prints a report as JSON.
"""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_intranode


def main(library: str, folder: str) -> None:
    report: dict[str, Any] = {"hits": 0, "misses": 0}

    def count(event: str, **_: Any) -> None:
        for name in ("hits", "misses"):
            report[name] += event == f"/jax/compilation_cache/cache_{name}"

    jax.monitoring.register_event_listener(count)
    jax.config.update("jax_compilation_cache_dir", str(Path(folder, "cache")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    psum = jax_intranode.psum if library == "ours" else lax.psum
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))

    def body(v: Any) -> Any:
        total = psum({"a": v, "b": v.sum()}, "x")
        return total["a"] * psum(v, "x") + total["b"]

    values = np.arange(12, dtype=np.float32).reshape(4, 3) % 4
    value = jax.device_put(values, NamedSharding(mesh, P("x")))
    saved = Path(folder, "executable")
    if saved.exists():  # load it before this process lowers anything else
        for name in ("loaded", "loaded after initialize"):
            if name != "loaded":
                jax_intranode.initialize(mesh)
            try:
                program = serialize_executable.deserialize_and_load(
                    *pickle.loads(saved.read_bytes()), execution_devices=list(mesh.devices.flat)
                )
                report[name] = jax.block_until_ready(program(value)).tolist()
            except Exception as error:
                report[name] = str(error)
    before = report["hits"], report["misses"]
    f = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P())
    program = jax.jit(f).lower(value).compile()
    report["hits"], report["misses"] = report["hits"] - before[0], report["misses"] - before[1]
    report["ours"] = "jax_intranode_psum" in program.as_text()
    report["values"] = program(value).tolist()
    if not saved.exists():
        try:
            saved.write_bytes(pickle.dumps(serialize_executable.serialize(program)))
        except Exception as error:
            report["serialized"] = f"{type(error).__name__}: {error}"
        else:
            report["serialized"] = "yes"
    print(json.dumps(report))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(*sys.argv[1:])
