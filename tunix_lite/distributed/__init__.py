"""The processes of a run: they start, meet, compare themselves, are watched, and end."""
