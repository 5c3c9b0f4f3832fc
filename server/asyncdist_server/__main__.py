"""`python -m asyncdist_server`."""

from __future__ import annotations

from asyncdist_server.cli import main

if __name__ == "__main__":
    main(prog_name="asyncdist-server")
