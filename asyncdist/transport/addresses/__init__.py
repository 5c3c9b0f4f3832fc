"""Addresses: where a rank can be reached, by TCP or Unix sockets."""
