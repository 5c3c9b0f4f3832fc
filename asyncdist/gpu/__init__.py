"""The backend of GPU arrays: what its paths have in common, and the choice among them."""
