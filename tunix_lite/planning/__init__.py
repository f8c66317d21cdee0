"""What a run costs before it runs: accelerators, FLOPs and bytes."""
