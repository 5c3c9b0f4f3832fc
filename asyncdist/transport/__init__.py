"""Messages between the ranks of a world: the mesh of connections, and what it is made of."""
