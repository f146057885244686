"""The command `soak`: random programs for as long as you like, every result compared.

calls.py     random calls, chains of them, and the bits that they must have
rank.py      what each rank runs: makes, runs and compares programs
command.py   the parent process: starts the ranks, shows the progress, gives the verdict
"""
