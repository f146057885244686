"""Measuring whole programs."""
