"""Command line: each module holds related commands, and `main` the table of all."""
