"""Other libraries that the benchmark measures on the same devices, sizes and dtypes.

To add one, write a module with a `Peer` (peer.py) and list it in registry.py.
"""
