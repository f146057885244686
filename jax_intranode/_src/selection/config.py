"""The environment variables of the package: names, types, defaults and meanings.

Importing the package checks them; the values are read once, at first use. All processes of a
program need the same values of most variables in `Config`; the rendezvous compares them, and of a
file the content.
"""

import dataclasses
import difflib
import functools
import keyword
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jax_intranode._src import timeouts

_log = logging.getLogger("jax_intranode")
# The logger of the lines that say what jax.lax or XLA runs, and why.
FALLBACKS = "jax_intranode.fallbacks"

_PREFIX = "JAX_INTRANODE_"
# What a launcher sets for each rank (launcher/).
RANK = _PREFIX + "RANK"
WORLD_SIZE = _PREFIX + "WORLD_SIZE"
COORDINATOR = _PREFIX + "COORDINATOR"
LOCAL_DEVICES = _PREFIX + "LOCAL_DEVICES"
RESTART = _PREFIX + "RESTART"
SECRET = _PREFIX + "SECRET"
_TOPOLOGIES = ("fully_connected", "hybrid_cube_mesh", "unknown")
ALGORITHMS = ("auto", "one_shot", "two_shot", "lax")
FUSE_NORMS = ("auto", "always", "never")
LOG = ("fallbacks", "info", "debug")
_INTEGER = "[0-9]{1,18}"
_ANY = r"[\s\S]*"


Read = Callable[[str, str], Any]


def _one_of(*allowed: str) -> Read:
    """Reads one of these texts."""

    def read(name: str, text: str) -> str:
        if text not in allowed:
            raise ValueError(f"{name}={text!r}: use one of {', '.join(allowed)}.")
        return text

    return read


def _is_set(name: str, text: str) -> bool:
    return _one_of("0", "1")(name, text) == "1"


def _positive(kind: type, *, or_zero: bool = False) -> Read:
    """Reads a positive number; also 0, if it means something."""
    # Python also takes "1_0" and the digits of other scripts.
    what, form = "integer", _INTEGER
    if kind is float:
        what, form = "number, at least 0.001 and", r"[0-9]*\.?[0-9]+(e-?[0-9]+)?"

    def read(name: str, text: str) -> Any:
        if or_zero and text == "0":
            return kind(0)
        value = kind(text) if re.fullmatch(form, text) else 0
        if not 0.001 <= value <= 10**9:
            raise ValueError(f"{name}={text!r}: use a positive {what} at most 10**9.")
        return value

    return read


def _words(allowed: tuple[str, ...]) -> str:
    return ", ".join(f"`{value}`" for value in allowed)


def _name(field: str) -> str:
    """The variable of a field of `Config`."""
    return _PREFIX + field.rstrip("_").upper()


