"""Collectives that XLA's partitioner would add to plain jit programs.

- modules.py: MLIR modules in Python;
- simplified.py: a lowered program as XLA simplifies it;
- program.py: a lowered program after Shardy's propagation, in which each value has its sharding;
- plans.py: the ways in which an operation over sharded arrays can be computed;
- partitioner.py: which of them XLA takes, from compiling the operation alone;
- kinds.py: what operations compute;
- operations.py: the operations of a program that communicate, each with its plan;
- moved.py: gathers and sums move next to the matmuls that they overlap with;
- tails.py: what follows a sum up to a norm, which becomes part of its shard_map;
- overlap.py: which of them stay with XLA, because it overlaps them;
- groups.py: operations become shard_maps;
- bodies.py: what runs of these shard_maps, which are rewritten like any other, and their lowering;
- rewriting.py: what runs when JAX has lowered a program.
"""
