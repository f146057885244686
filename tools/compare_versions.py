"""Times two installed copies of the package against each other on one node.

    python tools/compare_versions.py BEFORE_SITE AFTER_SITE --json FILE

Each SITE is a directory that contains `jax_intranode` with its native modules, for example what
`pip install --target SITE --no-deps .` makes. The processes of both versions stay alive side by
side. They take turns on the devices, one repetition of one measurement at a time, and the order of
the two changes from round to round, so that both see the same clocks and temperatures.

Measured in both process modes: psum from 1 KB to 4 MB, and the reference shapes of
`all_gather_matmul` and `matmul_reduce_scatter`, forward and backward, in bfloat16. A repetition of
a collective is a jitted chain of (psum, multiply), less the same chain without psum. A repetition
of a matmul is a chain of calls, each of which depends on the previous one; untimed chains run
before it until power bounds the clock. Times are those of the slowest rank, in microseconds a call.

The table has the smallest and the median time of each version, the ratio after / before of both,
and the noise: half the interquartile range of the ratios of the single rounds. The program uses
public functions of JAX and of the package only, so that any two versions can be compared.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import queue
import random
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODES = ("process-per-device", "single-process")
VERSIONS = ("before", "after")

# M, K and N of the product that one device computes: the preset "reference" of the benchmark.
_REFERENCE = {
    "all_gather_matmul": [
        (32768, 16384, 8192),
        (32768, 16384, 1024),
        (8192, 8192, 8192),
        (8192, 8192, 7168),
        (8192, 8192, 1024),
        (8192, 4096, 1792),
        (4096, 8192, 3584),
    ],
    "matmul_reduce_scatter": [
        (32768, 2048, 8192),
        (8192, 3584, 8192),
        (8192, 1024, 8192),
        (4096, 1024, 28672),
    ],
}
_TINY = {
    "all_gather_matmul": [(64, 32, 48)],
    "matmul_reduce_scatter": [(64, 32, 48)],
}

_FEWEST_ROUNDS = 3
# A GPU's rate, from which the lengths of chains follow. Both versions get the same chains.
_ASSUMED_FLOPS = 700e12
# How long a worker may take to start, and to answer a command.
_START_S = 120
_ANSWER_S = 120
# Marks the lines of a worker that are answers.
_MARK = "@compare@ "


# The coordinator.


@dataclass
class Worker:
    """One process of one version. `answers` gets its answers, and None when it ends."""

    process: subprocess.Popen[str]
    answers: "queue.Queue[Any]"
    log: Path


class WorkerError(Exception):
    """A worker failed or did not answer in time."""


class Version:
    """All processes of one version in one mode."""

    def __init__(self, name: str, site: Path, mode: str, options: argparse.Namespace, logs: Path):
        """Starts the processes; `wait_until_ready` waits for them."""
        self.name = name
        count = options.devices if mode == MODES[0] else 1
        port = _free_port()
        self.workers = [
            _start(name, site, rank, count, port, options, logs) for rank in range(count)
        ]

    def wait_until_ready(self) -> dict[str, Any]:
        """Waits until all processes have initialised JAX; returns facts about the version."""
        facts: dict[str, Any] = self.receive(_START_S)[0]
        return facts

    def ask(self, **command: Any) -> list[Any]:
        """Sends all processes a command and returns their answers."""
        self.send(**command)
        return self.receive()

    def send(self, **command: Any) -> None:
        """Sends all processes a command."""
        for worker in self.workers:
            assert worker.process.stdin is not None
            try:
                worker.process.stdin.write(json.dumps(command) + "\n")
                worker.process.stdin.flush()
            except OSError:
                raise WorkerError(_end_of(self.name, worker)) from None

    def receive(self, timeout_s: float = _ANSWER_S) -> list[Any]:
        """Returns the answers of all processes."""
        answers = []
        for worker in self.workers:
            try:
                answer = worker.answers.get(timeout=timeout_s)
            except queue.Empty:
                raise WorkerError(f"{self.name}: no answer within {timeout_s:g} s") from None
            if answer is None:
                raise WorkerError(_end_of(self.name, worker))
            answers.append(answer)
        return answers

    def close(self) -> None:
        """Ends the processes."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.wait()


