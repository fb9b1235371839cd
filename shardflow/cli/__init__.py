"""Command line: one module for each command; `main` has the table of commands."""
