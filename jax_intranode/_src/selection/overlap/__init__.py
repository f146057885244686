"""Overlapped collective matmuls: whether an operation is overlapped, and how it runs.

`plan` has the record of how it runs, `sizes` what follows from its shapes, `profiles` the measured
constants of each GPU, `model` the predicted costs and the plan by them, and `choice` what lowering
asks.
"""
