"""What goes wrong, and where: failures of communication, the watch of the peers, long waits.

Also the call sites of operations, by which messages name them, and what `stats` counts.
"""
