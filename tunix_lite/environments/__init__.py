"""Conversations: what answers the model between its turns, and the tools that it may call."""
