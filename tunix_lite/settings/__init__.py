"""Turns conf/, overrides and flags into settings."""
