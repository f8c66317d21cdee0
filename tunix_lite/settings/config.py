"""Plain values from YAML -> frozen dataclasses, and every check across settings. Knows neither
Hydra nor a device."""

import dataclasses
import inspect
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Union, get_args, get_origin, get_type_hints

from tunix_lite.algorithms.algorithm import Algorithm, Needs
from tunix_lite.algorithms.pieces import takes
from tunix_lite.basics.addresses import check_on_disk
from tunix_lite.basics.best import OF_LOSS, is_lower_better
from tunix_lite.basics.errors import (
    ConfigError,
    check_choices,
    check_numbers,
    error_context,
)
from tunix_lite.basics.imports import import_named
from tunix_lite.basics.plain_text import shown
from tunix_lite.basics.types import check_seed
from tunix_lite.basics.untrusted import TARGET
from tunix_lite.distributed.process_place import LaunchConfig
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.learner.optim import Optimizer, OptimizerConfig
from tunix_lite.learner.policy import DTYPES
from tunix_lite.learner.rows import PACKING
from tunix_lite.models.attention import IMPLEMENTATIONS
from tunix_lite.models.decoder import REMAT
from tunix_lite.models.source import ModelConfig, TeacherConfig
from tunix_lite.parallel.mesh import AXES, MeshShape, ShardingConfig, as_text
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.settings.hints import unknown_key
from tunix_lite.tasks.reward_models import ScoringModel
from tunix_lite.tasks.sources import batches_of_epoch
from tunix_lite.tasks.task import TaskConfig
from tunix_lite.workers.pool import RewardsConfig, check_portable, check_times

# ---- the settings of a run, one class per folder of conf/


