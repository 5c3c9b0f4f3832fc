"""The protocol between two ranks: the hello, frames, and what they do. Without input and output."""
