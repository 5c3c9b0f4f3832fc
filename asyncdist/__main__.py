"""`python -m asyncdist` is the `asyncdist` command."""

from __future__ import annotations

from asyncdist.cli import main

if __name__ == "__main__":
    main(prog_name="asyncdist")
