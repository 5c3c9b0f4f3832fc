"""Algorithms: how each collective is done, one algorithm a file; `registry` lists them."""
