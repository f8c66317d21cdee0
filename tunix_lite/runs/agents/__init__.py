"""Agents: programs that ask the model over HTTP; their calls train it."""
