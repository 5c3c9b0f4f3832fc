"""Selection: which algorithm a group takes for a collective, and in which chunks."""
