"""Completions that go on over an update: a rollout ends before they do, and the next one continues
them with the new weights.

Nothing of a cache is kept. A completion that goes on is read again, prompt and tokens so far, with
the weights that draw its next token; so a run that is resumed from tokens alone draws the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tunix_lite.models.architecture import Architecture
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.parallel.mesh import axis_size
from tunix_lite.rollout.compile_ahead import RolloutSize, compile_rollout
from tunix_lite.rollout.engine import (
    RolloutArrays,
    check_kernels,
    make_prepare,
    sampler_spec,
)
from tunix_lite.rollout.programs import (
    Programs,
    make_programs,
)
from tunix_lite.rollout.requests import Request, StopCriteria, check_prompts, stop_text_end
from tunix_lite.rollout.reread import (
    RereadPrograms,
    compile_reread,
    make_reread_programs,
    read_again,
)
from tunix_lite.rollout.scheduler import (
    RolloutScheduler,
    padded_width,
    prompt_blocks,
    prompt_widths,
)
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.types import FINISH, Metrics, Params, Prompts, Rollout


@dataclass(frozen=True)
class OpenCompletion:
    """A completion before an update takes it: it waits for a slot, is under way, or has ended.

    Example: OpenCompletion(step=3, prompt=0, generation=1) waits for a slot; its tokens [12, 7]
    with versions [3, 4] were drawn before and after update 4.
    """

    # the update, from 0, for which its prompt was drawn: its random key follows from it
    step: int
    # the place of its prompt among those of the step
    prompt: int
    generation: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    full_logprobs: tuple[float, ...] = ()
    # updates made before each token was drawn
    versions: tuple[int, ...] = ()
    # one of types.FINISH; None: it has not ended
    reason: str | None = None

    @property
    def group(self) -> tuple[int, int]:
        """Names the group of completions that it is compared with."""
        return self.step, self.prompt

    @property
    def is_under_way(self) -> bool:
        """Returns whether it has begun and not ended."""
        return bool(self.tokens) and self.reason is None

    def as_request(self, place: int, limit: int, criteria: StopCriteria) -> Request:
        """The request that continues it; place: of its prompt, for messages."""
        request = Request(place, self.prompt, self.generation, limit)
        # the text so far, in which the next tokens may complete a stop text
        stop_text_end(request, list(self.tokens), criteria)
        request.tokens = list(self.tokens)
        request.logprobs = list(self.logprobs)
        request.full_logprobs = list(self.full_logprobs)
        return request

    def after(self, request: Request, version: int) -> "OpenCompletion":
        """The completion as the request has left it; its new tokens are of this version."""
        new = len(request.tokens) - len(self.tokens)
        return replace(
            self,
            tokens=tuple(request.tokens),
            logprobs=tuple(request.logprobs),
            full_logprobs=tuple(request.full_logprobs),
            versions=self.versions + (version,) * new,
            reason=request.reason,
        )


@dataclass(frozen=True)
class CarrySampler:
    """Continues completions until enough have ended.

    Example: `make_carry_sampler(cfg, generation, eos_ids, pad_id)`, then `go_on` once an update.
    """

    generation: GenerationConfig
    rollout: RolloutConfig
    programs: Programs
    reread: RereadPrograms
    prepare: Callable
    criteria: StopCriteria

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
        which have ended) is asked after every chunk and ends the rollout; what chunks that were
        started by then draw is kept. usual: (P, G) of an update. between_chunks: as in
        `make_generate`.
        """
        has_ended = np.array([one.reason is not None for one in completions])
        if is_enough(has_ended):
            return list(completions), _nothing_sampled()
        order = order_of_requests(completions, prompts, self.generation.max_prompt_length)
        in_order = [completions[i] for i in order]
        every_prompt = [prompts[one.group] for one in in_order]
        cfg = self.programs.spec.cfg
        check_kernels(self.programs.spec, self.rollout, params)
        check_prompts(every_prompt, cfg, self.generation, self.criteria.tokenizer)
        requests = self._requests(in_order)

        # As in make_sampler from here on, but that the first slots are not empty.
        key = _keys(seed_key, [one.step for one in in_order])
        most = len(completions)
        scheduler = self._scheduler(params, in_order, every_prompt, requests, key, usual, most)
        scheduler.fill_slots()
        next_chunk = scheduler.next_chunk
        while (decoded := next_chunk()) is not None:
            scheduler.absorb(decoded, self.criteria, every_prompt)
            has_ended[order] = [request.reason is not None for request in requests]
            if is_enough(has_ended):
                next_chunk = scheduler.next_started_chunk
            if between_chunks is not None:
                between_chunks()

        after = list(completions)
        for i, one, request in zip(order, in_order, requests):
            after[i] = one.after(request, version)
        return after, scheduler.metrics() | reread_metrics(in_order, every_prompt)

    def _requests(self, in_order: Sequence[OpenCompletion]) -> list[Request]:
        limit = self.generation.max_new_tokens
        return [one.as_request(i, limit, self.criteria) for i, one in enumerate(in_order)]

    def _scheduler(
        self,
        params: Params,
        in_order: Sequence[OpenCompletion],
        every_prompt: Prompts,
        requests: list[Request],
        key: jax.Array,
        usual: tuple[int, int],
        most: int,
    ) -> RolloutScheduler:
        """Builds the scheduler. Completions under way come first: they are read whole. The prompts
        of the others are read once for their group."""
        num_carried = sum(one.is_under_way for one in in_order)
        counts: dict[tuple[int, int], int] = {}
        of_groups = []
        for one, prompt in zip(in_order[num_carried:], every_prompt[num_carried:]):
            if one.group not in counts:
                of_groups.append(prompt)
            counts[one.group] = counts.get(one.group, 0) + 1

        num_slots = self.rollout.slots(usual[0] * usual[1], axis_size("fsdp"))
        blocks = prompt_blocks(
            self.programs.spec,
            of_groups,
            usual[1],
            num_slots,
            requests_of=[*counts.values()],
            usual=usual[0],
        )
        weights = self.prepare(params)
        carried = every_prompt[:num_carried]
        read = partial(read_again, self.reread, weights, carried, requests, num_slots)
        temperature = np.float32(self.generation.temperature)
        return RolloutScheduler(
            self.programs,
            weights,
            temperature,
            requests,
            blocks,
            num_slots,
            key,
            carried,
            read,
            most,
        )

    def compile_ahead(
        self, params: Params, num_prompts: int, num_generations: int, num_in_flight: int
    ) -> None:
        """Compiles every program that `go_on` can need. num_in_flight: the completions that it
        gets."""
        num_slots = self.rollout.slots(num_prompts * num_generations, axis_size("fsdp"))
        temperature = self.generation.temperature
        size = RolloutSize(num_prompts, num_generations, num_slots, temperature, num_in_flight)
        weights = self.prepare(params)
        queue, slots = compile_rollout(self.programs, weights, size)
        if num_in_flight > num_prompts * num_generations:
            compile_reread(self.reread, slots, queue, weights)


