"""What a rank has done of late, and what is told of it."""
