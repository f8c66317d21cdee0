"""Mesh-sharded RL post-training of language models in JAX."""

__version__ = "0.1.0"


def __getattr__(name: str):
    """`tunix_lite.Trainer`, imported when it is asked for."""
    if name != "Trainer":
        raise AttributeError(f"module 'tunix_lite' has no attribute {name!r}")
    from tunix_lite.training_clients.trainer import Trainer

    return Trainer
