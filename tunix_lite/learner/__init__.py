"""The mathematics of an update: rows, micro-batches, log-probabilities, gradients. Knows no
RunConfig, no folder."""
