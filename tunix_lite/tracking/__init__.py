"""What a run prints while it runs, and the files in its folder."""