def make_carry_sampler(
    cfg: Architecture,
    generation: GenerationConfig,
    eos_ids: tuple[int, ...],
    pad_id: int,
    dtype: DTypeLike = jnp.float32,
    rollout: RolloutConfig | None = None,
    tokenizer: Tokenizer | None = None,
    tp_reduce_dtype: DTypeLike = jnp.float32,
) -> CarrySampler:
    """Builds the sampler from the arguments of make_generate."""
    rollout = RolloutConfig() if rollout is None else rollout
    generation.check_fits(cfg.vocab_size)
    spec, ends = sampler_spec(cfg, generation, eos_ids, pad_id, dtype, rollout, tp_reduce_dtype)
    programs = make_programs(spec)
    criteria = StopCriteria(ends, generation.stop, tokenizer)
    criteria.check()
    prepare = make_prepare(cfg, dtype, rollout.weights != "sharded")
    reread = make_reread_programs(programs)
    return CarrySampler(generation, rollout, programs, reread, prepare, criteria)


def order_of_requests(
    completions: Sequence[OpenCompletion],
    prompts: Mapping[tuple[int, int], Sequence[int]],
    max_prompt_length: int,
) -> list[int]:
    """Returns the indices of completions that have not ended, in the order in which slots take
    them: those under way, then by step; of one step the widest prompts first, as in a rollout by
    itself."""
    widths = prompt_widths(max_prompt_length)

    def rank(i: int) -> tuple:
        one = completions[i]
        width = padded_width(len(prompts[one.group]), widths)
        return not one.is_under_way, one.step, -width, one.prompt, one.generation

    return sorted((i for i, one in enumerate(completions) if one.reason is None), key=rank)


def _keys(seed_key: jax.Array, steps: Sequence[int]) -> jax.Array:
    """[Q] the random key of the rollout that each request is of."""
    of_step = {
        step: np.asarray(jax.random.key_data(jax.random.fold_in(seed_key, step)))
        for step in set(steps)
    }
    return jax.random.wrap_key_data(np.stack([of_step[step] for step in steps]))


def reread_metrics(completions: Sequence[OpenCompletion], prompts: Prompts) -> Metrics:
    """Counts the completions that continued, and the tokens that were read again for them."""
    lengths = [len(one.tokens) + len(p) for one, p in zip(completions, prompts) if one.is_under_way]
    return {"rollout/carried": len(lengths), "rollout/reread_tokens": sum(lengths)}


def _nothing_sampled() -> Metrics:
    """The metrics of a rollout that had enough before it began."""
    return {
        "rollout/prefill_tokens": 0,
        "rollout/decode_steps": 0,
        "rollout/slot_use": 0.0,
        "rollout/carried": 0,
        "rollout/reread_tokens": 0,
        "perf/rollout_tokens_per_second": 0.0,
        "time/rollout": 0.0,
    }


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
        request = Request(0, one.prompt, one.generation, len(one.tokens))
        request.tokens = list(one.tokens)
        request.logprobs = list(one.logprobs)
        request.full_logprobs = list(one.full_logprobs)
        request.reason = one.reason
        request.began = request.ended = 0.0
        arrays.write_completion(row, request)
        versions[row, arrays.width : arrays.width + len(one.tokens)] = one.versions
    rollout = arrays.rollout(prompts, len(completions) // len(prompts), metrics)
    return rollout.replace(versions=versions)


def completions_of(
    rollout: Rollout,
    step: int,
    version: int,
    num_generations: int,
) -> list[OpenCompletion]:
    """The completions of a whole rollout, all drawn with one version of the weights."""
    completions = []
    for row, mask in enumerate(np.asarray(rollout.completion_mask)):
        prompt, generation = divmod(row, num_generations)
        completions.append(
            OpenCompletion(
                step,
                prompt,
                generation,
                tokens=tuple(rollout.tokens[row][mask].tolist()),
                logprobs=tuple(rollout.logprobs[row][mask].tolist()),
                full_logprobs=tuple(rollout.full_logprobs[row][mask].tolist()),
                versions=(version,) * int(mask.sum()),
                reason=FINISH[rollout.finish[row]],
            )
        )
    return completions
