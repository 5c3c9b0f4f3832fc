"""The path through device memory that ranks of one host share."""
