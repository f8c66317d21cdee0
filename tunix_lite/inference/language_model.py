"""A model outside of training: load it, generate, score. Notebooks and the commands use it."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import jax
import numpy as np

from tunix_lite.basics.errors import ConfigError, error_context
from tunix_lite.basics.plain_text import shown
from tunix_lite.basics.types import Params, check_seed
from tunix_lite.basics.untrusted import as_path, check_settings
from tunix_lite.learner.defaults import AUTO, precision
from tunix_lite.learner.policy import DTYPES, token_logprobs
from tunix_lite.models import decoder, source, weights
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.families import FAMILIES
from tunix_lite.models.lora import acting_params
from tunix_lite.models.source import FoundModel, ModelConfig
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.parallel.mesh import MeshShape, make_mesh, put
from tunix_lite.rollout.engine import next_power_of_two
from tunix_lite.rollout.generate import make_sampler
from tunix_lite.rollout.memory import SamplingMemory, choose_weights
from tunix_lite.rollout.requests import Request
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig, round_up_to_shards
from tunix_lite.settings.config import RunConfig, build
from tunix_lite.tracking.checkpoint import Checkpoints
from tunix_lite.tracking.progress import BytesProgress, StandardError
from tunix_lite.tracking.rundir import RunDir

# Prompts are padded to a multiple of this many tokens, so that few lengths are compiled.
_WIDTH = 64
# Tokens that are sampled between two pieces of a text that streams.
_STEPS_PER_LOOK = 4

# The same as conf/generation/long.yaml.
LONG = GenerationConfig(
    max_prompt_length=2048, max_new_tokens=512, temperature=0.7, top_p=0.95
)
# One completion of a prompt is the likeliest one.
GREEDY = replace(LONG, temperature=0.0)

# A user's message, or a conversation: a list of {"role": ..., "content": ...}.
Prompt = str | list[dict]


@dataclass(frozen=True)
class Completion:
    """One completion of one prompt.
    Example: `model.generate("What is 12 + 7?")[0].text` is "19"."""

    prompt: int  # the index of the prompt among those given
    # the index of this completion among those of the prompt
    generation: int
    text: str
    tokens: list[int]
    # log p of each token under the distribution that it was sampled from
    logprobs: list[float]
    # log p of each token under softmax(logits / temperature), before top_p, top_k and the like
    full_logprobs: list[float]
    # eos: an end-of-sequence token; stop: a stop text or token; length: no room left
    finish_reason: str
    # seconds from the start until its first tokens were read, and until it ended
    seconds: tuple[float, float]


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A loaded model on its mesh.
    Example: `load("outputs/latest", step=40)`."""

    source: FoundModel  # where it comes from: architecture, tokenizer, family, folder
    # its weights; those of a base hold its adapters
    params: Params
    mesh: jax.sharding.Mesh
    dtype: type  # of the computation
    # the run that trained it, and the step of the checkpoint
    run: Path | None = None
    step: int | None = None

    @property
    def cfg(self) -> Architecture:
        """The architecture of the model."""
        return self.source.cfg

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self.source.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        generation: GenerationConfig | None = None,
        num_generations: int = 1,
        seed: int = 0,
        batch_size: int = 64,
        max_new_tokens: int | Sequence[int] | None = None,
        rollout: RolloutConfig | None = None,
        on_chunk: Callable[[list[Request], list[Completion]], None] | None = None,
    ) -> list[Completion]:
        """Samples `num_generations` completions of each prompt, in the order of the prompts.
        generation: None: the likeliest completion, or several at temperature 0.7. batch_size:
        sequences decoded at a time. max_new_tokens: a limit for all prompts, or one for each.
        on_chunk(requests, ended) is called after each chunk. Raises ValueError if there is no
        prompt, or one is empty or too long."""
        prompts = _as_list(prompts)
        if generation is None:
            generation = GREEDY if num_generations == 1 else LONG
        settings = RolloutConfig() if rollout is None else rollout
        slots = settings.fixed_slots or batch_size
        # nobody learns from these completions
        settings = replace(settings, num_slots=slots, replay_routes=False)
        if isinstance(max_new_tokens, int):
            max_new_tokens = [max_new_tokens] * len(prompts)
        if max_new_tokens is not None and len(max_new_tokens) != len(prompts):
            raise ValueError(
                f"max_new_tokens has {len(max_new_tokens)} entries for {len(prompts)} prompts"
            )

        # The sampler gives all running requests after each chunk; those that have ended have a
        # reason.
        ended = []
        for requests in self._sample(
            prompts, generation, num_generations, seed, settings, max_new_tokens
        ):
            new = [
                Completion(
                    one.index,
                    one.generation,
                    self.tokenizer.decode(one.tokens),
                    one.tokens,
                    one.logprobs,
                    one.full_logprobs,
                    one.reason,
                    (one.began, one.ended),
                )
                for one in requests
                if one.reason is not None
            ]
            ended += new
            if on_chunk is not None:
                on_chunk(requests, new)
        # Completions end in any order.
        return sorted(ended, key=lambda completion: (completion.prompt, completion.generation))

    def stream(
        self,
        prompt: Prompt,
        generation: GenerationConfig = GREEDY,
        seed: int = 0,
        rollout: RolloutConfig | None = None,
    ) -> Iterator[str]:
        """Yields the text of one completion while it is sampled. Raises as `generate`."""
        settings = RolloutConfig() if rollout is None else rollout
        # small chunks, since nobody sees a token before its chunk is over
        settings = replace(settings, num_slots=1, chunk=_STEPS_PER_LOOK, replay_routes=False)
        text = self.tokenizer.stream()
        num_read = 0
        for (request,) in self._sample([prompt], generation, 1, seed, settings):
            yield text.feed(request.tokens[num_read:])
            num_read = len(request.tokens)
        yield text.end()

    def _sample(
        self,
        prompts: list[Prompt],
        generation: GenerationConfig,
        num_generations: int,
        seed: int,
        rollout: RolloutConfig,
        most: Sequence[int] | None = None,
    ) -> Iterator[list[Request]]:
        """Yields the running requests after each chunk of decode steps. most: as max_new_tokens."""
        if num_generations < 1:
            raise ValueError(f"num_generations={num_generations} must be at least 1")
        # The tokens of each prompt, by its index: cut, dropped or an error if it is too long.
        tokens = {}
        most_tokens = generation.max_prompt_length
        for i, prompt in enumerate(prompts):
            ids = self.tokenizer.prompt(prompt)
            if not ids or (len(ids) > most_tokens and generation.long_prompts == "error"):
                raise ValueError(
                    f"prompt {i + 1} of {len(prompts)} has {len(ids)} tokens; it takes 1 to "
                    f"generation.max_prompt_length={most_tokens}"
                )
            if len(ids) <= most_tokens or generation.long_prompts == "truncate":
                tokens[i] = ids[-most_tokens:]
        if not tokens:
            raise ValueError(
                f"there are no prompts to continue: {len(prompts)} are longer than "
                f"generation.max_prompt_length={most_tokens}, and dropped"
            )

        # Lengths: prompts are padded to a multiple of _WIDTH, completions fill what is left.
        longest = max(map(len, tokens.values()))
        # One token more, as at least one has to be sampled.
        self._check_length(longest + 1)
        width = -(-longest // _WIDTH) * _WIDTH
        # By the longest prompt, not by the width: padding has no positions.
        new = min(generation.max_new_tokens, self.cfg.max_positions - longest)
        generation = replace(generation, max_prompt_length=width, max_new_tokens=new)
        # Few numbers of slots, so that few programs are compiled.
        slots = min(rollout.num_slots, next_power_of_two(len(tokens) * num_generations))
        limits = None
        if most is not None:
            limits = [min(most[i], new) for i in tokens for _ in range(num_generations)]

        # The sampler, compiled once for each architecture, shape and settings.
        with jax.set_mesh(self.mesh):
            slots = round_up_to_shards(slots, self.mesh.shape["fsdp"])
            counts = [(len(tokens), num_generations)]
            how = (self.cfg, self.dtype, generation, rollout, slots, counts)
            weights, _ = choose_weights(self.params, SamplingMemory.here(*how))
            rollout = replace(rollout, num_slots=slots, weights=weights)
            sample = _sampler(
                self.cfg,
                generation,
                self.tokenizer.eos_ids,
                self.tokenizer.pad_id,
                self.dtype,
                rollout,
            )
        steps = sample(
            self.params,
            [*tokens.values()],
            jax.random.key(check_seed(seed)),
            num_generations,
            indices=[*tokens],
            limits=limits,
            tokenizer=self.tokenizer,
        )
        while True:
            # The caller may set another mesh between two steps, so it is set for each of them.
            with jax.set_mesh(self.mesh):
                requests = next(steps, None)
            if requests is None:
                return
            yield requests

    def score(
        self, prompts: Prompt | Sequence[Prompt], completions: str | Sequence[str]
    ) -> list[np.ndarray]:
        """log p of each token of each completion, at temperature 1: float32 [T] each, the end of
        the turn included. Raises ValueError if their numbers differ, or one is too long."""
        prompts = _as_list(prompts)
        texts = [completions] if isinstance(completions, str) else list(completions)
        if len(prompts) != len(texts):
            raise ValueError(
                f"{len(prompts)} prompts and {len(texts)} completions; there must be as many"
            )
        before = [self.tokenizer.prompt(prompt) for prompt in prompts]
        after = [
            self.tokenizer.demonstration(prompt, text) for prompt, text in zip(prompts, texts)
        ]
        whole = [b + a for b, a in zip(before, after)]
        self._check_length(max(map(len, whole), default=0))

        # One sequence at a time, all padded to one width, so that one program is compiled.
        width = -(-max(map(len, whole), default=1) // _WIDTH) * _WIDTH
        scores = []
        with jax.set_mesh(self.mesh):
            for ids, start, count in zip(whole, map(len, before), map(len, after)):
                padding = width - len(ids)
                tokens = put(np.array([[0] * padding + ids], np.int32), "batch", "seq")
                mask = put(np.arange(width)[None] >= padding, "batch", "seq")
                logprobs = _score(self.params, tokens, mask, cfg=self.cfg, dtype=self.dtype)
                scores.append(np.asarray(logprobs)[0, padding:][start : start + count])
        return scores

    def _check_length(self, tokens: int) -> None:
        """Raises ValueError if the model has fewer positions than this number of tokens."""
        if tokens > self.cfg.max_positions:
            raise ValueError(
                f"a sequence of {tokens} tokens is more than the model was made for: "
                f"{self.cfg.max_positions}"
            )


# jax keeps compiled programs with their function, so the functions are kept.
_sampler = cache(make_sampler)
# (params, tokens [B, T], mask [B, T], cfg, dtype) -> logprobs [B, T]
_score = jax.jit(token_logprobs, static_argnames=("cfg", "dtype"))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A conversation, which is a list of dicts, is one prompt."""
    is_one = isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], dict))
    return [prompts] if is_one else list(prompts)


# ---- loading


def load(
    model: str | Path | ModelConfig | RunConfig = "bundled",
    *,
    step: int | str | None = None,
    mesh_shape: MeshShape | None = None,
    dtype: str = AUTO,
    family: str | None = None,
) -> LanguageModel:
    """Loads a model onto the devices. Raises ConfigError. model: "bundled", the folder of a run or
    a model, a name on the hub, or settings. step: of a run, the checkpoint, or best; None: the
    newest. mesh_shape: [[fsdp, tp], ["fsdp", "tp"]]. dtype: of the computation, fp32, bf16 or auto.
    family: as model.family; one of your own must be named here.
    Example: `load("outputs/latest", step=40)`, or `load("google/gemma-3-1b-it", dtype="bf16")`."""
    # A run's seed draws its random weights again, where it has some.
    run = None
    seed = 0
    if isinstance(model, RunConfig):
        seed = model.seed
        model = model.model
    elif not isinstance(model, ModelConfig):
        with error_context("model"):
            folder = as_path(model)
        if (folder / RunDir.MODEL).is_file():
            run = folder
            settings, seed = run_settings(run, family)
            model = build(
                # The mesh of the run may not fit the devices here.
                ModelConfig,
                settings | {"mesh_shape": ModelConfig().mesh_shape},
                "model",
            )
        else:
            model = ModelConfig(weights=str(model))
    if family is not None:
        model = replace(model, family=family)
    if step is not None and run is None:
        raise ConfigError(f"step={step}: only a run has checkpoints; give a run's folder")
    if mesh_shape is not None:
        model = replace(model, mesh_shape=tuple(tuple(part) for part in mesh_shape))
    return open_model(model, run, step, dtype, seed)


def open_model(
    model: ModelConfig, run: Path | None, step: int | str | None, dtype: str, seed: int
) -> LanguageModel:
    """Loads the model of these settings; with `run`, its weights. Raises ConfigError."""
    # Find it, and check it against the devices and their memory, before anything is read.
    with error_context(""):
        check_seed(seed)
    if dtype not in (*DTYPES, AUTO):
        raise ConfigError(f"dtype={dtype!r}; it is one of {', '.join(DTYPES)}, {AUTO}")
    # These messages begin with the setting.
    with error_context(""):
        located = source.locate(model)
    with error_context("model.mesh_shape"):
        mesh = make_mesh(model.mesh_shape)
        source.check_mesh(located, mesh)
    with error_context("model"):
        # A folder may claim any size, so this is checked before anything is allocated.
        tables = [table for table in source.weight_tables(located) if table is not None]
        devices = mesh.local_devices
        needed = sum(map(weights.num_bytes, tables)) * len(devices) // mesh.size
        limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
        if devices[0].platform == "cpu":
            limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
        if None not in limits and needed > sum(limits):
            raise ValueError(
                f"its weights take {needed / 1e9:,.1f} GB here, more than the "
                f"{sum(limits) / 1e9:,.1f} GB that there are"
            )
    num_params = weights.num_params(decoder.weights(located.cfg))
    dtype = precision(dtype, num_params, mesh.devices.flat[0].platform)

    # A run without adapters has all weights in its checkpoint: nothing else is downloaded.
    if run is None or located.lora is not None:
        with error_context(""):
            located = source.download(located)

    # frozen: the base under adapters, or None. params: what is trained, or all weights.
    frozen = None
    with jax.set_mesh(mesh):
        if run is None:
            with error_context("model.weights"), _loading(located.name) as on_bytes:
                if located.lora is None:
                    params = source.load_base(located, seed, dtype, on_bytes)
                else:
                    frozen, params = source.load_weights(located, seed, on_bytes=on_bytes)
        else:
            trained = source.weight_tables(located)[1]
            checkpoints = Checkpoints(RunDir(run).checkpoints)
            newest = "its newest checkpoint" if step is None else f"step {step}"
            with error_context("checkpoint"), _loading(f"{newest} of {run}"):
                step, params = checkpoints.restore_params(weights.shapes(trained), step)
            if located.lora is not None:
                with error_context("model.weights"), _loading(located.name) as on_bytes:
                    frozen = source.load_base(located, seed, located.lora.base, on_bytes)
        acting = acting_params(frozen, params, located.lora)
    return LanguageModel(located, acting, mesh, DTYPES[dtype], run, step)


def _loading(what: str) -> BytesProgress:
    """Says to standard error what is loaded, once it takes longer than a second."""
    return BytesProgress(StandardError(), "loading", what)


def run_settings(run: Path, family: str | None = None) -> tuple[dict, int]:
    """The `model` settings of the run in this folder, and its seed. family: counts instead of the
    folder's, whose names are never imported. Raises ConfigError, with file and key."""
    with error_context("checkpoint"):
        file = as_path(run) / RunDir.MODEL
        saved = RunDir(file.parent).read_model()
        settings = saved["model"]
        check_settings(settings, file, "model")
        # The text that the run began with, whatever has become of the file or of the hub's.
        template = RunDir(file.parent.absolute()).chat_template
        if template.is_file():
            settings = settings | {"chat_template": str(template)}
        if family is not None:
            settings = settings | {"family": family}
        named = settings.get("family")
        if isinstance(named, str) and family is None and named not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ValueError(
                f"{file}: model.family is {shown(named)}, none of {known}, and a folder may not "
                "choose what is imported. "
                f"If it is yours, give it yourself: model.family={shown(named)[1:-1]} (in Python "
                "load(..., family=...))"
            )
        architecture = settings.get("architecture")
        pattern = architecture.get("pattern") if isinstance(architecture, dict) else None
        for kind in pattern if isinstance(pattern, list) else ():
            module = str(kind).rpartition(".")[0]
            # A module that is loaded already runs nothing new.
            if module and module not in sys.modules:
                raise ValueError(
                    f"{file}: model.architecture.pattern names {shown(kind)}, and a folder may not "
                    f"choose what is imported. If it is yours, load it from Python after "
                    f"`import {shown(module)[1:-1]}`"
                )
        try:
            # As in `load`: the mesh of the run may not fit here.
            build(ModelConfig, settings | {"mesh_shape": ModelConfig().mesh_shape}, "model")
            check_seed(saved["seed"])
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    return settings, saved["seed"]
