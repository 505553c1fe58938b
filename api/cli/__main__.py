"""`python -m api.cli` is `bexp`."""

from api.cli import main

main()
