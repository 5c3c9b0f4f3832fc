"""The arguments of a group's operations, checked and bound before a byte moves."""
