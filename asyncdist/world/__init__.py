"""How ranks find each other, and what they keep of each other."""
