"""The environment variables: defaults, allowed values, and messages about other values."""

import dataclasses
import re
from pathlib import Path

import pytest
from processes import python
from tiers import full

from jax_intranode._src.selection import config

pytestmark = pytest.mark.one_version

FOUR = "\N{ARABIC-INDIC DIGIT FOUR}"


@pytest.mark.parametrize(
    ("name", "texts", "says"),
    [
        ("DISABLE", ("2", "true", "yes", " 1"), "0, 1"),
        ("STRICT", ("true",), "0, 1"),
        ("TOPOLOGY", ("ring", "FULLY_CONNECTED"), "fully_connected, hybrid_cube_mesh, unknown"),
        ("SLAB_MIB", ("0", "-1", "1.5", "64MiB", "inf", "1_0", FOUR), "positive integer"),
        ("FUSE_NORMS", ("1",), "auto, always, never"),
        ("LOG", ("INFO",), "fallbacks, info, debug"),
        ("SEGMENT_KIB", ("0", "4MB"), "positive integer"),
        ("TIMEOUT_S", ("0.0", "-1", "soon", "inf", "nan", "1e999", "1_0"), "positive number"),
        ("TIMEOUT_S", ("1e-9", " 1"), "positive number"),
        ("ALGORITHM", ("nccl", "one-shot", "AUTO"), "auto, one_shot, two_shot, lax"),
    ],
)
def test_refused_values(name: str, texts: tuple[str, ...], says: str) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=re.escape(says)) as error:
            config.parse({f"JAX_INTRANODE_{name}": text})
        assert f"JAX_INTRANODE_{name}={text!r}" in str(error.value)


def test_each_field_has_a_variable() -> None:
    """Empty ones are as good as none."""
    names = (of.name.rstrip("_").upper() for of in dataclasses.fields(config.Config))
    fields = {f"JAX_INTRANODE_{name}" for name in names}
    assert fields == {v.name for v in config.VARIABLES if v.reader == "package"}
    assert fields == {v.name for v in config.VARIABLES if v.read is not None}
    assert config.parse(dict.fromkeys(fields, "")) == config.Config()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("JAX_INTRANODE_TIMEOUTS", "JAX_INTRANODE_TIMEOUT_S?"),
        ("JAX_INTRANODE_TIMEOUT", "JAX_INTRANODE_TIMEOUT_S?"),
        ("JAX_INTRANODE_ALGO", "JAX_INTRANODE_ALGORITHM"),
        ("JAX_INTRANODE_SLAB_MB", "JAX_INTRANODE_SLAB_MIB"),
        ("JAX_INTRANODE_XYZ", "JAX_INTRANODE_DISABLE, JAX_INTRANODE_TOPOLOGY"),
    ],
)
def test_unknown_variable_is_reported_once(
    caplog: pytest.LogCaptureFixture, name: str, meant: str
) -> None:
    config.check({name: "5"})
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith(f"{name} is set") and meant in record.message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RANK", "abc"),
        ("RANK", "-1"),
        ("WORLD_SIZE", "2.0"),
        ("LOCAL_DEVICES", "0,"),
        ("RESTART", FOUR),
    ],
)
def test_what_a_launcher_sets_is_checked(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"JAX_INTRANODE_{name}=.*: use (an )?integer"):
        config.check({f"JAX_INTRANODE_{name}": text})


def test_import_checks_values(tmp_path: Path) -> None:
    code = "import jax_intranode"
    outcome = python("-P", "-c", code, cwd=tmp_path, JAX_INTRANODE_ALGORITHM="twoshot")
    assert outcome.returncode == 1
    assert outcome.stdout.count("JAX_INTRANODE_ALGORITHM='twoshot': use one of auto") == 1
    assert outcome.stdout.splitlines()[-1].startswith("ValueError: JAX_INTRANODE_ALGORITHM")


LOGS = """
import io, logging, sys
stderr, how = sys.stderr, sys.argv[1]
if how == "root":
    logging.basicConfig(format="of the program: %(name)s %(message)s")
if how == "replaced":
    sys.stderr = io.StringIO()
import jax, jax.numpy as jnp
import jax_intranode
if how == "replaced":
    sys.stderr.close()
    sys.stderr = stderr
if how == "jax_intranode.fallbacks":
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("of the program: %(name)s %(message)s"))
    logging.getLogger(how).addHandler(handler)
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
P = jax.sharding.PartitionSpec
@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P())
def total(x):
    return jax_intranode.psum(x, "x") + jax_intranode.psum(x.astype(jnp.complex64), "x").real
total(jnp.ones(2))
"""
FALLS_BACK = "falls back to jax.lax: dtype complex64"
OF_PROGRAM = "of the program: jax_intranode.fallbacks psum at "
COMMUNICATE = "communicate through jax_intranode"


@pytest.mark.parametrize(
    ("log", "root", "wanted"),
    [
        full("", "", []),
        full("fallbacks", "", ["INFO:jax_intranode.fallbacks:psum at "]),
        full("fallbacks", "root", [OF_PROGRAM]),
        full("fallbacks", "jax_intranode.fallbacks", [OF_PROGRAM]),
        ("fallbacks", "replaced", ["INFO:jax_intranode.fallbacks:psum at "]),
        ("info", "", ["INFO:jax_intranode.fallbacks:psum at ", "INFO:jax_intranode:Devices "]),
    ],
)
def test_log_of_a_program_without_code(
    tmp_path: Path, log: str, root: str, wanted: list[str]
) -> None:
    outcome = python("-P", "-c", LOGS, root, cwd=tmp_path, JAX_INTRANODE_LOG=log)
    assert outcome.returncode == 0, outcome.stdout
    lines = outcome.stdout.splitlines()
    found = [line for line in lines if FALLS_BACK in line or COMMUNICATE in line]
    assert len(found) == len(wanted), found
    assert all(line.startswith(start) for line, start in zip(found, wanted, strict=True)), found