def _variable(default: Any, values: str, in_words: str, meaning: str, read: Read) -> Any:
    """A field of `Config`; what comes after its default value is as in `Variable`."""
    metadata = {"values": values, "default": in_words, "meaning": meaning, "read": read}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """The values in force, by the names of the variables in lower case and without the prefix.

    One that is a word of Python's has "_" at its end.
    """

    # A new variable that the package reads is a field here. Afterwards tools/environment_page.py
    # writes docs/environment.md.
    disable: bool = _variable(
        False,
        "`0`, `1`",
        "`0`",
        "`1`: everything falls back to `jax.lax`",
        _is_set,
    )
    topology: str | None = _variable(
        None,
        _words(_TOPOLOGIES),
        "what NVML reports",
        "for tests: assume this NVLink topology, even where processes share a GPU",
        _one_of(*_TOPOLOGIES),
    )
    slab_mib: int | None = _variable(
        None,
        "a positive integer",
        "392 on GPUs, 8 on CPU devices",
        "MiB of memory per device for collectives; with less, large arrays fall back",
        _positive(int),
    )
    ring_mib: int = _variable(
        512,
        "`0` or a positive integer",
        "512",
        "MiB of memory per GPU for collective matmuls; `0`: they are not overlapped",
        _positive(int, or_zero=True),
    )
    peer_buffers_mib: int = _variable(
        256,
        "`0` or a positive integer",
        "256",
        "the most MiB of memory per device, for each different set of devices, for the open "
        "buffers of `peer_buffer`; they are allocated one by one",
        _positive(int, or_zero=True),
    )
    timeout_s: float = _variable(
        timeouts.WAIT_S,
        "`0` or a positive number",
        f"{timeouts.WAIT_S:g}",
        "seconds after which a rank that waits for another one fails; `0`: never. A rendezvous "
        f"takes at most {timeouts.MEETING_S:g}",
        _positive(float, or_zero=True),
    )
    report_after_s: float = _variable(
        timeouts.REPORT_AFTER_S,
        "a positive number",
        f"{timeouts.REPORT_AFTER_S:g}",
        "seconds after which a rank that waits for another one logs a warning for the first time",
        _positive(float),
    )
    algorithm: str = _variable(
        "auto",
        _words(ALGORITHMS),
        "`auto`",
        "`one_shot`, `two_shot`: sums, maxima and minima use this algorithm at all sizes, in "
        "segments if the array does not fit at once; `lax`: everything falls back",
        _one_of(*ALGORITHMS),
    )
    segment_kib: int = _variable(
        0,
        "a positive integer",
        "not set",
        "an array that is too large for the table or the memory runs in segments of at most so "
        "many KiB, and does not fall back; not in a `ppermute`",
        _positive(int),
    )
    fuse_norms: str = _variable(
        "auto",
        _words(FUSE_NORMS),
        "`auto`",
        "whether `install()` makes one operation of a sum, a residual add and a norm; `auto`: "
        "where a row of the table says that it is faster",
        _one_of(*FUSE_NORMS),
    )
    strict: bool = _variable(
        False,
        "`0`, `1`",
        "`0`",
        "`1`: an unwanted fallback is an error",
        _is_set,
    )
    tuning: str | None = _variable(
        None,
        "a file",
        "the shipped table",
        "what `python -m jax_intranode tune` has measured on this node",
        lambda name, text: text,
    )
    log: str | None = _variable(
        None,
        _words(LOG),
        "not set",
        "what is written to stderr; no effect if the program sets up `logging`. `fallbacks`: what "
        "falls back, and why; `info`: also what is accelerated; `debug`: also errors in full",
        _one_of(*LOG),
    )

    def of_all_processes(self) -> dict[str, str]:
        """The values that all processes must have alike, by the names of their variables."""
        values = dataclasses.asdict(self)
        del values["log"], values["tuning"]  # whose content is compared
        words = {None: "not set", False: "0", True: "1"}
        return {_name(field): words.get(value, f"{value}") for field, value in values.items()}

    @property
    def is_strict(self) -> bool:
        """Whether fallbacks are errors: not where the other variables ask for ``jax.lax``."""
        return self.strict and not self.disable and self.algorithm != "lax"

    @property
    def wait_s(self) -> float:
        """The limit of a wait in seconds; 30 years for no limit."""
        return self.timeout_s or timeouts.NO_LIMIT_S

    @property
    def meeting_s(self) -> float:
        """The limit of what needs all processes at once: a rendezvous, or JAX's store."""
        return min(self.wait_s, timeouts.MEETING_S)

    def ring_bytes(self, platform: str) -> int:
        """Bytes of a device's ring buffer on a platform.

        Rows and products of collective matmuls travel through it.
        """
        return 0 if platform == "cpu" else self.ring_mib << 20

    def slab_bytes(self, platform: str) -> int:
        """Bytes of a device's slab on a platform.

        Peers write into it. It serves all communicators together.
        """
        return (self.slab_mib or (8 if platform == "cpu" else 392)) << 20


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: its name.
        values: the values that it may have, in words. The page of environment variables has them,
            and the meaning; both are Markdown.
        default: what holds where it is not set, in words.
        meaning: what it does.
        read: turns its text into the value of the field of `Config`, or raises ValueError. None if
            something else reads it.
        form: what its text has to match, as a regular expression, where `read` does not check it.
        reader: what reads it: "package", "launcher", "build" or "tests".
        is_secret: whether reports and messages leave out its value.
    """

    name: str
    values: str
    default: str
    meaning: str
    read: Read | None = None
    form: str = _ANY
    reader: str = "package"
    is_secret: bool = False


def _of_launcher(name: str, values: str, meaning: str, form: str = _ANY, **more: Any) -> Variable:
    """A variable that `launch` sets; what is given is as in `Variable`."""
    return Variable(name, values, "none", meaning, form=form, reader="launcher", **more)


# A new variable that something else reads is listed here.
VARIABLES = (
    *(Variable(_name(of.name), **of.metadata) for of in dataclasses.fields(Config)),
    _of_launcher(RANK, "an integer", "the rank of this process, from 0", _INTEGER),
    _of_launcher(WORLD_SIZE, "an integer", "the number of processes", _INTEGER),
    _of_launcher(
        COORDINATOR,
        "host:port, or `unix:` and a path",
        "the address of JAX's coordination service",
    ),
    _of_launcher(
        LOCAL_DEVICES,
        "integers with commas between them",
        "the devices of this process",
        f"{_INTEGER}(,{_INTEGER})*",
    ),
    _of_launcher(
        RESTART, "an integer", "how often `launch` has started the processes again", _INTEGER
    ),
    _of_launcher(
        SECRET,
        "a word of hexadecimal digits",
        "what the job's keys in JAX's key-value store begin with",
        "[0-9a-f]{1,64}",
        is_secret=True,
    ),
    Variable(
        _PREFIX + "CUDA",
        "`AUTO`, `ON`, `OFF`",
        "`AUTO`",
        "whether to build the CUDA kernels; `ON`: fail without an `nvcc`; `AUTO`: fail without "
        "one on a machine with GPUs, and leave them out on others",
        reader="build",
    ),
    Variable(
        _PREFIX + "CUDA_WHEELS",
        "`1`",
        "not set",
        "take `nvcc` from PyPI; no CUDA toolkit is needed",
        reader="build",
    ),
    Variable(
        _PREFIX + "REQUIRE_GPUS",
        "an integer",
        "`0`",
        "fail with fewer GPUs than this, instead of skipping tests",
        reader="tests",
    ),
)


def parse(environ: Mapping[str, str]) -> Config:
    """Reads the variables.

    Raises:
        ValueError: a variable has a value that is not allowed.
    """
    values = {}
    for variable in VARIABLES:
        text = environ.get(variable.name, "")
        if text and variable.read is not None:
            field = variable.name.removeprefix(_PREFIX).lower()
            field += "_" * keyword.iskeyword(field)
            values[field] = variable.read(variable.name, text)
    return Config(**values)


def unknown(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with our prefix that nothing reads; for each, the names that may be meant."""
    known = [variable.name for variable in VARIABLES]
    ours = [variable.name for variable in VARIABLES if variable.reader != "launcher"]
    found = {}
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in known:
            # Compared without the prefix, which makes any two names look alike.
            near = difflib.get_close_matches(
                name.removeprefix(_PREFIX), [k.removeprefix(_PREFIX) for k in known], cutoff=0.5
            )
            found[name] = " or ".join(_PREFIX + k for k in near) or ", ".join(ours)
    return found


