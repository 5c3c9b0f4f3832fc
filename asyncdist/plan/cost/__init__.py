"""Cost: what each algorithm asks of a machine and its network, and how long that is predicted to take."""
