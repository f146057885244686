"""Measuring psum, pmean, psum_scatter and all_gather."""
