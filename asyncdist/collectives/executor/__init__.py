"""Running a plan on real arrays over a mesh."""