def check(environ: Mapping[str, str]) -> None:
    """Logs one warning for each variable with our prefix that nothing reads.

    Raises:
        ValueError: a variable has a value that is not allowed.
    """
    parse(environ)
    for variable in VARIABLES:
        text = environ.get(variable.name, "")
        if text and not re.fullmatch(variable.form, text):
            shown = "..." if variable.is_secret else repr(text)
            raise ValueError(f"{variable.name}={shown}: use {variable.values}.")
    for name, meant in unknown(environ).items():
        _log.warning("%s is set, but no such variable exists. Did you mean %s?", name, meant)


def start_log(environ: Mapping[str, str]) -> None:
    """Writes lines of the log to stderr as JAX_INTRANODE_LOG says."""
    wanted = parse(environ).log
    if wanted is None:
        return
    level = logging.DEBUG if wanted == "debug" else logging.INFO
    logging.getLogger(FALLBACKS if wanted == "fallbacks" else _log.name).setLevel(level)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))

    def writes(record: logging.LogRecord) -> bool:
        """Whether no handler of the program does, which has set up logging then."""
        handler.stream = sys.stderr  # pytest and others replace it
        loggers = map(logging.getLogger, (None, _log.name, record.name))
        return {h for logger in loggers for h in logger.handlers} == {handler}

    handler.addFilter(writes)
    _log.addHandler(handler)


@functools.cache
def get() -> Config:
    """The values in force in this process."""
    return parse(os.environ)
