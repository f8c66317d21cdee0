"""Reward functions: strings in, a float out. Of the package, they import the workers alone."""
