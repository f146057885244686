"""The package, in the order in which its parts import each other, the lowest first.

0. operations: a record of each operation; reasons: why others run a call;
   timeouts: how long it waits; version
1. jax_private: what depends on JAX's version;
   native: the C++ modules, and what Python shares with them
2. health: failures of communication, and the watch of the peers;
   selection: which algorithm runs an operation, by tables, measurements and settings
3. group: which devices communicate, and through which memory
4. ops: the public operations and their primitives
5. rewrite: programs that call jax.lax
6. report: what runs a program's collectives, and what has been lowered
7. command_line: the commands of ``python -m jax_intranode``
"""
