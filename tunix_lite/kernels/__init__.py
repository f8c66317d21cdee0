"""Kernels of our own for decoding on NVIDIA GPUs, which `rollout.kernels=fused` asks for.

`decode_attention` has the attention of a layer, `decode_products` its products with weights,
`fused_draw` the product with the head and the draw of a token; `choice` says what they cannot do.
No GPU has timed them yet, so `rollout.kernels=auto` stays with plain products; benchmarks/gpu.py
times both.
"""
