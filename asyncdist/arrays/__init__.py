"""Arrays of the host and of a GPU, what has DLPack, reductions, and Python objects in msgpack."""
