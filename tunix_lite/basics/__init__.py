"""Checks of files before they are used: they may be damaged, or written by somebody else."""
