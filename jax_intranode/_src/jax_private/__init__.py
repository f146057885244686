"""Everything that depends on JAX's version, one file per subject.

No other package imports jax._src, or relies on names and parameters that JAX does not document.
Each function says which versions need it. Tested with jax 0.10.2, 0.11.2 and 0.12.0.1.
"""
