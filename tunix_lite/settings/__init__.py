"""What a user writes: conf/, overrides and flags become settings."""
