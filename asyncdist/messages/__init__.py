"""Point-to-point messages of arrays and objects."""
