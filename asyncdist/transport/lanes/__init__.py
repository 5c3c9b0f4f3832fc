"""Lanes: how the ranks of a host hand each other data in collectives. Without input and output."""
