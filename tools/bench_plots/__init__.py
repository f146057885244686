"""Plots of the JSON files that the benchmark writes. They need matplotlib."""
