"""Turns conf/, overrides and flags into settings, and settings into what a run is made of: sizes,
mesh, policy, optimizer and update."""
