"""A network without sockets: ranks of one event loop, for simulations and tests."""
