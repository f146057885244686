"""The command `soak`: random programs for as long as you like, every result compared.

programs.py    what a random program consists of; a seed and a number make it
steps.py       its steps as functions of a library: ours, `jax.lax`, or the reference
reference.py   sums in rank order, rounded once: the bits that ours must have
rank.py        the program of each rank: builds, runs and compares programs
command.py     the parent process: starts the ranks, shows the progress, gives the verdict
"""
