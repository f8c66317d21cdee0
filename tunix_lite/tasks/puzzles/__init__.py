"""Problems that are generated, with answers that can be verified: one kind in each file."""
