"""Reward functions: strings in, a float out. Nothing in here imports the rest of the package."""
