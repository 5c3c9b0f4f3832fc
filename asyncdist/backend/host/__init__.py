"""The backend of host arrays: collectives as plans over the mesh, or through memory that the ranks of a host share."""
