"""Measuring psum, pmean, psum_scatter, all_gather and all_to_all."""
