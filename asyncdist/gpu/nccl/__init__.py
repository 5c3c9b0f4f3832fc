"""The path through NCCL."""
