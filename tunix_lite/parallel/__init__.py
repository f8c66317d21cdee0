"""The mesh, and what lives where on it."""
