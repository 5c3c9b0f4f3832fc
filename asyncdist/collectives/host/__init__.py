"""The backend of host arrays: collectives as plans over the mesh."""
