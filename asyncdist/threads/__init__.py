"""The communication thread: an event loop beside the caller's, so that messages move while the caller computes."""
