"""Training an agent: it runs as it is, against the weights that are being trained.

  def agent(client, example):
      answer = client.chat.completions.create(model="any", messages=[...])
      return 1.0 if answer.choices[0].message.content == example["answer"] else 0.0

  train_agent(agent, "task=arithmetic", "training.max_steps=30")

A step: G episodes of each of P examples, rewards, advantages within each group, one update.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunix_lite.agents.batch import EpisodeGroups, check_algorithm
from tunix_lite.agents.endpoint import Endpoint
from tunix_lite.agents.episodes import OpenEpisodes
from tunix_lite.agents.running import Agent, AgentConfig, Runner
from tunix_lite.commands.program import compose
from tunix_lite.config import RunConfig
from tunix_lite.errors import ConfigError, RunFailed, error_context
from tunix_lite.rollout.live import DrawSettings
from tunix_lite.runs.setup import find_parts
from tunix_lite.serving.calls import Limits
from tunix_lite.tasks.task import TaskConfig
from tunix_lite.trainer.client import TrainingClient
from tunix_lite.trainer.sampling import seed_of_call
from tunix_lite.trainer.trainer import Trainer
from tunix_lite.types import Metrics


class AgentTrainer:
    """An agent, its endpoint, and the weights that learn from its episodes.

    Example: with AgentTrainer(agent, "model=bundled") as trainer: trainer.step(0).
    """

    def __init__(
        self,
        agent: Agent,
        *settings: str | RunConfig,
        config: AgentConfig | None = None,
        reward: Callable[[str, dict], float] | None = None,
    ):
        """settings: as on the command line of run_training.py, or one RunConfig. Read are model,
        algorithm, task (examples and rewards), generation, optimizer, training.max_steps and
        prompts_per_step, evaluation, seed, and what Trainer reads.

        agent: (client, example) -> the reward; or a text, which `reward` grades (None: the rewards
        of the task); or None, if a program sends it to /episodes/ID/reward. Raises ConfigError.
        """
        self.config = config or AgentConfig()
        is_made = len(settings) == 1 and isinstance(settings[0], RunConfig)
        self.run = settings[0] if is_made else compose(list(settings))
        check_algorithm(self.run.algorithm)
        generation = self.run.generation
        if generation.temperature <= 0:
            raise ConfigError("generation.temperature=0: all episodes of a group would be the same")
        parts = find_parts(self.run)
        self.task = parts.task
        self.num_prompts = parts.resolved.batch.prompts
        self.num_generations = self.run.algorithm.num_generations
        self.trainer = Trainer(
            self.run,
            max_prompt_length=generation.max_prompt_length,
            max_new_tokens=generation.max_new_tokens,
        )
        lora = self.run.model.lora
        self.client: TrainingClient = self.trainer.adapter() if lora.rank else self.trainer.full()

        # The engine that agents are answered by, with the weights of now.
        engine = self.client.prepare_sampling()
        self._engine = engine
        self._limits = Limits(
            self.trainer.model_name,
            engine.spec.generation.max_prompt_length,
            engine.spec.generation.max_new_tokens,
            min(engine.spec.max_length, self.trainer.max_length),
            is_lenient=True,
        )
        tokenizer = self.trainer.tokenizer
        self.episodes = OpenEpisodes(
            tokenizer, self._limits.max_prompt_length, self.config.max_calls
        )
        self.endpoint = Endpoint(engine, tokenizer, self._limits, self.episodes)
        reward = reward or rewards_of(self.run.task)
        self._runner = Runner(agent, reward, self.episodes, self.endpoint.base_url, self.config)

    @property
    def max_steps(self) -> int:
        """training.max_steps."""
        return self.run.training.max_steps

    def collect(self, step: int) -> EpisodeGroups:
        """The episodes of update number `step` (from 0), with the weights as they are now."""
        seed = self.run.seed
        with error_context(f"step {step + 1}", RunFailed):
            examples, _ = self.task.batch(self.num_prompts, seed, step)
        repeated = [one for one in examples for _ in range(self.num_generations)]
        draw = self._draw() if self.config.own_sampling else None
        return self._held(repeated, seed_of_call(seed, step, 1), draw, self.num_generations)

    def step(self, step: int) -> Metrics:
        """One update: episodes, advantages, gradients. Returns metrics of it.

        Raises RunFailed where an agent fails and on_error=raise.
        """
        began = time.monotonic()
        groups = self.collect(step)
        with error_context(f"step {step + 1}", RunFailed):
            metrics = groups.metrics
        metrics["time/rollout"] = time.monotonic() - began
        began = time.monotonic()
        algorithm = self.run.algorithm
        shards = self.trainer.mesh.shape["fsdp"]
        for _ in range(algorithm.updates_per_rollout):
            parts = [
                self.client.forward_backward(batch, algorithm).metrics
                for batch in groups.batches(algorithm, shards)
            ]
            # All groups agree, and those are dropped: there is nothing to learn.
            if parts:
                found = self.client.optim_step(optimizer=self.run.optimizer)
                metrics |= _summed(parts) | found
        metrics["time/update"] = time.monotonic() - began
        return metrics

    def evaluate(self) -> Metrics:
        """One episode of each held-out example (evaluation.num_examples). Calls draw as the agent
        asks, with seeds of the run. A failed episode counts 0."""
        examples = self.task.held_out(self.run.evaluation.num_examples)
        groups = self._held(examples, self.run.seed, None, 1)
        groups = replace(groups, on_error="zero")
        failed = sum(bool(one.failure) for one in groups.ended)
        return {"eval/reward": groups.metrics["reward/mean"], "eval/failed": failed}

    def _held(
        self, examples: list[dict], seed: int, draw: DrawSettings | None, num_generations: int
    ) -> EpisodeGroups:
        self.client.prepare_sampling()
        opened = [
            self.episodes.open(dict(example), seed_of_call(seed, place, 0), draw)
            for place, example in enumerate(examples)
        ]
        ended = self._runner.run(opened)
        # Calls of agents that were given up end before the weights change.
        self._engine.wait_until_idle()
        return EpisodeGroups(opened, ended, num_generations, self.config.on_error)

    def _draw(self) -> DrawSettings:
        generation = self.run.generation
        return DrawSettings(
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=generation.top_k,
            min_p=generation.min_p,
        )

    def close(self) -> None:
        """Ends the endpoint and the sampler."""
        self._runner.close()
        self.endpoint.close()
        self.trainer.close()

    def __enter__(self) -> "AgentTrainer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def train_agent(
    agent: Agent,
    *settings: str | RunConfig,
    config: AgentConfig | None = None,
    reward: Callable[[str, dict], float] | None = None,
    save: str | Path | None = None,
    say: Callable[[str], None] = print,
) -> list[Metrics]:
    """Trains an agent for training.max_steps updates; returns the metrics of each.

    Arguments are those of AgentTrainer. It evaluates at the start, at the end, and every
    evaluation.interval_steps between. save: folder for the weights at the end. say: gets a line for
    each update.

    Example: train_agent(agent, "task=arithmetic", "training.max_steps=40", save="outputs/mine").
    """
    rows = []
    with AgentTrainer(agent, *settings, config=config, reward=reward) as trainer:
        evaluation = trainer.run.evaluation
        every = evaluation.interval_steps or trainer.max_steps
        if evaluation.num_examples:
            say(f"start: held-out reward {trainer.evaluate()['eval/reward']:.3f}")
        for step in range(trainer.max_steps):
            metrics = trainer.step(step)
            is_last = step + 1 == trainer.max_steps
            if evaluation.num_examples and (is_last or (step + 1) % every == 0):
                metrics |= trainer.evaluate()
            say(_line(step + 1, trainer.max_steps, metrics))
            rows.append(metrics)
        if save is not None:
            trainer.client.save(save)
    return rows


def rewards_of(task: TaskConfig) -> Callable[[str, dict], float]:
    """The weighted sum of a task's rewards, of one completion."""

    def reward(completion: str, example: dict) -> float:
        weights = task.weights(0)
        for name, one in task.rewards.items():
            if one.group:
                raise ValueError(f"task.rewards.{name} compares a group; an agent gives one text")
        return sum(
            weights[name] * float(one.fn(completion, example)) for name, one in task.rewards.items()
        )

    return reward


def _summed(parts: list[Metrics]) -> Metrics:
    """Metrics of an update out of those of its parts: sums, but for maxima and minima."""
    found = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        together = max if name.endswith("_max") else min if name.endswith("_min") else sum
        found[name] = float(together(values))
    return found


def _line(step: int, steps: int, metrics: Metrics) -> str:
    """An update in one line of the console."""
    shown = [
        f"step {step}/{steps}",
        f"reward {metrics['reward/mean']:.3f}",
        f"calls {metrics['episodes/calls']:.2f}",
        f"sequences {metrics['episodes/sequences']:.2f}",
    ]
    if failed := metrics["episodes/errors"] + metrics["episodes/timeouts"]:
        shown.append(f"failed {failed}")
    if "eval/reward" in metrics:
        shown.append(f"held-out reward {metrics['eval/reward']:.3f}")
    seconds = metrics["time/rollout"] + metrics["time/update"]
    return " | ".join([*shown, f"{seconds:.2f} s/step"])
