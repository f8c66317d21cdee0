"""Servers: a model in slots behind the protocol of the OpenAI API."""
