"""Proof: what is shown of the plans of every algorithm, on symbols."""