# Held-out examples in an evaluation, and of text at most so many rows whose loss is measured.
EVALUATED = 256
# settings of Training that name one of a few
CHOICES = {
    "packing": (*PACKING, "auto"),
    "last_batch": ("drop", "keep"),
    "mixed_precision": (*DTYPES, "auto"),
    "remat": tuple(REMAT),
    "attention": ("auto", *IMPLEMENTATIONS),
    "expert_kernels": ("auto", "tokamax"),
    "memory_check": ("stop", "warn"),
    "reduce_dtype": ("float32", "bfloat16"),
    "tp_reduce_dtype": ("float32", "bfloat16"),
    "best_is": ("auto", "highest", "lowest"),
}


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of training: its length, the size of its batches, and what is kept."""

    # conf/training/default.yaml explains each setting
    max_steps: int | None = None
    epochs: int | None = None
    last_batch: str = "drop"
    prompts_per_step: int | None = 16
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    packing: str = "auto"
    micro_batch_tokens: int | None = None
    mixed_precision: str = "auto"
    remat: str = "none"
    scan_layers: bool = True
    attention: str = "auto"
    expert_kernels: str = "auto"
    reduce_dtype: str = "float32"
    tp_reduce_dtype: str = "float32"
    router_aux_loss_coef: float = 0.0
    router_z_loss_coef: float = 0.0
    sync_gradients_every: int = 1
    memory_check: str = "stop"
    profile_communication: bool = False
    log_interval_steps: int = 1
    save_interval_steps: int = 20
    keep_checkpoints: int = 2
    keep_best_checkpoints: int = 0
    best_metric: str = "eval/accuracy"
    best_is: str = "auto"
    early_stopping_patience: int | None = None
    max_minutes: float | None = None
    grace_seconds: float = 30.0
    max_skipped_in_a_row: int = 3
    max_sampler_gap: float | None = 0.5

    def __post_init__(self):
        check_choices(self, CHOICES)
        sizes = (
            "prompts_per_step micro_batch_size gradient_accumulation_steps micro_batch_tokens"
        )
        rule = "must be at least 1, or null to derive it"
        check_numbers(self, sizes, lambda x: x >= 1, rule)
        rule = "must be at least 1, or null to go on"
        check_numbers(self, "early_stopping_patience", lambda x: x >= 1, rule)
        if self.last_batch == "keep" and self.epochs is None:
            raise ValueError(
                "last_batch=keep is about the end of an epoch; give training.epochs"
            )
        if self.max_steps is None and self.epochs is None:
            object.__setattr__(self, "max_steps", 60)
        counts = "max_steps epochs log_interval_steps keep_checkpoints sync_gradients_every"
        rule = "must be at least 1"
        check_numbers(self, f"{counts} max_skipped_in_a_row", lambda x: x >= 1, rule)
        rule = "must be above 0, or null for no limit"
        check_numbers(self, "max_minutes max_sampler_gap", lambda x: x > 0, rule)
        rule = "must be above 0; most clusters give 30"
        check_numbers(self, "grace_seconds", lambda x: 0 < x < math.inf, rule)
        counts = "save_interval_steps keep_best_checkpoints"
        counts += " router_aux_loss_coef router_z_loss_coef"
        check_numbers(self, counts, lambda x: x >= 0, "must not be negative")
        is_lower_better(self.best_metric, self.best_is)

        # Sizes of a batch that cannot be together: rows are filled by sequences, or by tokens.
        if self.packing == "none" and self.micro_batch_tokens is not None:
            raise ValueError(
                f"micro_batch_tokens={self.micro_batch_tokens} is for packed rows, and packing is "
                "none"
            )
        if self.is_packed and (self.micro_batch_size or self.gradient_accumulation_steps):
            raise ValueError(
                f"packing={self.packing} fills rows by tokens: give micro_batch_tokens and "
                "prompts_per_step, not micro_batch_size or gradient_accumulation_steps"
            )

        # Types of sums that the type of the computation rules out.
        for name in ("reduce_dtype", "tp_reduce_dtype"):
            if getattr(self, name) == "bfloat16" and self.mixed_precision == "fp32":
                raise ValueError(
                    f"{name}=bfloat16: mixed_precision=fp32 computes in float32; set "
                    f"mixed_precision=bf16, or leave {name} at float32"
                )
        if self.reduce_dtype == "bfloat16" and self.sync_gradients_every > 1:
            raise ValueError(
                f"reduce_dtype=bfloat16 and sync_gradients_every={self.sync_gradients_every}: a "
                "shard sends its float32 sum over the mesh; leave out one of the two"
            )

    def with_steps(self, num_rows: int, batch_size: int, updates: int) -> "TrainingConfig":
        """The same with the updates that its epochs have. batch_size: rows of a batch. updates:
        that are made of it. Raises ValueError if max_steps says another number, or an epoch has no
        batch."""
        if self.max_steps is not None:
            raise ValueError(
                f"max_steps={self.max_steps} and epochs={self.epochs}: a run has one of them; "
                "training.max_steps=null counts epochs, training.epochs=null counts updates"
            )
        each = batches_of_epoch(num_rows, batch_size, self.last_batch)
        return replace(self, max_steps=self.epochs * each * updates)

    @property
    def ranks(self) -> bool:
        """Returns whether best_metric decides something: which checkpoints stay, or when to end."""
        return bool(self.keep_best_checkpoints or self.early_stopping_patience)

    @property
    def is_packed(self) -> bool:
        """Returns whether rows are packed, and packing is not still to be chosen."""
        return self.packing in ("sequences", "prefix")


@dataclass(frozen=True)
class EvaluationConfig:
    """What is measured before the first update, at every interval and after the last: completions
    of held-out prompts, one greedy one of each, and samples; and the loss of held-out rows."""

    # conf/evaluation/default.yaml explains each setting
    num_examples: int = EVALUATED
    interval_steps: int = 15
    num_samples: int = 4
    loss_examples: int | None = None
    temperature: float = 0.7

    def __post_init__(self):
        counts = "num_examples interval_steps num_samples loss_examples"
        check_numbers(self, counts, lambda x: x >= 0, "must not be negative")
        if self.temperature <= 0:
            raise ValueError(
                f"temperature={self.temperature} must be above 0: at 0 every sample is the greedy "
                "completion, which an evaluation has anyway"
            )


@dataclass(frozen=True)
class TrackingConfig:
    """Settings of what a run writes beside train.log, metrics.jsonl and checkpoints."""

    # conf/tracking/default.yaml explains each setting
    tensorboard: bool = True
    samples_interval_steps: int = 10
    samples_shown: int = 3
    console: str = "plain"
    trackers: dict[str, Callable] = field(default_factory=dict)
    observers: dict[str, Callable] = field(default_factory=dict)

    def __post_init__(self):
        counts = "samples_interval_steps samples_shown"
        check_numbers(self, counts, lambda x: x >= 0, "must not be negative")
        check_choices(self, {"console": ("plain", "quiet")})


@dataclass(frozen=True)
class ResumeConfig:
    """Settings of resuming. `resume=X` is short for `resume.folder=X`."""

    # conf/config.yaml explains each setting
    folder: str = "auto"
    force: bool = False


@dataclass(frozen=True)
class RuntimeConfig:
    """Settings of the program itself."""

    # conf/config.yaml explains each setting
    dry_run: bool = False
    program_cache: str | None = "auto"

    def __post_init__(self):
        check_on_disk("program_cache", self.program_cache)


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run depends on.
    Example: `compose(["model=gemma3_1b"]).model.weights` is "google/gemma-3-1b-it"."""

    algorithm: Any  # an algorithms.algorithm.Algorithm: has needs, batch_of and loss
    task: TaskConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: Optimizer = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    conversation: ConversationConfig = field(default_factory=ConversationConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    # conf/config.yaml explains each setting
    project_name: str = "tunix_lite"
    seed: int = 0
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self):
        check_seed(self.seed)
        _check_algorithm(self.algorithm, self.training, self.model.lora.dropout)
        if self.algorithm.needs.output != "logits":
            # a reward model samples nothing
            evaluation = replace(self.evaluation, num_examples=0)
            object.__setattr__(self, "evaluation", evaluation)
        _check_task(self)
        _check_overlap(self)

        # A run stops, saves and resumes between two rollouts, and beside a moved reference.
        training = self.training
        every = training.save_interval_steps
        updates = self.algorithm.updates_per_rollout
        # epochs are whole rollouts
        last = training.max_steps or updates
        if every % updates or last % updates:
            raise ValueError(
                f"training.save_interval_steps={every} and training.max_steps={last} "
                f"must be multiples of algorithm.updates_per_rollout={updates}: a run stops and "
                "resumes between two rollouts: training.save_interval_steps="
                f"{_multiple(every, updates)} training.max_steps={_multiple(last, updates)}"
            )
        if training.last_batch == "keep" and self.algorithm.needs.is_sampled:
            raise ValueError(
                "training.last_batch=keep is for algorithms that learn from rows, such as sft: "
                "completions are sampled for whole batches; set training.last_batch=drop"
            )

        critic = self.algorithm.needs.critic
        if critic is not None and training.max_steps and critic.warmup >= training.max_steps:
            raise ValueError(
                f"algorithm.critic_warmup={critic.warmup} of training.max_steps="
                f"{training.max_steps} updates leaves none to the policy; set "
                f"training.max_steps={_multiple(2 * critic.warmup, updates)}"
            )

        # What the algorithm's loss says of held-out rows, and what ranks checkpoints.
        evaluation = self.evaluation
        if evaluation.loss_examples and self.algorithm.needs.held_out_loss is None:
            raise ValueError(
                f"evaluation.loss_examples={evaluation.loss_examples}: the loss of "
                f"{type(self.algorithm).__name__} says nothing of held-out rows; leave it out, or "
                "take algorithm=sft, dpo or distill"
            )
        part, _, name = training.best_metric.partition("/")
        of = "loss" if name in OF_LOSS else "num"
        count = self.loss_examples if of == "loss" else evaluation.num_examples
        if training.ranks and part == "eval" and not count:
            raise ValueError(
                f"training.best_metric={training.best_metric} is not measured, as "
                f"evaluation.{of}_examples is 0 here; set it above 0, or name another metric"
            )

    @property
    def scoring_models(self) -> dict[str, ScoringModel]:
        """Returns the models that only score, by name: those of the algorithm, and as reward_NAME
        those of rewards."""
        models = {}
        lengths = self.generation
        for name, settings in self.algorithm.needs.frozen_models.items():
            prompt = settings.max_prompt_length or lengths.max_prompt_length
            longest = prompt + lengths.max_new_tokens
            models[name] = ScoringModel(f"algorithm.{name}", settings, longest)
        for name, one in self.task.reward_models.items():
            where = f"task.rewards.{name}"
            with error_context(where):
                settings = TeacherConfig(one.weights, one.family, storage=one.storage)
            models[f"reward_{name}"] = ScoringModel(where, settings, 0, one)
        return models

    @property
    def rollouts_behind(self) -> int:
        """The most rollouts that a token may be older than the update that learns from it."""
        return self.rollout.max_staleness // self.algorithm.updates_per_rollout

    def packed_as(self, packing: str) -> "RunConfig":
        """The run with this packing."""
        return replace(self, training=replace(self.training, packing=packing))

    @property
    def loss_examples(self) -> int:
        """Returns the number of held-out rows whose loss is measured; 0: of none."""
        evaluation = self.evaluation
        if self.algorithm.needs.held_out_loss is None:
            return 0
        wanted = evaluation.loss_examples
        # a start counts the rows of text that are held out
        has_prompts = not self.task.packs_rows and self.algorithm.needs.output == "logits"
        usual = evaluation.num_examples if has_prompts else EVALUATED
        return usual if wanted is None else wanted

    @property
    def learning_temperature(self) -> float:
        """Returns the divisor of scores in the policy that learns: 1 where nothing is sampled."""
        if self.algorithm.needs.demonstrations:
            return 1.0
        return self.generation.temperature


