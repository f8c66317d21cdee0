"""Experience of an agent: a program that calls the model over HTTP, as it is, and earns rewards."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from tunix_lite.basics.errors import ConfigError, RunFailed, error_context
from tunix_lite.basics.types import Graded, Metrics, Params, TrainState, seed_of_call
from tunix_lite.inference.language_model import LanguageModel
from tunix_lite.inference.live import live_engine
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.report.statistics import avg_at_k, pass_at_k
from tunix_lite.rollout.generate import make_prepare
from tunix_lite.rollout.live import DrawSettings, LiveEngine
from tunix_lite.runs.agents.batch import EpisodeGroups
from tunix_lite.runs.agents.episodes import Episode, OpenEpisodes
from tunix_lite.runs.agents.running import Agent, AgentConfig, Runner
from tunix_lite.runs.evaluate import Evaluated
from tunix_lite.runs.experience import Experience
from tunix_lite.runs.learner import Learner
from tunix_lite.runs.session import Session
from tunix_lite.serving.app import Server
from tunix_lite.serving.calls import Limits
from tunix_lite.serving.face import ServerSettings
from tunix_lite.tasks.task import TaskConfig

# Seconds that the server may take until it listens.
_START_SECONDS = 30.0
# calls that may wait for a slot
_MOST_WAITING = 1 << 20


class _Endpoint:
    """A server on 127.0.0.1 that records the calls of episodes. `close` ends it.
    Example: endpoint.base_url(episode) is "http://127.0.0.1:41234/episodes/5f2c.../v1"."""

    def __init__(
        self, engine: LiveEngine, tokenizer: Tokenizer, limits: Limits, episodes: OpenEpisodes
    ):
        settings = ServerSettings(port=0, max_body=2**24, stop_seconds=0.0)
        self._server = Server(engine, tokenizer, limits, settings, episodes)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._address = ""
        self._failure: BaseException | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="endpoint", daemon=True)
        self._thread.start()
        # an agent that calls too early would fail, and it would look like its own fault
        if not self._is_ready.wait(_START_SECONDS) or self._failure is not None:
            raise ConfigError(f"the endpoint of the agents did not start: {self._failure}")

    def base_url(self, episode: Episode) -> str:
        """Returns the base_url of an OpenAI client for the calls of this episode."""
        return f"{self._address}/episodes/{episode.id}/v1"

    def close(self) -> None:
        """Stops the server; calls under way end with an error."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        def ready(address: str) -> None:
            self._address = address
            self._is_ready.set()

        try:
            self._loop.run_until_complete(self._server.run(ready, self._stop))
        except BaseException as error:
            self._failure = error
            self._is_ready.set()


