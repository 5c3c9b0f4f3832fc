"""Simulation: how long plans take on a model of a machine and its network."""
