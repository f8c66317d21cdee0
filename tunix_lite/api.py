"""The names that programs of yours are written with. A name that stands here stays.

Each lives in a module of its own; docs/api/front.md has them by what they are for, with examples.
"""

from tunix_lite.algorithms.algorithm import Algorithm
from tunix_lite.algorithms.distill import Distill
from tunix_lite.algorithms.dpo import DPO
from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.ppo import PPO
from tunix_lite.algorithms.sampling import sample_groups
from tunix_lite.algorithms.sft import SFT
from tunix_lite.basics.errors import ConfigError, RunFailed
from tunix_lite.basics.types import Batch, Graded, Rollout, TokenScores, TrainState
from tunix_lite.commands.evaluate import EvaluateTaskConfig, evaluate_model
from tunix_lite.commands.train_agent import train_agent
from tunix_lite.inference.export import export
from tunix_lite.inference.language_model import Completion, LanguageModel, load
from tunix_lite.learner.optim import OptimizerConfig, init_opt_state, make_optimizer
from tunix_lite.learner.policy import make_policy
from tunix_lite.learner.rows import RowLayout
from tunix_lite.learner.update import TrainStep
from tunix_lite.models.source import ModelConfig, load_weights, locate
from tunix_lite.parallel.mesh import make_mesh, put
from tunix_lite.rewards.math import correct
from tunix_lite.rollout.generate import make_generate
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.runs.agents.running import AgentConfig
from tunix_lite.runs.watch import StepDone
from tunix_lite.settings.compose import compose
from tunix_lite.settings.config import RunConfig
from tunix_lite.tasks.sources import Arithmetic, FileRows
from tunix_lite.tasks.task import Reward, Task, TaskConfig
from tunix_lite.tracking.tracker import Tracker
from tunix_lite.train import train
from tunix_lite.training_clients.data import Datum
from tunix_lite.training_clients.sampling import SampleSettings
from tunix_lite.training_clients.trainer import Trainer, TrainingClient

__all__ = [
    "DPO",
    "GRPO",
    "PPO",
    "SFT",
    "AgentConfig",
    "Algorithm",
    "Arithmetic",
    "Batch",
    "Completion",
    "ConfigError",
    "Datum",
    "Distill",
    "EvaluateTaskConfig",
    "FileRows",
    "GenerationConfig",
    "Graded",
    "LanguageModel",
    "ModelConfig",
    "OptimizerConfig",
    "Reward",
    "Rollout",
    "RolloutConfig",
    "RowLayout",
    "RunConfig",
    "RunFailed",
    "SampleSettings",
    "StepDone",
    "Task",
    "TaskConfig",
    "TokenScores",
    "Tracker",
    "TrainState",
    "TrainStep",
    "Trainer",
    "TrainingClient",
    "compose",
    "correct",
    "evaluate_model",
    "export",
    "init_opt_state",
    "load",
    "load_weights",
    "locate",
    "make_generate",
    "make_mesh",
    "make_optimizer",
    "make_policy",
    "put",
    "sample_groups",
    "train",
    "train_agent",
]
