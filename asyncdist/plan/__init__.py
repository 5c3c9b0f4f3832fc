"""Plans: what each rank sends to which other, as pure values. Standard library only; no event loop, no arrays."""
