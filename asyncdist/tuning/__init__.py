"""Measuring what messages, bytes and reductions cost on this host, for the selector."""
