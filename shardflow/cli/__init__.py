"""Command line: related commands in a module; `main` has the table of commands."""
