"""A run with all its choices made: batch, rows, memory by arithmetic, policy, optimizer, update."""
