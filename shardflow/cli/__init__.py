"""Command line: a module a command; `main` has the table of commands."""
