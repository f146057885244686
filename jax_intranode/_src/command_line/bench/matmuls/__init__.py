"""Measuring the collective matmuls."""
