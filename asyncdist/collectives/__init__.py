"""What a backend is, the arguments of collectives, and collectives of host arrays."""