class AgentExperience:
    """Episodes are run once in algorithm.updates_per_rollout updates, with the current weights: G
    of each of P examples. See ExperienceSource."""

    def __init__(
        self,
        session: Session,
        learner: Learner,
        agent: Agent,
        reward: Callable[[str, dict], float] | None,
        config: AgentConfig,
    ):
        """reward: (completion, example) -> number; None: the rewards of the task."""
        run = session.run
        resolved = learner.resolved
        generation = run.generation
        self._session = session
        self._algorithm = run.algorithm
        self._seed = run.seed
        self._config = config
        self._rows = session.parts.rows
        self._tokenizer = session.parts.model.tokenizer
        # An agent that asks for temperature 0 would say the same in each episode.
        names = ("temperature", "top_p", "top_k", "min_p")
        self._own_draw = DrawSettings(**{name: getattr(generation, name) for name in names})

        # The engine that agents are answered by; `_ended` gives it the weights of now.
        model = LanguageModel(session.parts.model, None, session.parts.mesh, resolved.dtype)
        how = (model.cfg, model.dtype, run.rollout.weights != "sharded")
        self._prepare = make_prepare(*how)
        prepared = self._prepare(learner.acting_params(session.state))
        self._engine = live_engine(model, generation, run.rollout, _MOST_WAITING, prepared)
        session.closing.callback(self._engine.close)

        # Whom agents talk to, and who runs them.
        spec = self._engine.spec
        limits = Limits(
            run.model.weights,
            spec.generation.max_prompt_length,
            spec.generation.max_new_tokens,
            min(spec.max_length, model.cfg.max_positions),
            is_lenient=True,
        )
        longest = limits.max_prompt_length
        self._episodes = OpenEpisodes(self._tokenizer, longest, config.max_calls)
        endpoint = _Endpoint(self._engine, self._tokenizer, limits, self._episodes)
        session.closing.callback(endpoint.close)
        reward = reward or _rewards_of(run.task)
        self._runner = Runner(agent, reward, self._episodes, endpoint.base_url, config)
        session.closing.callback(self._runner.close)
        self._held: Experience | None = None

    def compile_ahead(self, state: TrainState) -> None:
        """See ExperienceSource. Programs of longer prompts compile at the first that comes."""
        self._session.console.busy("compiling the sampler…")
        self._engine.warm_up()
        self._rest()

    def take(self, step: int, params: Params) -> Experience:
        """See ExperienceSource. Raises RunFailed where an agent fails and on_error=raise."""
        updates = self._algorithm.updates_per_rollout
        update = step % updates
        if update:
            left = updates - update
            return replace(self._held, metrics={}, updates_left=left, is_fresh=False)

        # Episodes, their rewards and their advantages.
        G = self._algorithm.num_generations
        with error_context(f"step {step + 1}", RunFailed):
            examples = self._session.task.batch(
                self._session.parts.batch.prompts, self._seed, step // updates
            )
            examples = [one for one in examples for _ in range(G)]
            seed = seed_of_call(self._seed, step, 1)
            groups = self._ended(params, examples, seed, self._own_draw, G)
            graded = self._graded(groups, examples)
            batch = groups.batch(self._algorithm)

        # There are more sequences than episodes where an agent breaks its conversations; from the
        # first such step on there are twice as many rows, which is a program more.
        layout = self._rows
        shards = self._session.parts.mesh.shape["fsdp"]
        while (
            len(batch.tokens) > layout.num_micro_batches * layout.rows_per_micro_batch * shards
        ):
            layout = replace(layout, num_micro_batches=2 * layout.num_micro_batches)
        self._rows = layout
        with error_context(f"step {step + 1}", RunFailed):
            rows, _ = layout.lay_out(batch)
        self._held = Experience(rows, batch, graded.metrics, graded, updates, True)
        return self._held

    def beside_update(self) -> Metrics:
        """See ExperienceSource: agents ask for nothing while the weights change."""
        return {}

    def evaluate(self, params: Params, patience: float) -> Evaluated:
        """See ExperienceSource. An episode of each held-out example, drawn as the agent asks, then
        num_samples of each at evaluation.temperature. A failed episode counts 0, and one is right
        if its reward is 1 or more."""
        settings = self._session.run.evaluation
        held_out = self._session.task.held_out(settings.num_examples)

        def graded(seed: int, draw: DrawSettings | None, count: int) -> Graded:
            examples = [one for one in held_out for _ in range(count)]
            with error_context("evaluation", RunFailed):
                groups = self._ended(params, examples, seed, draw, count)
                return self._graded(replace(groups, on_error="zero"), examples)

        # no draw of ours: an agent asks for the temperature that it would use
        greedy = graded(self._seed, None, 1)
        metrics = {
            "eval/accuracy": float(np.mean(greedy.correct)),
            "eval/reward": greedy.metrics["reward/mean"],
            "eval/failed": sum(map(bool, greedy.failures)),
        }
        if not (k := settings.num_samples):
            return Evaluated(metrics, greedy)
        sampled = graded(self._seed + 1, DrawSettings(temperature=settings.temperature), k)
        correct_EN = sampled.correct.reshape(-1, k)
        metrics[f"eval/avg_at_{k}"] = float(avg_at_k(correct_EN).mean())
        metrics[f"eval/pass_at_{k}"] = float(pass_at_k(correct_EN, k).mean())
        metrics["eval/sampled_reward"] = sampled.metrics["reward/mean"]
        return Evaluated(metrics, greedy, sampled)

    def _ended(
        self,
        params: Params,
        examples: list[dict],
        seed: int,
        draw: DrawSettings | None,
        num_generations: int,
    ) -> EpisodeGroups:
        """An episode of each example, with these weights, until all have ended."""
        self._engine.set_params(self._prepare(params))
        opened = [
            # a copy of its own: an agent may change what it gets
            self._episodes.open(dict(example), seed_of_call(seed, place, 0), draw)
            for place, example in enumerate(examples)
        ]
        try:
            ended = self._runner.run(opened, self._session.stopping.check_between_chunks)
        finally:
            self._rest()
        return EpisodeGroups(opened, ended, num_generations, self._config.on_error)

    def _rest(self) -> None:
        """Waits for calls of agents that were given up, so that they end before the weights change.
        The update needs the memory of the engine's copy of the weights."""
        self._engine.wait_until_idle()
        self._engine.set_params(None)

    def _graded(self, groups: EpisodeGroups, examples: list[dict]) -> Graded:
        """Returns the episodes as samples/*.jsonl holds them, and their metrics."""
        rewards_B = groups.rewards_PG.reshape(-1)
        ended = groups.ended
        # What the first call of each read, and the text that follows; "" for no calls.
        decode = partial(self._tokenizer.decode, skip_special=False)
        prompts = []
        completions = []
        for episode in groups.episodes:
            prompt, *rest = [one.tokens for one in episode.sequences] or [[]]
            if episode.sequences:
                is_sampled = episode.sequences[0].is_sampled
                begin = is_sampled.index(True) if any(is_sampled) else len(prompt)
                rest = [prompt[begin:], *rest]
                prompt = prompt[:begin]
            prompts.append(self._tokenizer.decode(prompt))
            completions.append("\n\n".join(map(decode, rest)))
        return Graded(
            prompts=prompts,
            completions=completions,
            rewards=rewards_B,
            correct=np.nan_to_num(rewards_B) >= 1,
            extracted=[
                f"reward {one.reward:g}" if one.reward is not None else None for one in ended
            ],
            metrics=groups.metrics,
            dropped=np.isnan(rewards_B),
            examples=examples,
            num_generations=groups.num_generations,
            failures=[{"agent": one.failure} if one.failure else {} for one in ended],
        )


def _rewards_of(task: TaskConfig) -> Callable[[str, dict], float]:
    """The weighted sum of a task's rewards, of one completion."""

    def reward(completion: str, example: dict) -> float:
        weights = task.weights
        for name, one in task.rewards.items():
            if one.group:
                raise ValueError(
                    f"task.rewards.{name} compares a group; an agent gives one text"
                )
        return sum(
            weights[name] * float(one.fn(completion, example))
            for name, one in task.rewards.items()
        )

    return reward
