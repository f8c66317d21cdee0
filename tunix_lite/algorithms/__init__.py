"""Algorithms: `batch_of` makes a Batch, `loss` turns log-probabilities and that Batch into a
number."""
