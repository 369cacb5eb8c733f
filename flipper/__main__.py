"""`python -m flipper`."""

from flipper.cli import main

main(prog_name="flipper")
