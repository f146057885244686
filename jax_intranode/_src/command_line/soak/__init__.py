"""The command `soak`: random programs for as long as you like, every result compared.

command.py is the parent process. rank.py makes and runs programs of the chains in calls.py.
"""
