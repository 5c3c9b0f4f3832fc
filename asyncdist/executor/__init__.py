"""Running a plan on real arrays over a mesh, and the handle that callers await."""
