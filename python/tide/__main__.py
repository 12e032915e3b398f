"""`python -m tide` is the `tide` command."""

from tide.cli import main

main()
