"""The `mpi` backend: messages and collectives through MPI's nonblocking operations, which the event loop drives."""