# loss_reduction of an algorithm -> what its loss sums over
_LOSS_REDUCTIONS = {
    "tokens": "a loss that is a plain sum over tokens",
    "sequences": "one that sums within a completion by "
    "tunix_lite.algorithms.sequences.sequence_sum or sequence_mean",
}


def reduction_of(algorithm: Algorithm) -> str | None:
    """Returns what the algorithm says that its loss sums over, tokens or sequences, or None."""
    # A subclass with a loss of its own declares it itself: what it inherits is about another loss.
    for kind in type(algorithm).__mro__:
        if "loss_reduction" in vars(kind):
            break
        if "loss" in vars(kind):
            return None
    return getattr(algorithm, "loss_reduction", None)


def packings_of(needs: Needs) -> tuple[str, ...]:
    """The names of packing, other than none, that these needs allow. Of a conversation that a
    reward model reads only the last token counts, so that no prompt is seen to be shared."""
    if needs.output == "score":
        return ("sequences",)
    return PACKING[1:]


def _check_algorithm(algorithm: Any, training: TrainingConfig, dropout: float) -> None:
    """Raises ValueError for malformed needs, or a loss that does not go with packed rows."""
    name = type(algorithm).__name__
    if not isinstance(getattr(algorithm, "needs", None), Needs):
        raise ValueError(
            f"algorithm: {name}.needs must be an algorithms.algorithm.Needs; for completions that "
            "are sampled, write into the class: needs = Needs()"
        )
    if hasattr(algorithm, "collect"):
        raise ValueError(
            f"algorithm: {name}.collect is not called, as the run samples; write in its place: def "
            "batch_of(self, policy, task, params, examples, groups): ... return batch, metrics"
        )
    choices = ", ".join(
        f'loss_reduction = "{key}" for {text}' for key, text in _LOSS_REDUCTIONS.items()
    )
    declared = reduction_of(algorithm)
    if declared not in (None, *_LOSS_REDUCTIONS):
        raise ValueError(f"algorithm: {name}.loss_reduction={declared!r}; it is {choices}")
    packing = f"training.packing={training.packing}"
    if declared is None and training.is_packed:
        raise ValueError(
            f"{packing}: a row then holds several completions, and {name} does not say that its "
            f"loss may be computed so; write into the class {choices}; or give "
            "training.packing=none"
        )
    if training.is_packed and training.packing not in (
        allowed := packings_of(algorithm.needs)
    ):
        raise ValueError(
            f"{packing}: {name} reads whole conversations and shares no prompts; set "
            f"training.packing={allowed[0]}"
        )
    if training.is_packed and dropout:
        raise ValueError(
            f"{packing} and model.lora.dropout={dropout}: what is dropped belongs to one sequence, "
            "and a packed row has several; leave out one of the two"
        )


