"""Agents: programs that ask the model over HTTP, and what is learned from their calls."""
