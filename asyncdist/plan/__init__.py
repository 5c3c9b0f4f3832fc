"""Plans: what to send to whom, as pure values. Standard library only; no event loop, no arrays."""