def _check_task(run: RunConfig) -> None:
    """Raises ValueError for rewards, environments and prompts that do not go with the rest."""
    needs = run.algorithm.needs
    with error_context("task"):
        run.task.check_algorithm(bool(needs.demonstrations))
        # Rows that the task fills are neither sampled nor packed again.
        if run.task.packs_rows:
            of_rows = run.generation.max_prompt_length + run.generation.max_new_tokens
            wrong = {
                "they have row_tokens tokens; leave out generation.max_prompt_length and "
                "max_new_tokens": of_rows != run.task.row_tokens,
                "set generation.long_prompts=error": run.generation.long_prompts != "error",
                "set training.packing=none": run.training.is_packed,
                "set evaluation.num_examples=0": run.evaluation.num_examples,
            }
            for remedy in filter(wrong.get, wrong):
                raise ValueError(
                    f"rows of text are full, and have no prompts to sample from: {remedy}"
                )
        if run.rewards.workers:
            check_portable(run.task.functions())
            check_times(run.task.functions(), run.rewards)
    prompt = run.task.prompt
    if prompt is not None and not prompt.strip():
        raise ValueError(
            f"task: prompt={prompt!r} is the same for every example; write "
            "task.prompt='...{column}...', or null for the column `messages` or `prompt`"
        )

    # Conversations.
    if run.task.environment is None:
        return
    if run.conversation.workers:
        check_portable({"task.environment": run.task.environment}, "conversation")
    if needs.demonstrations and not run.evaluation.num_examples:
        raise ValueError(
            "task.environment answers what the model samples, and here nothing is sampled: the "
            "algorithm learns from demonstrations, and evaluation.num_examples is 0; set "
            "task.environment=null, or evaluation.num_examples to evaluate in conversations"
        )
    if needs.critic is not None and run.conversation.credit == "discount":
        raise ValueError(
            "conversation.credit=discount: a critic's returns are discounted token by token; set "
            "conversation.credit=turn, and algorithm.gamma=0.99 to discount"
        )
    advantages = getattr(run.algorithm, "advantages", None)
    compares_turns = run.conversation.credit != "end" and advantages is not None
    if compares_turns and takes(advantages, "whole"):
        raise ValueError(
            f"conversation.credit={run.conversation.credit} compares turns, and "
            "algorithm.advantages compares whole completions; set conversation.credit=end"
        )


