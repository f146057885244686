"""Failures of communication, the watch of the peers, and waits that last long."""
