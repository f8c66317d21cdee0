"""The processes of a run: how they start, meet, agree, are watched, and end. Knows nothing of a
model."""
