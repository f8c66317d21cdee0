"""A model in the hand: load it, let it generate and score, export it. What notebooks and the
commands use.

model = load("outputs/latest")            # or "bundled", a folder in Hugging Face layout, a name on
the hub print(model.generate("What is 12 + 7?")[0].text)
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import jax
import numpy as np

from tunix_lite.checkpoint import Checkpoints
from tunix_lite.config import RunConfig, build
from tunix_lite.errors import ConfigError, error_context
from tunix_lite.files.untrusted import as_path, check_settings
from tunix_lite.learner.policy import DTYPES, token_logprobs
from tunix_lite.models import source, weights
from tunix_lite.models.decoder import Architecture
from tunix_lite.models.families import FAMILIES
from tunix_lite.models.lora import LoraConfig, acting_params, check_targets, merge
from tunix_lite.models.source import FoundModel, ModelConfig
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.parallel.mesh import MeshShape, make_mesh, put
from tunix_lite.plain_text import shown
from tunix_lite.rollout import memory
from tunix_lite.rollout.engine import make_sampler
from tunix_lite.rollout.requests import Request
from tunix_lite.rollout.scheduler import next_power_of_two
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig, round_up_to_shards
from tunix_lite.seeds import check_seed
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.types import Params

# prompts are padded to a multiple of it, so that few lengths compile
WIDTH = 64
# tokens between two looks at a completion that streams to somebody
STEPS_PER_LOOK = 4

# as conf/generation/long
LONG = GenerationConfig(max_prompt_length=2048, max_new_tokens=512, temperature=0.7, top_p=0.95)

# a user message, or a conversation of {"role": ..., "content": ...}
Prompt = str | list[dict]


@dataclass(frozen=True)
class Completion:
    """What the model said to one prompt."""

    prompt: int  # index of the prompt that it answers
    generation: int  # which of its completions
    text: str
    tokens: list[int]
    logprobs: list[float]  # of each token, under the distribution that it was drawn from
    full_logprobs: list[float]  # under softmax(logits / temperature), nothing cut off
    finish_reason: (
        # eos: an end-of-sequence token; stop: a stop text or token; length: no room left
        str
    )
    # from the start until its first tokens were seen, and until it had ended
    seconds: tuple[float, float]

    @property
    def finished(self) -> bool:
        """Whether it ended by itself."""
        return self.finish_reason != "length"


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A loaded model on its mesh. Made by `load`."""

    source: FoundModel
    params: Params  # what acts: all weights, or a base with its adapters acting_params
    mesh: jax.sharding.Mesh
    dtype: type  # of the computation
    run: Path | None = None  # the run that trained it
    step: int | None = None  # and the checkpoint of that run
    was_lora: LoraConfig | None = None  # of a merged model: the adapters that are in its weights

    @property
    def cfg(self) -> Architecture:
        return self.source.cfg

    @property
    def tokenizer(self) -> Tokenizer:
        return self.source.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        generation: GenerationConfig = LONG,
        num_generations: int = 1,
        seed: int = 0,
        batch_size: int = 64,
        max_new_tokens: int | Sequence[int] | None = None,
        rollout: RolloutConfig | None = None,
    ) -> list[Completion]:
        """Completions of each prompt, num_generations of the first, then of the second, and so on.

        `batch_size` sequences are decoded at a time, unless rollout.num_slots says otherwise; it
        changes nothing but memory and speed. max_new_tokens, one for all prompts or for each, is at
        most generation's. A completion ends when the model or a stop text ends it, after
        max_new_tokens, or where the longest prompt and it fill cfg.max_positions. Raises ValueError
        for no prompts, and for a prompt that is empty; and, if generation.long_prompts is error,
        for one longer than generation.max_prompt_length. Dropped prompts have no completions.
        """
        asked = _listed(prompts)
        settings = RolloutConfig() if rollout is None else rollout
        settings = replace(settings, num_slots=settings.num_slots or batch_size)
        if isinstance(max_new_tokens, int):
            max_new_tokens = [max_new_tokens] * len(asked)
        if max_new_tokens is not None and len(max_new_tokens) != len(asked):
            raise ValueError(
                f"max_new_tokens has {len(max_new_tokens)} entries for {len(asked)} prompts"
            )
        for limit in max_new_tokens or ():
            if not isinstance(limit, int) or not 1 <= limit <= generation.max_new_tokens:
                raise ValueError(
                    f"max_new_tokens={limit!r}; it is 1 to "
                    f"generation.max_new_tokens={generation.max_new_tokens}"
                )
        ended: list[Completion] = []
        for answers in self._sample(
            asked, generation, num_generations, seed, settings, max_new_tokens
        ):
            ended += [self._completion(answer) for answer in answers if answer.reason is not None]
        return sorted(ended, key=lambda completion: (completion.prompt, completion.generation))

    def stream(
        self,
        prompt: Prompt,
        generation: GenerationConfig = LONG,
        seed: int = 0,
        rollout: RolloutConfig | None = None,
    ) -> Iterator[str]:
        """The text of one completion, piece by piece as it is drawn; together the text that
        `generate` returns."""
        settings = replace(
            RolloutConfig() if rollout is None else rollout, num_slots=1, chunk=STEPS_PER_LOOK
        )
        text, seen = self.tokenizer.stream(), 0
        for (answer,) in self._sample([prompt], generation, 1, seed, settings):
            yield text.feed(answer.tokens[seen:])
            seen = len(answer.tokens)
        yield text.end()

    def _sample(
        self,
        asked: list[Prompt],
        generation,
        num_generations: int,
        seed: int,
        rollout: RolloutConfig,
        most=None,
    ) -> Iterator[list[Request]]:
        if num_generations < 1:
            raise ValueError(f"num_generations={num_generations} must be at least 1")
        tokens = self._tokens(asked, generation)
        longest = max(map(len, tokens.values()))
        width = -(-longest // WIDTH) * WIDTH
        new = min(generation.max_new_tokens, self.cfg.max_positions - longest)
        generation = replace(generation, max_prompt_length=width, max_new_tokens=new)
        slots = min(rollout.num_slots, next_power_of_two(len(tokens) * num_generations))
        limits = (
            None
            if most is None
            else [min(most[i], new) for i in tokens for _ in range(num_generations)]
        )
        with jax.set_mesh(self.mesh):
            slots = round_up_to_shards(slots, self.mesh.shape["fsdp"])
            chosen = (
                self.cfg,
                self.dtype,
                generation,
                rollout,
                slots,
                [(len(tokens), num_generations)],
            )
            weights, _ = memory.choose_weights(self.params, *chosen)
            rollout = replace(rollout, num_slots=slots, weights=weights)
            sample = _sampler(
                self.cfg,
                generation,
                self.tokenizer.eos_ids,
                self.tokenizer.pad_id,
                self.dtype,
                rollout,
            )
        key, options = (
            jax.random.key(check_seed(seed)),
            {"limits": limits, "tokenizer": self.tokenizer},
        )
        steps = sample(
            self.params, [*tokens.values()], key, num_generations, indices=[*tokens], **options
        )
        while True:
            # for each step anew: whoever asks for the next one may have set another
            with jax.set_mesh(self.mesh):
                answers = next(steps, None)
            if answers is None:
                return
            yield answers

    def _completion(self, answer: Request) -> Completion:
        return Completion(
            answer.index,
            answer.generation,
            self.tokenizer.decode(answer.tokens),
            answer.tokens,
            answer.logprobs,
            answer.full_logprobs,
            answer.reason,
            (answer.began, answer.ended),
        )

    def score(
        self, prompts: Prompt | Sequence[Prompt], completions: str | Sequence[str]
    ) -> list[np.ndarray]:
        """log p of each token of each completion, the end of the turn included, at temperature 1;
        float32 [T] each."""
        asked, answers = (
            _listed(prompts),
            [completions] if isinstance(completions, str) else list(completions),
        )
        if len(asked) != len(answers):
            raise ValueError(
                f"{len(asked)} prompts and {len(answers)} completions; there must be as many"
            )
        before = [self.tokenizer.prompt(prompt) for prompt in asked]
        after = [self.tokenizer.demonstration(prompt, text) for prompt, text in zip(asked, answers)]
        whole = [b + a for b, a in zip(before, after)]
        self._check_length(max(map(len, whole), default=0))
        width = -(-max(map(len, whole), default=1) // WIDTH) * WIDTH
        scores = []
        with jax.set_mesh(self.mesh):
            for ids, start, count in zip(whole, map(len, before), map(len, after)):
                tokens, mask = _padded([ids], width)
                logprobs = np.asarray(_score(self.cfg, self.dtype)(self.params, tokens, mask))[0]
                scores.append(logprobs[width - len(ids) :][start : start + count])
        return scores

    def merged(self) -> "LanguageModel":
        """The same model in plain weights of its compute dtype: it samples faster and has no
        adapters any more."""
        with jax.set_mesh(self.mesh):
            params = merge(self.params, self.cfg, self.dtype)
        return replace(
            self, params=params, source=replace(self.source, lora=None), was_lora=self.source.lora
        )

    def _tokens(self, asked: list[Prompt], generation: GenerationConfig) -> dict[int, list[int]]:
        """The tokens of each prompt, by its index; what is too long treated as
        generation.long_prompts says."""
        tokens, longest = {}, generation.max_prompt_length
        for i, ids in enumerate(self.tokenizer.prompt(prompt) for prompt in asked):
            if not ids or (len(ids) > longest and generation.long_prompts == "error"):
                raise ValueError(
                    f"prompt {i + 1} of {len(asked)} has {len(ids)} tokens; it takes 1 to "
                    f"generation.max_prompt_length={longest}"
                )
            if len(ids) <= longest or generation.long_prompts == "truncate":
                tokens[i] = ids[-longest:]
        if not tokens and asked:
            raise ValueError(
                f"all {len(asked)} prompts are longer than generation.max_prompt_length={longest}: "
                "dropped"
            )
        if not tokens:
            raise ValueError("there are no prompts to continue")
        self._check_length(max(map(len, tokens.values())) + 1)
        return tokens

    def _check_length(self, tokens: int) -> None:
        if tokens > self.cfg.max_positions:
            raise ValueError(
                f"a sequence of {tokens} tokens is more than the model was made for: "
                f"{self.cfg.max_positions}"
            )


# compiled code is kept with the function that it belongs to
_sampler = cache(make_sampler)


@cache
def _score(cfg: Architecture, dtype):
    return jax.jit(partial(token_logprobs, cfg=cfg, dtype=dtype))


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list; a conversation, a list of dicts, is one."""
    is_one = isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], dict))
    return [prompts] if is_one else list(prompts)


def _padded(rows: list[list[int]], width: int) -> tuple[jax.Array, jax.Array]:
    """Tokens and their mask, [B, width], each row padded on the left."""
    tokens = np.zeros((len(rows), width), np.int32)
    mask = np.zeros((len(rows), width), bool)
    for i, ids in enumerate(rows):
        tokens[i, width - len(ids) :], mask[i, width - len(ids) :] = ids, True
    return put(tokens, "batch", "seq"), put(mask, "batch", "seq")


# ---- loading


def load(
    model: str | Path | ModelConfig | RunConfig = "bundled",
    *,
    step: int | None = None,
    mesh_shape: MeshShape | None = None,
    dtype: str = "fp32",
    family: str | None = None,
) -> LanguageModel:
    """A model to talk to: "bundled", a run's folder, a folder in Hugging Face layout, a hub name,
    or settings.

    Of a run: what it trained, as of checkpoint `step` (the newest if None). mesh_shape: [[fsdp,
    tp], ["fsdp", "tp"]]; None: all devices, over fsdp, or as the settings say. dtype: fp32 or bf16,
    of the computation. family: as the setting model.family; a family of your own, module.NAME, is
    imported if it is named here, and not because a folder names it. Raises ConfigError.
    """
    run, seed = None, 0
    if isinstance(model, RunConfig):
        model, seed = model.model, model.seed
    elif not isinstance(model, ModelConfig):
        with error_context("model"):
            folder = as_path(model)
        if (folder / RunDir.MODEL).is_file():
            run = folder
            settings, seed = run_settings(run, family)
            model = build(ModelConfig, settings | {"mesh_shape": ModelConfig().mesh_shape}, "model")
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
    model: ModelConfig, run: Path | None, step: int | None, dtype: str, seed: int
) -> LanguageModel:
    """The model of these settings; with `run`, its trained weights from that run's checkpoint.
    Raises ConfigError."""
    with error_context(""):
        check_seed(seed)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}; it is one of {', '.join(DTYPES)}")
    # the messages begin with the setting
    with error_context(""):
        found = source.locate(model)
    with error_context("model.mesh_shape"):
        mesh = make_mesh(model.mesh_shape)
        source.check_mesh(found, mesh)
    with error_context("model"):
        check_memory(found, mesh)
    # else the checkpoint has all the weights
    if run is None or found.lora is not None:
        with error_context(""):
            found = source.download(found)
    with jax.set_mesh(mesh):
        if run is None:
            with error_context("model.weights"):
                if found.lora is None:
                    frozen, params = None, source.load_base(found, seed, dtype)
                else:
                    frozen, params = source.load_weights(found, seed)
        else:
            trained = source.weight_tables(found)[1]
            with error_context("checkpoint"):
                step, params = Checkpoints(RunDir(run).checkpoints).restore_params(
                    weights.shapes(trained), step
                )
            with error_context("model.weights"):
                frozen = (
                    None if found.lora is None else source.load_base(found, seed, found.lora.base)
                )
        acting = acting_params(frozen, params, found.lora)
    return LanguageModel(found, acting, mesh, DTYPES[dtype], run, step)


def check_memory(found: FoundModel, mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError if this process has less memory than its share of the weights: a folder may
    say any size."""
    tables = [table for table in source.weight_tables(found) if table is not None]
    devices = mesh.local_devices
    needed = sum(map(weights.num_bytes, tables)) * len(devices) // mesh.size
    if devices[0].platform == "cpu":
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
        there = None if None in limits else sum(limits)
    if there is not None and needed > there:
        raise ValueError(
            f"its weights take {needed / 1e9:,.1f} GB here, and there are {there / 1e9:,.1f} GB"
        )


def run_settings(run: Path, family: str | None = None) -> tuple[dict, int]:
    """The `model` settings of a run, and its seed. `family`: what the user says that it is, in
    place of the folder.

    A folder is data: nothing that it names is imported. Raises ConfigError if it is not that of a
    run, or if its settings cannot be, with the file and the key.
    """
    with error_context("checkpoint"):
        file = as_path(run) / RunDir.MODEL
        said = RunDir(file.parent).read_model()
        settings = said["model"]
        check_settings(settings, file, "model")
        if family is not None:
            settings = settings | {"family": family}
        named = settings.get("family")
        if isinstance(named, str) and family is None and named not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ValueError(
                f"{file}: model.family is {shown(named)}, none of {known}, and a folder does not "
                "say what to import. "
                f"If it is yours, say so yourself: model.family={shown(named)[1:-1]} (in Python "
                "load(..., family=...))"
            )
        lora = settings.get("lora")
        if isinstance(lora, dict) and isinstance(lora.get("targets"), str):
            with error_context(f"{file}: model.lora"):
                check_targets(lora["targets"])
        with prefix_with_file(file):
            build(ModelConfig, settings | {"mesh_shape": ModelConfig().mesh_shape}, "model")
            check_seed(said["seed"])
    return settings, said["seed"]


@contextlib.contextmanager
def prefix_with_file(file: Path) -> Iterator[None]:
    """Puts the file before a message that begins with a setting."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
