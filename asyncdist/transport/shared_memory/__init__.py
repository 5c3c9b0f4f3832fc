"""Memory that the ranks of a host share: segments, how they are passed on, what lies in them, and wake-ups."""
