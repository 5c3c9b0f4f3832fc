"""Connections: how they come about, and what carries their bytes."""
