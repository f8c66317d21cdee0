"""Partial rollouts: a rollout ends before all of its completions do, and the next one reads them
again, prompt and tokens so far, and continues them with the new weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from tunix_lite.basics.types import Metrics, Params, Prompts, Rollout
from tunix_lite.rollout.engine import padded_width, prompt_widths
from tunix_lite.rollout.generate import CompletionSampler, compile_append
from tunix_lite.rollout.requests import (
    Request,
    RolloutArrays,
    StopCriteria,
    check_prompts,
    joined,
)
from tunix_lite.rollout.settings import GenerationConfig

# The metrics of a rollout that had enough before it began.
_NOTHING_SAMPLED: Metrics = {
    "rollout/prefill_tokens": 0,
    "rollout/decode_steps": 0,
    "rollout/slot_use": 0.0,
    "rollout/carried": 0,
    "rollout/reread_tokens": 0,
    "perf/rollout_tokens_per_second": 0.0,
    "time/rollout": 0.0,
}


@dataclass(frozen=True)
class OpenCompletion:
    """A completion before an update takes it: it waits for a slot, is under way, or has ended.
    Example: OpenCompletion(step=3, prompt=0, generation=1) waits for a slot."""

    # the update, from 0, for which its prompt was drawn: its random key follows from it
    step: int
    # the place of its prompt among those of the step
    prompt: int
    generation: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    full_logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()  # updates made before each token was drawn
    reason: str | None = None  # one of types.FINISH; None: it has not ended
    # [P + n, L * k] of its prompt and its tokens: the experts that each took when it was read
    # first, which every later reading takes, too; None: none are recorded
    routes: np.ndarray | None = field(default=None, compare=False)

    @property
    def group(self) -> tuple[int, int]:
        """Names the group of completions that it is compared with."""
        return self.step, self.prompt

    @property
    def is_under_way(self) -> bool:
        """Returns whether it has begun and not ended."""
        return bool(self.tokens) and self.reason is None

    @property
    def num_read(self) -> int:
        """Tokens of the prompt, if their routes are recorded; else 0."""
        return 0 if self.routes is None else len(self.routes) - len(self.tokens)

    def as_request(
        self, ids: tuple[int, ...], place: int, limit: int, criteria: StopCriteria
    ) -> Request:
        """The request that continues it. ids: its prompt; place: of its prompt, for messages."""
        request = Request(place, self.prompt, self.generation, limit, ids)
        # the text so far, in which the next tokens may complete a stop text
        criteria.end_of(request, list(self.tokens))
        request.tokens = list(self.tokens)
        request.logprobs = list(self.logprobs)
        request.full_logprobs = list(self.full_logprobs)
        if self.routes is not None:
            request.prompt_routes = (self.routes, np.s_[: self.num_read])
            request.routes = [(self.routes, np.s_[self.num_read :])]
        return request

    def after(self, request: Request, version: int) -> "OpenCompletion":
        """The completion as the request has left it; its new tokens are of this version."""
        new = len(request.tokens) - len(self.tokens)
        pieces = [request.prompt_routes, *request.routes]
        return replace(
            self,
            routes=joined(pieces) if request.routes else self.routes,
            tokens=tuple(request.tokens),
            logprobs=tuple(request.logprobs),
            full_logprobs=tuple(request.full_logprobs),
            versions=self.versions + (version,) * new,
            reason=request.reason,
        )


@dataclass(frozen=True)
class PartialSampler:
    """Continues completions until enough have ended.
    Example: `PartialSampler(make_sampler(cfg, generation, eos_ids, pad_id))`."""

    sampler: CompletionSampler

    def __post_init__(self):
        self.sampler.criteria.check()

    @property
    def generation(self) -> GenerationConfig:
        """The settings of sampling."""
        return self.sampler.programs.spec.generation

    def go_on(
        self,
        params: Params,
        completions: Sequence[OpenCompletion],
        prompts: Mapping[tuple[int, int], Sequence[int]],
        seed_key: jax.Array,
        version: int,
        is_enough: Callable[[np.ndarray], bool],
        usual: tuple[int, int],
        between_chunks: Callable[[], None] | None = None,
    ) -> tuple[list[OpenCompletion], Metrics]:
        """Samples until enough completions have ended; returns all of them, and metrics.

        prompts: by (step, prompt). seed_key: of the run. version: updates made. is_enough([N] bool,
        which have ended) is asked after every chunk. usual: (P, G) of an update. between_chunks: as
        in `make_generate`.
        """
        has_ended = np.array([one.reason is not None for one in completions])
        if is_enough(has_ended):
            return list(completions), dict(_NOTHING_SAMPLED)
        cfg = self.sampler.programs.spec.cfg
        tokenizer = self.sampler.criteria.tokenizer
        check_prompts(list(prompts.values()), cfg, self.generation, tokenizer)

        # Slots take those under way first, then by step; of one step the widest prompts first, as
        # in a rollout by itself.
        widths = prompt_widths(self.generation.max_prompt_length)

        def rank(i: int) -> tuple:
            one = completions[i]
            width = padded_width(len(prompts[one.group]), widths)
            return not one.is_under_way, one.step, -width, one.prompt, one.generation

        order = sorted(np.flatnonzero(~has_ended).tolist(), key=rank)
        in_order = [completions[i] for i in order]

        # One tuple for each group, whose completions share one reading of the prompt. Each
        # completion's key is that of a rollout of its step by itself.
        limit = self.generation.max_new_tokens
        ids = {one.group: tuple(map(int, prompts[one.group])) for one in in_order}
        # A group has one reading of its prompt, also where some of its completions begin later.
        prompt_routes = {
            one.group: (one.routes, np.s_[: one.num_read])
            for one in completions
            if one.routes is not None
        }
        requests = []
        for i, one in enumerate(in_order):
            request = one.as_request(ids[one.group], i, limit, self.sampler.criteria)
            request.prompt_routes = prompt_routes.get(one.group)
            key = jax.random.fold_in(seed_key, one.step)
            request.key_data = np.asarray(jax.random.key_data(key))
            requests.append(request)
        engine = self.sampler.engine(params, usual, most_requests=len(completions))
        lengths = [len(one.tokens) for one in in_order if one.tokens]
        if lengths:
            # Tokens are appended to slots of all columns, so that few programs are compiled.
            engine.columns = engine.column_sizes[0]
        engine.admit(requests)
        is_over = False
        # Once there are enough, no chunk is started, but those under way are read: their
        # tokens count.
        while (decoded := engine.next_chunk(starts=not is_over)) is not None:
            engine.absorb(decoded)
            has_ended[order] = [request.reason is not None for request in requests]
            is_over = is_over or is_enough(has_ended)
            if between_chunks is not None:
                between_chunks()

        after = list(completions)
        for i, one, request in zip(order, in_order, requests):
            after[i] = one.after(request, version)
        read_again = {"rollout/carried": len(lengths), "rollout/reread_tokens": sum(lengths)}
        return after, engine.metrics() | read_again

    def compile_ahead(
        self, params: Params, num_prompts: int, num_generations: int, num_in_flight: int
    ) -> None:
        """Compiles every program that `go_on` can need for so many completions."""
        size = (num_prompts, num_generations)
        engine, slots = self.sampler.compile_ahead(params, *size, most_requests=num_in_flight)
        if num_in_flight > num_prompts * num_generations:
            # Else all completions of a rollout end in it, and none is ever read again.
            compile_append(engine, slots)


def rollout_of(
    completions: Sequence[OpenCompletion],
    prompts: Prompts,
    generation: GenerationConfig,
    pad_id: int,
    metrics: Metrics,
) -> Rollout:
    """Builds the rollout of completions that have ended, P * G, those of a prompt side by side."""
    arrays = RolloutArrays.empty(len(completions), generation, pad_id)
    versions = np.full(arrays.tokens.shape, -1, np.int32)
    for row, one in enumerate(completions):
        request = one.as_request((), 0, len(one.tokens), StopCriteria({}))
        request.reason = one.reason
        # It may stem from several rollouts, each with a clock of its own.
        request.began = request.ended = 0.0
        arrays.write_completion(row, request)
        versions[row, arrays.width : arrays.width + len(one.tokens)] = one.versions
    rollout = arrays.rollout(prompts, len(completions) // len(prompts), metrics)
    return rollout.replace(versions=versions)
