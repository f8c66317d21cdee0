"""Turns graded completions into statistics and texts. It knows no model and no run."""
