"""`python -m flipper`."""

from flipper.cli import main

main()
