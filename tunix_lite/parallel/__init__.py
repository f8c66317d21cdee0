"""The mesh, and the place of every array on it."""
