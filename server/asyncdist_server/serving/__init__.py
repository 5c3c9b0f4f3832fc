"""Sockets, TLS, limits and configuration of the daemon."""
