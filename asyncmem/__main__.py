"""Lets `python -m asyncmem` stand for the `asyncmem` command."""

from asyncmem.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
