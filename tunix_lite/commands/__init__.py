"""The command line: a thin module for each command."""
