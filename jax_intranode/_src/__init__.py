"""The package, in the order in which its parts import each other, the lowest first.

- jax_private: what depends on JAX's version
- native: the C++ modules, and what Python shares with them
- health: failures of communication, and the watch of the peers
- selection: which algorithm runs an operation, by tables, measurements and settings
- group: which devices communicate, and through which memory
- ops: the public operations and their primitives
- rewrite: programs that call jax.lax
- report: what runs a program's collectives, and what has been lowered
- command_line: the commands of ``python -m jax_intranode``
"""