def _multiple(wanted: int, step: int) -> int:
    """The least multiple of `step` that is `wanted` or more."""
    return -(-wanted // step) * step


def _check_overlap(run: RunConfig) -> None:
    """Raises ValueError for settings that do not go with rollouts that overlap with learning."""
    overlap = run.rollout.overlap
    apart = run.rollout.mesh_shape
    if apart is not None and (overlap != "one_step" or not run.rollout.is_stale):
        raise ValueError(
            f"rollout.mesh_shape={as_text(apart)} is for rollout.overlap=one_step with "
            "rollout.max_staleness above 0, which samples and learns at once; set these, or "
            "rollout.mesh_shape=null"
        )
    if overlap == "none":
        return
    algorithm = run.algorithm
    updates = algorithm.updates_per_rollout
    staleness = run.rollout.max_staleness
    # the algorithm alone knows whether it may learn from older weights
    stale = algorithm.needs.fresh
    reasons = {
        "the algorithm learns from demonstrations, and nothing is sampled": (
            algorithm.needs.demonstrations
        ),
        "agreeing_groups=replace draws more prompts within one rollout; set "
        "algorithm.agreeing_groups=drop": algorithm.needs.rounds > 1,
        "a conversation is not carried over an update; set rollout.overlap=one_step": (
            overlap == "carry" and run.task.environment is not None
        ),
        stale: run.rollout.is_stale and stale is not None,
        f"max_staleness={staleness} is counted in updates, and a rollout is for "
        f"algorithm.updates_per_rollout={updates} of them; set "
        f"rollout.max_staleness={_multiple(max(staleness, 1), updates)}": staleness % updates,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"rollout.overlap={overlap}: {reason}, or leave rollout.overlap at none"
            )


# ---- values -> dataclasses


# A class, or what may stand for it in an annotation, such as `int | None`.
_Kind = type | types.UnionType


def build(kind: _Kind, value: object, where: str = "") -> Any:
    """`value`, plain as YAML gives it, as `kind`. Raises ConfigError, naming the place. `_target_`
    names a class or function by dotted path: a class is built from the other settings, a function
    gets them bound. It is obeyed where `kind` is Any or Callable, and where it is a dataclass for
    those derived from it. What is named is imported, so `value` must be the user's own: of what a
    folder says, see files.untrusted.check_settings."""
    if isinstance(value, dict) and TARGET in value:
        return _build_target(kind, value, where)
    if kind == MeshShape:
        # A run's model.json was read before, so its lists are tuples.
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        lists = is_pair and all(isinstance(part, list | tuple) for part in value)
        if not lists or any(name not in AXES for name in value[1]):
            wrong = "the axes are fsdp and tp"
            if not lists:
                wrong = f"expected two lists, got {shown(value)}"
            raise ConfigError(f"{where}: {wrong}; write it as '{where}=[[4,1],[fsdp,tp]]'")
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, where)

    # `X | None`, or of several plain types the one that the value has.
    origin = get_origin(kind)
    args = get_args(kind)
    if origin in (types.UnionType, Union):
        if value is None:
            return None
        kinds = [kind for kind in args if kind is not type(None)]
        kind = type(value) if type(value) in kinds else kinds[0]
        if isinstance(value, str) and kind in (int, float):
            raise ConfigError(f"{where}: expected {kind.__name__} or null, got {shown(value)}")
        return build(kind, value, where)
    is_callable = Callable in (kind, origin)
    if is_callable and isinstance(value, str):
        return _build_target(kind, {TARGET: value}, where)
    if kind is Any or is_callable:
        raise ConfigError(
            f"{where}: expected a group of settings with a _target_, got {value!r}"
        )

    # Dicts and tuples of them.
    if origin is dict:
        items = _expect_type(dict, value, where).items()
        return {key: build(args[1], item, f"{where}.{key}") for key, item in items}
    if origin is tuple:
        items = _expect_type(list, value, where)
        kinds = args
        if args[-1] is Ellipsis:
            kinds = [args[0]] * len(items)
        if len(kinds) != len(items):
            raise ConfigError(f"{where}: expected {len(kinds)} entries, got {value!r}")
        built = []
        for i, item in enumerate(items):
            built.append(build(kinds[i], item, f"{where}[{i}]"))
        return tuple(built)

    # Plain values.
    if kind is float and type(value) is int:
        return float(value)
    if kind is float and type(value) is float and not math.isfinite(value):
        raise ConfigError(f"{where}: expected a finite number, got {value}")
    return _expect_type(kind, value, where)


