"""Kernels of our own for decoding on NVIDIA GPUs (`rollout.kernels=fused`), which benchmarks/gpu.py
times."""
