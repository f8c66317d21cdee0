"""What graded completions say of a model: statistics and texts. It knows no model and no run."""
