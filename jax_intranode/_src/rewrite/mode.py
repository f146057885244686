"""Which programs are rewritten."""

from jax_intranode._src.jax_private import lowering_hooks

# Part of the key of all of JAX's caches, which so choose between the programs that were compiled
# with and without. None: programs are not rewritten. ON: they are. AUTO: they are, and so is what
# XLA's partitioner adds. PART: what this thread lowers becomes a part of a program that is
# rewritten, and that all processes agree on. While a program is lowered that names no devices,
# (ON or AUTO, the ids of the devices of jax.set_mesh).
enabled = lowering_hooks.cache_key_context()
ON = "rewrite"
AUTO = "rewrite, and what XLA's partitioner adds"
PART = "rewrite a part of a program"