def _end_of(name: str, worker: Worker) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.process.wait(timeout=5)
    lines = worker.log.read_text(errors="replace").splitlines()[-25:]
    return f"{name}: a process ended with {worker.process.returncode}:\n" + "\n".join(lines)


def _start(
    name: str,
    site: Path,
    rank: int,
    count: int,
    port: int,
    options: argparse.Namespace,
    logs: Path,
) -> Worker:
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONUNBUFFERED": "1"}
    environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.4"  # two versions share a GPU
    if options.platform == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
        environment["JAX_NUM_CPU_DEVICES"] = str(options.devices if count == 1 else 1)
    else:
        # The versions share the choices of XLA's autotuner, which also saves time.
        cache = f"--xla_gpu_per_fusion_autotune_cache_dir={logs}"
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {cache}".strip()
    log = logs / f"{name}_{count}_{rank}.log"
    command = [sys.executable, "-P", __file__, "--worker"]
    instructions = {"rank": rank, "count": count, "port": port, "devices": options.devices}
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, json.dumps({**instructions, "platform": options.platform})],
            env=environment,
            cwd=logs,  # not where another copy of the package would be imported
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    answers: queue.Queue[Any] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_MARK):
                answers.put(json.loads(line[len(_MARK) :]))
        answers.put(None)

    threading.Thread(target=read, daemon=True).start()
    return Worker(process, answers, log)


def _free_port() -> int:
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port


def measurements(tiny: bool, only: list[str]) -> list[dict[str, Any]]:
    """Returns what to measure, the most important ones first."""
    items: list[dict[str, Any]] = []
    sizes = [1 << 10, 1 << 12] if tiny else [1 << exponent for exponent in range(10, 23, 2)]
    if "psum" in only:
        items += [{"name": f"psum {size} B", "kind": "psum", "size": size} for size in sizes]
    for backward in (False, True):
        for operation, shapes in (_TINY if tiny else _REFERENCE).items():
            for m, k, n in shapes if "matmuls" in only else []:
                what = " backward" if backward else ""
                name = f"{operation}{what} {m} x {k} x {n}"
                item = {"kind": operation, "shape": [m, k, n], "backward": backward}
                items.append({"name": name, **item})
    return items


def compare(
    sites: dict[str, Path], mode: str, options: argparse.Namespace, deadline: float, logs: Path
) -> dict[str, Any]:
    """Measures one mode; returns the facts of the versions and the times of each measurement."""
    started = time.monotonic()
    versions = [Version(name, sites[name], mode, options, logs) for name in VERSIONS]
    try:
        facts = {version.name: version.wait_until_ready() for version in versions}
        prepared: list[dict[str, Any]] = []
        skipped: list[str] = []
        # Three rounds are worth more than more measurements.
        last_preparation = started + 0.75 * (deadline - started)
        for item in measurements(options.tiny, options.only):
            if time.monotonic() > last_preparation:
                skipped.append(item["name"])
                continue
            errors = _prepare(versions, item)
            if errors:
                skipped.append(f"{item['name']} ({errors[0]})")
            else:
                prepared.append({**item, "mode": mode, **{name: [] for name in VERSIONS}})
        _say(f"{mode}: {len(prepared)} measurements prepared in {time.monotonic() - started:.0f} s")
        for name in skipped:
            _say(f"not measured: {name}")
        rounds = 0
        while rounds < _FEWEST_ROUNDS or (rounds < options.rounds and time.monotonic() < deadline):
            for number, row in enumerate(prepared):
                # A B, B A, A B ... over the rounds, and the other way round at the next row.
                forward = (rounds + number) % 2 == 0
                for version in versions if forward else reversed(versions):
                    us = max(version.ask(run=row["name"]))
                    row[version.name].append(us)
            rounds += 1
        _say(f"{mode}: {rounds} rounds, {time.monotonic() - started:.0f} s in all")
    finally:
        for version in versions:
            version.close()
    return {"facts": facts, "rows": prepared, "skipped": skipped}


