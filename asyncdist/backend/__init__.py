"""Ways to carry out a group's operations: `aio` for host arrays; others register themselves."""
