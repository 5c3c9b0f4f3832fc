"""What a client and the daemon say to each other, and the proof of the token before it."""
