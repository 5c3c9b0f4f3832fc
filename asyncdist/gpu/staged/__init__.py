"""The path through page-locked memory of the host."""
