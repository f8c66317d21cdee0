"""The parts of a training loop that you write yourself: gradients, updates, samples."""
