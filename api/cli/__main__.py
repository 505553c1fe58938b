"""`python -m bexp.api.cli` runs `bexp`."""

from bexp.api.cli import main

main()
