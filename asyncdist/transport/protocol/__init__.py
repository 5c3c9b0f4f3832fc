"""The protocol between two ranks: who they are, then frames, and what these do. Without input and output."""
