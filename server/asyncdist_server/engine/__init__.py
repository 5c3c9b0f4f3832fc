"""The store itself, without I/O: requests in, replies and events out."""