def plain(value: object) -> Any:
    """Returns a setting as YAML has it, classes and functions by path: the input of `build`."""
    if dataclasses.is_dataclass(value):
        return {"_target_": _path(type(value))} | {
            f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init
        }
    if isinstance(value, partial):
        return {"_target_": _path(value.func)} | {
            name: plain(item) for name, item in value.keywords.items()
        }
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(value) and hasattr(value, "__qualname__"):
        return _path(value)
    return _path(type(value))


def _path(named: type | Callable[..., object]) -> str:
    return f"{named.__module__}.{named.__qualname__}"


def _expect_type(kind: type, value: object, where: str) -> Any:
    """The value, if it is of this very type. Raises ConfigError."""
    if type(value) is not kind and not (kind is list and type(value) is tuple):
        raise ConfigError(f"{where}: expected {kind.__name__}, got {shown(value)}")
    return value


def _build_dataclass(kind: type, values: object, where: str) -> Any:
    values = _expect_type(dict, values, where or "config")
    fields = [field for field in dataclasses.fields(kind) if field.init]
    _refuse_unknown(values, [field.name for field in fields], where)
    empty = dataclasses.MISSING
    # said here by name: Python would speak of an __init__
    required = [f.name for f in fields if f.default is empty and f.default_factory is empty]
    missing = ", ".join(name for name in required if name not in values)
    if missing and where:
        raise ConfigError(f"{where}: missing {missing}")
    if missing:
        raise ConfigError(
            f"config: missing {missing}; a file for --config-name begins with "
            "`defaults: [config, _self_]`"
        )
    hints = get_type_hints(kind)
    with error_context(where):
        built = {
            name: build(hints[name], value, _join(where, name))
            for name, value in values.items()
        }
        return kind(**built)


def _build_target(kind: _Kind, values: dict, where: str) -> Any:
    """A class is built from the settings beside its name, a function gets them bound."""
    settings = dict(values)
    place = _join(where, TARGET)
    path = _expect_type(str, settings.pop(TARGET), place)

    # What the path names may stand where `kind` is expected.
    kinds = get_args(kind) if get_origin(kind) in (types.UnionType, Union) else [kind]
    takes_any = any(kind is Any or Callable in (kind, get_origin(kind)) for kind in kinds)
    classes = tuple(kind for kind in kinds if dataclasses.is_dataclass(kind))
    with error_context(place):
        if not takes_any and not classes:
            raise ValueError("no class or function stands here, only a plain value; remove it")
        target = import_named(path)
        if not takes_any and not (isinstance(target, type) and issubclass(target, classes)):
            names = " or ".join(_path(each) for each in classes)
            raise ValueError(f"{path} is not {names}, nor derived from it; remove it")
        if not callable(target):
            raise ValueError(f"{path} is neither a class nor a function")

    # A class is made, a function bound.
    if dataclasses.is_dataclass(target):
        return _build_dataclass(target, settings, where)
    parameters = inspect.signature(target).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        _refuse_unknown(settings, [p.name for p in parameters], where)
    if not isinstance(target, type):
        return partial(target, **settings) if settings else target
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name not in settings
    ]
    if missing:
        raise ConfigError(f"{where}: missing {', '.join(missing)}")
    with error_context(where):
        return target(**settings)


def _refuse_unknown(values: dict, known: list[str], where: str) -> None:
    for key in values:
        if key not in known:
            beside = [_join(where, name) for name in known]
            raise ConfigError(unknown_key(_join(where, str(key)), beside, values[key]))


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
