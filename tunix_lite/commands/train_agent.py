"""Trains an agent against the weights that are being trained. A step: G episodes of each of P
examples, rewards, advantages within each group, one update."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.types import TrainState
from tunix_lite.runs.agents.batch import settings_for_agents
from tunix_lite.runs.agents.experience import AgentExperience
from tunix_lite.runs.agents.running import Agent, AgentConfig
from tunix_lite.runs.session import Job
from tunix_lite.settings.compose import compose
from tunix_lite.settings.config import RunConfig
from tunix_lite.train import train


def train_agent(
    agent: Agent,
    *settings: str | RunConfig,
    folder: str | Path,
    config: AgentConfig | None = None,
    reward: Callable[[str, dict], float] | None = None,
) -> TrainState:
    """Trains an agent as run_training.py trains on prompts; returns the last state. agent: (client,
    example) -> the reward; or a text, which `reward` grades (None: the rewards of the task).
    settings: as on the command line of run_training.py, or one RunConfig. folder: checkpoints,
    metrics.jsonl, samples and all else of a run; a second call with the same folder goes on where
    the first stopped. config: how the agent is run. Raises ConfigError for settings that agents do
    not follow, RunFailed where an agent fails and on_error=raise, and what `train` raises.
    Example: train_agent(agent, "task=arithmetic", "training.max_steps=40", folder="outputs/my")."""
    for text in settings:
        if isinstance(text, str) and text.startswith("hydra."):
            raise ConfigError(
                f"{text}: agents write into the folder that train_agent(folder=...) gives"
            )
    is_made = len(settings) == 1 and isinstance(settings[0], RunConfig)
    run = settings_for_agents(settings[0] if is_made else compose(list(settings)))
    # who called a function cannot type a setting of the command line
    job = Job(resume_hint=f"folder={str(folder)!r}")
    how = {"agent": agent, "reward": reward, "config": config or AgentConfig()}
    return train(run, folder, job, partial(AgentExperience, **how))