def _prepare(versions: list[Version], item: dict[str, Any]) -> list[str]:
    """Compiles a measurement and runs it once; returns what went wrong."""
    # Two versions may compile at the same time unless XLA's autotuner times matmuls, which it does
    # in backward passes. The first run, in which cuBLASLt's candidates are timed, has the devices
    # for itself.
    errors: list[str] = []
    at_once = [versions] if not item.get("backward") else [[version] for version in versions]
    for some in at_once:
        for version in some:
            version.send(compile=item)
        for version in some:
            errors += [f"{version.name}: {a['error']}" for a in version.receive() if "error" in a]
    for version in versions if not errors else []:
        answers = version.ask(start=item["name"])
        errors += [f"{version.name}: {a['error']}" for a in answers if "error" in a]
    return errors


def summary(row: dict[str, Any]) -> dict[str, float]:
    """Returns the figures of a table row: times in microseconds, ratios after / before."""
    before, after = row["before"], row["after"]
    single = sorted(b / a for a, b in zip(before, after, strict=True))
    quarter = len(single) // 4
    return {
        "before_min": min(before),
        "before_median": statistics.median(before),
        "after_min": min(after),
        "after_median": statistics.median(after),
        "ratio_min": min(after) / min(before),
        "ratio_median": statistics.median(after) / statistics.median(before),
        "noise": (single[-1 - quarter] - single[quarter]) / 2,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the table, and below it how many rows changed by more than noise and 2 %."""
    width = max(len(row["name"]) for row in rows)
    lines = []
    slower = faster = 0
    for mode in dict.fromkeys(row["mode"] for row in rows):
        lines += [
            f"# {mode}, us a call",
            f"# {'':{width}} | {'before':^19} | {'after':^19} | {'after / before':^22}",
            f"# {'':{width}} | {'min':>9} {'median':>9} | {'min':>9} {'median':>9} | "
            f"{'min':>6} {'median':>6} {'noise':>8}",
        ]
        for row in rows:
            if row["mode"] != mode:
                continue
            s = summary(row)
            allowed = max(0.02, s["noise"])
            changed = min(abs(s["ratio_min"] - 1), abs(s["ratio_median"] - 1)) > allowed
            worse = changed and s["ratio_median"] > 1
            slower += worse
            faster += changed and not worse
            mark = "" if not changed else "  SLOWER" if worse else "  faster"
            lines.append(
                f"  {row['name']:{width}} | {s['before_min']:9.2f} {s['before_median']:9.2f} | "
                f"{s['after_min']:9.2f} {s['after_median']:9.2f} | {s['ratio_min']:6.3f} "
                f"{s['ratio_median']:6.3f} {100 * s['noise']:6.1f} %{mark}"
            )
    lines.append(
        f"# of {len(rows)} rows {slower} slower and {faster} faster by more than 2 % and the noise"
    )
    return "\n".join(lines)


def _say(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)


def _digest(site: Path) -> str:
    """Returns a short hash of the package's files."""
    total = hashlib.sha256()
    for file in sorted((site / "jax_intranode").rglob("*")):
        if file.suffix in (".py", ".so"):
            total.update(file.read_bytes())
    return total.hexdigest()[:12]


def _main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, metavar="BEFORE_SITE")
    parser.add_argument("after", type=Path, metavar="AFTER_SITE")
    parser.add_argument("--devices", type=int, default=2, help="number of devices (default 2)")
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--mode", choices=(*MODES, "both"), default="both")
    parser.add_argument(
        "--only", nargs="+", choices=("psum", "matmuls"), default=["psum", "matmuls"]
    )
    parser.add_argument("--rounds", type=int, default=15, help="most rounds (default 15)")
    parser.add_argument(
        "--budget",
        type=float,
        default=340,
        help="seconds in all (default 340); measurements that do not fit are left out and named, "
        f"and {_FEWEST_ROUNDS} rounds are made in any case",
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the program out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all times to FILE")
    options = parser.parse_args()
    sites = {"before": options.before.resolve(), "after": options.after.resolve()}
    for name, site in sites.items():
        if not (site / "jax_intranode" / "__init__.py").is_file():
            parser.error(f"{name}: {site} contains no jax_intranode")
    digests = {name: _digest(site) for name, site in sites.items()}
    modes = MODES if options.mode == "both" else (options.mode,)
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "command": shlex.join(["python", "tools/compare_versions.py", *_without_paths(options)]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "digests": digests,
        "modes": {},
    }
    failed = False
    with tempfile.TemporaryDirectory(prefix="compare_versions_") as directory:
        for number, mode in enumerate(modes):
            now = time.monotonic()
            deadline = now + (options.budget - (now - started)) / (len(modes) - number)
            try:
                found = compare(sites, mode, options, deadline, Path(directory))
            except WorkerError as error:
                _say(f"{mode}: {error}")
                failed = True
                continue
            rows += found["rows"]
            result["modes"][mode] = {"versions": found["facts"], "skipped": found["skipped"]}
    result["rows"] = [{**row, **summary(row)} for row in rows]
    if rows:
        facts = next(iter(result["modes"].values()))["versions"]
        for name in VERSIONS:
            print(f"# {name}: {digests[name]}, {json.dumps(facts[name])}")
        print(table(rows), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failed or not rows else 0


def _without_paths(options: argparse.Namespace) -> list[str]:
    words = ["BEFORE_SITE", "AFTER_SITE", "--devices", str(options.devices)]
    words += ["--platform", options.platform, "--mode", options.mode, "--only", *options.only]
    words += ["--rounds", str(options.rounds), "--budget", f"{options.budget:g}"]
    return words + (["--tiny"] if options.tiny else [])


# A worker: one process of one version.


def _worker(instructions: dict[str, Any]) -> None:
    import jax

    if instructions["count"] > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{instructions['port']}",
            instructions["count"],
            instructions["rank"],
            local_device_ids=[instructions["rank"]],
        )
    import jax_intranode

    devices = jax.devices()[: instructions["devices"]]
    if len(devices) < instructions["devices"] or devices[0].platform != instructions["platform"]:
        raise SystemExit(
            f"wanted {instructions['devices']} {instructions['platform']} devices, found {devices}"
        )
    mesh = jax.make_mesh(
        (len(devices),), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices
    )
    jax_intranode.initialize(mesh)
    measured = _Measurements(mesh, instructions["platform"])
    facts = {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "jax_intranode": jax_intranode.__version__,
        "device": devices[0].device_kind,
        "devices": len(devices),
    }
    _answer(facts)
    for line in sys.stdin:
        command = json.loads(line)
        if "run" in command:
            _answer(measured.run(command["run"]))
            continue
        try:
            if "compile" in command:
                measured.compile(command["compile"])
            else:
                measured.run(command["start"])
            _answer({})
        except Exception as error:
            _answer({"error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"})


def _answer(value: Any) -> None:
    print(_MARK + json.dumps(value), flush=True)


class _Measurements:
    """Compiled chains by the names of their measurements."""

    def __init__(self, mesh: Any, platform: str) -> None:
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        self._mesh, self._gpu = mesh, platform == "gpu"
        self._spec = PartitionSpec("x")
        self._sharding = NamedSharding(mesh, self._spec)
        self._repetitions: dict[str, Any] = {}
        self._align = self._program(lambda x: jax.lax.psum(x, "x"))
        self._one = jax.make_array_from_callback(
            (mesh.size,), self._sharding, lambda index: np.ones(1, np.float32)
        )

    def _program(self, body: Any, donated: tuple[int, ...] = ()) -> Any:
        import jax

        mapped = jax.shard_map(
            body, mesh=self._mesh, in_specs=self._spec, out_specs=self._spec, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=donated)

    def run(self, name: str) -> float:
        """Makes one repetition; returns microseconds a call."""
        us: float = self._repetitions[name]()
        return us

    def compile(self, item: dict[str, Any]) -> None:
        """Compiles a measurement."""
        make = self._psum if item["kind"] == "psum" else self._matmul
        self._repetitions[item["name"]] = make(item)

    def _seconds(self, chain: Any, executions: int) -> float:
        """Times executions of a chain after all ranks have synchronised."""
        import jax

        self._align(self._one).block_until_ready()
        start = time.perf_counter()
        for _ in range(executions):
            state = chain()
        jax.block_until_ready(state)
        return time.perf_counter() - start

    def _psum(self, item: dict[str, Any]) -> Any:
        import jax
        import jax.numpy as jnp
        import numpy as np

        import jax_intranode

        length, executions = (128, 8) if self._gpu else (8, 4)
        n, count = self._mesh.size, item["size"] // 2
        scale = 1 / n

        def chain_of(call: Any, factor: float) -> Any:
            def body(x: Any) -> Any:
                for _ in range(length):
                    x = jax.lax.optimization_barrier(call(x) * jnp.bfloat16(factor))
                return x

            state = [
                jax.make_array_from_callback(
                    (n * count,), self._sharding, lambda index: np.ones(count, jnp.bfloat16)
                )
            ]

            program = self._program(body, donated=(0,)).lower(state[0]).compile()

            def run() -> Any:
                state[0] = program(state[0])
                return state[0]

            return run

        chain = chain_of(lambda x: jax_intranode.psum(x, "x"), scale)
        empty = chain_of(lambda x: x, 1)

        def repetition() -> float:
            # One untimed execution each: the devices have just worked for another process.
            self._seconds(chain, 1)
            seconds = self._seconds(chain, executions)
            self._seconds(empty, 1)
            seconds -= self._seconds(empty, executions)
            return 1e6 * max(seconds, 1e-9) / (executions * length)

        return repetition

    def _matmul(self, item: dict[str, Any]) -> Any:
        import jax
        import jax.numpy as jnp
        import numpy as np

        import jax_intranode

        m, k, n = item["shape"]
        ranks = self._mesh.size
        gathers = item["kind"] == "all_gather_matmul"
        function = getattr(jax_intranode, item["kind"])
        shapes = ((m // ranks if gathers else m, k), (k, n), (m if gathers else m // ranks, n))

        def operands(rank: Any) -> Any:
            keys = jax.random.split(jax.random.fold_in(jax.random.key(0), rank[0]), 3)
            pairs = zip(keys, shapes, strict=True)
            return [jax.random.uniform(key, shape, jnp.bfloat16, -1, 1) for key, shape in pairs]

        ids = jax.make_array_from_callback(
            (ranks,), self._sharding, lambda index: np.arange(ranks, dtype=np.int32)[index]
        )
        x, w, cotangent = self._program(operands)(ids)

        def call(x: Any, w: Any) -> Any:
            return function(x, w, "x")

        if item["backward"]:
            pull = self._program(lambda x, w: jax.vjp(call, x, w)[1])(x, w)
            moving, fixed = cotangent, (pull,)
            step: Any = lambda ct, pull: list(pull(ct))  # noqa: E731
        else:
            moving, fixed = x, (w,)
            step = lambda x, w: [call(x, w)]  # noqa: E731

        # About 4 ms a chain: the host starts the next one while it runs.
        call_s = (2 if item["backward"] else 1) * max(2 * m * k * n / _ASSUMED_FLOPS, 50e-6)
        length = min(max(round(4e-3 / call_s), 1), 16) if self._gpu else 2

        def body(moving: Any, *fixed: Any) -> Any:
            for _ in range(length):
                # The first barrier keeps all results. The second one keeps the change of one
                # element of the operand out of the computation of the results.
                results = jax.lax.optimization_barrier(step(moving, *fixed))
                total = sum(result[:1, :1].astype(jnp.float32) for result in results)
                element = jnp.clip(total, -1, 1).astype(moving.dtype)
                moving = jax.lax.optimization_barrier(
                    jax.lax.dynamic_update_slice(moving, element, (0, 0))
                )
            return moving

        state = [moving.copy()]
        program = self._program(body, donated=(0,)).lower(state[0], *fixed).compile()

        def run() -> Any:
            state[0] = program(state[0], *fixed)
            return state[0]

        executions = 4
        settling = round(0.1 / (length * call_s)) if self._gpu else 1

        def repetition() -> float:
            self._seconds(run, max(settling, 1))
            return 1e6 * self._seconds(run, executions) / (executions * length)

        return repetition


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _worker(json.loads(sys.argv[2]))
    else:
        sys.exit(_main())
