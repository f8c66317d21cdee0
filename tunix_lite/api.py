"""The names for notebooks: settings, training, a loaded model, export. See examples/notebook.py."""

from tunix_lite.commands.program import compose
from tunix_lite.inference.export import export
from tunix_lite.inference.language_model import Completion, LanguageModel, load
from tunix_lite.rollout.engine import GenerationConfig
from tunix_lite.train import train

__all__ = ["Completion", "GenerationConfig", "LanguageModel", "compose", "export", "load", "train"]
