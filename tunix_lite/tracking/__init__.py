"""What a run tells people while it runs, and what it leaves behind."""
