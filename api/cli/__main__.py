"""`python -m api.cli` runs `bexp`."""

from api.cli import main

main()
