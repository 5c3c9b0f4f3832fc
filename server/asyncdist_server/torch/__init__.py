"""Torch's own store clients: their protocol, and what the clients of a port share."""
