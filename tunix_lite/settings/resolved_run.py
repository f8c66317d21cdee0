"""Values derived from the settings and the mesh, by arithmetic: batch, rows, slots and choices,
once for a run and for a plan of one. Needs no device and no weights."""

import math
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tunix_lite.algorithms.algorithm import Needs
from tunix_lite.basics.errors import ConfigError, error_context
from tunix_lite.basics.types import CRITIC, POLICY
from tunix_lite.learner.comparison import Teacher
from tunix_lite.learner.critic import critic_table
from tunix_lite.learner.defaults import AUTO, REAL, precision, what_trains, with_rate
from tunix_lite.learner.optim import Optimizer, scaled_for
from tunix_lite.learner.policy import DTYPES, STORED
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models import (
    attention,
    decoder,
    families,
    hub,
    peft,
    weights,
)
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.kernel_choice import check_fused
from tunix_lite.models.lora import LoraConfig, trained_weights
from tunix_lite.models.quantize import BLOCKS, STORAGE, stored_table
from tunix_lite.models.source import ModelConfig, folder_of, locate
from tunix_lite.parallel.mesh import AXES, elements_on_device, resolve_mesh_shape
from tunix_lite.rollout.memory import SamplingMemory
from tunix_lite.rollout.settings import RolloutConfig
from tunix_lite.settings.batch_size import (
    TOKENS_AT_ONCE,
    BatchPlan,
    plan_batch,
    plan_rows,
)
from tunix_lite.settings.config import RunConfig

# Weights of a model from which on rows with fewer columns for prompts are worth a program of their
# own.
NARROWS_FROM = 2**24

# Bytes of products that the backward pass of a micro-batch finds on a CPU, where nobody says how
# many tokens it has. Products of 768 rows are as fast there as those of more.
_KEPT_ON_CPU = 2**29


@dataclass(frozen=True)
class _FrozenModel:
    """A model that only scores, beside the one that trains.
    Example: _FrozenModel(cfg, "int8", "xla", {"fsdp": 4, "tp": 1})."""

    cfg: Architecture
    storage: str  # fp32, bf16, int8 or nf4
    attention: str  # one of attention.IMPLEMENTATIONS
    mesh_shape: dict[str, int]  # that of the run, or of the devices that hold it


def trained_architecture(model: ModelConfig, cfg: Architecture, needs: Needs) -> Architecture:
    """The architecture as the algorithm needs it: reward models give numbers in place of logits.
    Raises ValueError for a reward model where logits are needed."""
    if needs.output == "logits" and cfg.output != "logits":
        raise ValueError(
            f"model.weights={model.weights} is a reward model, which samples no tokens; it goes "
            "with algorithm=reward_model, or as a reward: "
            "'+task.rewards.rm={_target_: tunix_lite.rewards.model.RewardModel, weights: FOLDER}'"
        )
    return replace(cfg, output=needs.output)


class _Tables(NamedTuple):
    """The declared weights of a run, in the types that they are stored in."""

    # of the policy
    trained: dict
    # None: all weights train
    frozen: dict | None
    # None: the policy trains alone
    critic: dict | None = None

    @property
    def networks(self) -> dict:
        """All that trains, as TrainState.params holds it."""
        if self.critic is None:
            return self.trained
        return {POLICY: self.trained, CRITIC: self.critic}


@dataclass(frozen=True)
class ResolvedRun:
    """One run on one mesh, everything derived that follows from the two. Nothing here lives on a
    device.
    Example: `resolve_run(run, *find_model(run.model), {"fsdp": 4, "tp": 1}, "cpu").batch`."""

    run: RunConfig
    cfg: Architecture
    # None: all weights train
    lora: LoraConfig | None
    # sizes by axis name
    mesh_shape: dict[str, int]
    batch: BatchPlan
    # layout of a batch's sequences
    rows: RowLayout
    # sequences decoded at once, a multiple of fsdp
    slots: int
    # one of attention.IMPLEMENTATIONS, and why it was chosen
    attention: str
    # of the mesh's devices, as JAX calls it
    platform: str
    attention_reason: str = ""
    # why rows are packed as they are, where the run chose it
    packing_reason: str = ""
    # why the learning rate and the precision are what they are, where they were auto
    rate_reason: str = ""
    precision_reason: str = ""
    # Whether sampling uses weights gathered over fsdp, or sharded. Where rollout.weights is auto,
    # "gathered" stands here until a plan chooses by the memory of its machine, or a run by the
    # memory that is free once it is loaded.
    sampling_weights: str = "gathered"
    # models of the algorithm that score, by name, such as a teacher
    frozen_models: dict[str, _FrozenModel] = field(default_factory=dict)

    @property
    def dtype(self) -> type:
        """The dtype of the computation."""
        return DTYPES[self.run.training.mixed_precision]

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the computation."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def fsdp(self) -> int:
        """Devices along the axis of the mesh that divides batch and weights."""
        return self.mesh_shape["fsdp"]

    @property
    def tp(self) -> int:
        """Devices along the axis of the mesh that divides heads and features."""
        return self.mesh_shape["tp"]

    @property
    def needs(self) -> Needs:
        """The needs of the algorithm."""
        return self.run.algorithm.needs

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer's settings, with the learning rate that this mesh gets."""
        return scaled_for(self.run.optimizer, self.fsdp)

    @property
    def policy_updates(self) -> int:
        """Updates that change the policy: all but those of a critic's warm-up."""
        critic = self.needs.critic
        return self.run.training.max_steps - (0 if critic is None else critic.warmup)

    @property
    def critic_optimizer(self) -> Optimizer:
        """The same for the critic, which may have a learning rate of its own."""
        rate = self.needs.critic.learning_rate
        if rate is None:
            return self.optimizer
        return scaled_for(replace(self.run.optimizer, learning_rate=rate), self.fsdp)

    @property
    def rows_of_critic(self) -> list[tuple[str, str]]:
        """Returns what the start of a run says of its critic: (name, text), or nothing."""
        critic = self.needs.critic
        if critic is None:
            return []
        kind = "layers of its own and a head" if critic.is_own else "a head on the policy"
        rate = self.critic_optimizer.learning_rate
        text = f"{kind}, {weights.num_params(self.tables.critic):,} parameters, rate {rate:g}"
        return [("critic", f"{text}, alone for {critic.warmup} updates")]

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of the longest prompt and the longest completion."""
        return self.run.generation.lengths

    @property
    def train_rules(self) -> dict[str, str | None]:
        """The sharding rules while scoring and updating, and where weights live."""
        return self.run.sharding.table("train")

    @property
    def rollout(self) -> RolloutConfig:
        """The settings of sampling with the number of slots and where its weights are."""
        return replace(self.run.rollout, num_slots=self.slots, weights=self.sampling_weights)

    @property
    def rollouts(self) -> tuple[tuple[int, int], ...]:
        """Returns (prompts, completions of each) of the rollouts on the mesh: to learn from, unless
        that has devices of its own, and to evaluate."""
        rollouts = []
        algorithm = self.run.algorithm
        if algorithm.needs.is_sampled and self.run.rollout.mesh_shape is None:
            # one rollout is for all of its mini-batches
            prompts = self.batch.prompts * algorithm.needs.mini_batches
            rollouts.append((prompts, algorithm.num_generations))
        if count := self.run.evaluation.num_examples:
            rollouts.append((count, 1))
            if samples := self.run.evaluation.num_samples:
                rollouts.append((count, samples))
        if (count := self.run.loss_examples) and algorithm.needs.is_sampled:
            rollouts.append((count, algorithm.num_generations))
        return tuple(rollouts)

    @property
    def has_rollouts(self) -> bool:
        """Returns whether anything is sampled: to learn from, or to evaluate."""
        return bool(self.rollouts)

    @property
    def carries(self) -> bool:
        """Returns whether completions continue over an update, and are read again after it."""
        rollout = self.run.rollout
        return rollout.overlap == "carry" and rollout.is_stale

    @property
    def replays_routes(self) -> bool:
        """Returns whether batches hold the experts that sampled tokens took."""
        has_experts = self.cfg.experts is not None
        return self.needs.is_sampled and has_experts and self.run.rollout.replay_routes

    @property
    def converses(self) -> bool:
        """Returns whether an environment answers completions, so that slots are appended to."""
        return self.run.task.environment is not None and self.has_rollouts

    @property
    def samples_beside_update(self) -> bool:
        """Returns whether the devices hold the arrays of sampling and of the update at once."""
        rollout = self.run.rollout
        is_beside = rollout.overlap == "one_step" and rollout.is_stale
        return is_beside and rollout.mesh_shape is None

    @property
    def apart(self) -> "ResolvedRun | None":
        """The same run as the devices see it on which nothing but sampling is done
        (rollout.mesh_shape); None: there are none."""
        shape = self.run.rollout.mesh_shape
        if shape is None:
            return None
        sizes = dict.fromkeys(AXES, 1) | dict(zip(shape[1], shape[0]))
        # there, sampling has no devices beside its own
        rollout = replace(self.run.rollout, mesh_shape=None)
        evaluation = replace(self.run.evaluation, num_examples=0, loss_examples=0)
        run = replace(self.run, rollout=rollout, evaluation=evaluation)
        slots = rollout.slots(self.batch.sequences, sizes["fsdp"])
        return replace(self, run=run, mesh_shape=sizes, slots=slots)

    @property
    def sampling_memory(self) -> SamplingMemory:
        """Returns the memory of sampling on a device, without weights."""
        return SamplingMemory(
            self.cfg,
            self.dtype,
            self.run.generation,
            self.run.rollout,
            self.slots,
            self.rollouts,
            self.mesh_shape,
            self.run.sharding.table("rollout"),
            self.platform == "cpu",
        )

    @property
    def scores(self) -> bool:
        """Returns whether collecting scores the batch, by the reference or by today's weights."""
        return self.needs.reference or self.needs.rescore

    @property
    def teacher(self) -> Teacher | None:
        """Returns the teacher that the policy is compared with at each token; None without one."""
        comparison = self.needs.comparison
        if comparison is None or comparison.model not in self.frozen_models:
            return None
        cfg = self.frozen_models[comparison.model].cfg
        return Teacher(comparison, cfg.final_softcap, cfg.embed_dim, self.cfg.vocab_size)

    def compares(self, name: str) -> bool:
        """Returns whether the policy is compared with this frozen model, in place of scoring."""
        return self.teacher is not None and self.teacher.comparison.model == name

    def as_scorer(self, name: str) -> "ResolvedRun":
        """The same run as one of its frozen models sees it: with that architecture, all of it in
        place of the reference."""
        model = self.frozen_models[name]
        scoring = self.run.scoring_models[name]
        changed = {"cfg": model.cfg, "lora": None, "attention": model.attention}
        # it takes no routes of the policy
        run = replace(self.run, rollout=replace(self.run.rollout, replay_routes=False))
        if (reward := scoring.reward) is not None:
            # whole conversations, of which the last token counts
            longest = reward.longest(model.cfg.max_positions)
            lengths = {"max_prompt_length": longest - 1, "max_new_tokens": 1}
            run = replace(run, generation=replace(run.generation, **lengths))
            size, shards = reward.batch_size, model.mesh_shape["fsdp"]
            batch = BatchPlan(size * shards, 1, shards, size, 1)
            rows = RowLayout("none", 1, 1, num_rows=batch.sequences)
            changed |= {"batch": batch, "rows": rows, "mesh_shape": model.mesh_shape}
            return replace(self, run=run, frozen_models={}, **changed)
        if longest := scoring.settings.max_prompt_length:
            run = replace(run, generation=replace(run.generation, max_prompt_length=longest))
        # a longer prompt needs longer rows, and the model has another size
        sizes = narrows(model.cfg), tokens_at_once(model.cfg, self.platform)
        rows = plan_rows(run, self.batch, *sizes)
        return replace(self, run=run, rows=rows, frozen_models={}, **changed)

    @property
    def copies_reference(self) -> bool:
        """Returns whether the KL term has a copy of the weights; LoRA's frozen base serves, too."""
        return self.needs.reference and self.lora is None

    @property
    def copies_adapters(self) -> bool:
        """Returns whether the reference has adapters of its own, as training begins."""
        has_adapter = self.run.model.lora.adapter is not None
        has_checkpoint = self.run.resume.folder not in ("auto", "none")
        # fresh adapters add nothing, so the base is the reference without a copy
        needs_them = self.needs.reference and self.lora is not None
        return needs_them and (has_adapter or has_checkpoint)

    def elements(
        self,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        is_gathered: bool = False,
        rules: dict[str, str | None] | None = None,
    ) -> int:
        """Elements of an array on one device, whose dims carry these logical axes. is_gathered:
        whole over fsdp. rules: None means those of training."""
        mesh_shape = self.mesh_shape | ({"fsdp": 1} if is_gathered else {})
        if rules is None:
            rules = self.train_rules
        return elements_on_device(shape, axes, mesh_shape, rules)

    @property
    def tables(self) -> _Tables:
        """The weights that train, those of the frozen base, and those of the critic."""
        table = decoder.weights(self.cfg)
        storage = STORED[self.run.training.mixed_precision]
        frozen = None
        if self.lora is None:
            trained = stored_table(table, storage)
        else:
            trained = jax.tree.map(
                lambda w: w if w.is_exact else replace(w, dtype=STORAGE[storage]),
                trained_weights(table, self.lora),
            )
            frozen = stored_table(table, self.lora.base)
        critic = self.needs.critic
        if critic is not None:
            critic = critic_table(critic, self.cfg, trained, storage)
        return _Tables(trained, frozen, critic)

    def table_bytes(
        self,
        table: dict,
        dtype: DTypeLike | None = None,
        keep_norms: bool = False,
        is_gathered: bool = False,
    ) -> int:
        """Bytes of a table on one device: elements / shards x bytes of an element. dtype: instead
        of the declared one; keep_norms: except for the scales of norms, which are float32.
        is_gathered: whole over fsdp."""
        total = 0
        for w in jax.tree.leaves(table):
            storage = w.dtype if dtype is None else dtype
            if keep_norms and w.axes[-1] == "norm":
                storage = jnp.float32
            total += self.elements(w.shape, w.axes, is_gathered) * jnp.dtype(storage).itemsize
        return total


def find_model(model: ModelConfig) -> tuple[Architecture, LoraConfig | None]:
    """The architecture and the adapters, from settings and files of this machine: no weights,
    nothing from the hub. Raises ConfigError."""
    cfg = model.architecture
    if model.target_params is not None:
        # the tokens of the tokenizer count, too
        with error_context(""):
            cfg = locate(model).cfg
    with error_context("model"):
        family = None if model.family is None else families.find_family(model.family)
        if cfg is None:
            if hub.is_hub_name(model.weights):
                raise ValueError(
                    "architecture is not given, and a plan does not ask the hub for that of "
                    f"{model.weights}; choose one with model=NAME, or give model.weights as a "
                    "folder"
                )
            cfg, family = families.read_config(folder_of(model.weights), family)
        lora = model.lora
        if lora.adapter is not None:
            lora = peft.read_adapter_config(lora, cfg, family)
    return cfg, lora if lora.rank else None


def resolve_run(
    run: RunConfig,
    cfg: Architecture,
    lora: LoraConfig | None,
    mesh_shape: dict[str, int],
    platform: str,
    is_attached: bool = False,
    frozen_cfgs: dict[str, Architecture] | None = None,
) -> ResolvedRun:
    """The values derived from the settings on a mesh of this shape. Raises ConfigError where they
    do not fit together, such as where the mesh does not divide the model or the batch. run: with a
    packing that is chosen, not auto (packing_choice.with_packing). is_attached: whether devices of
    this platform are there, so that a kernel which is asked for by name must work now. frozen_cfgs:
    the architectures of the algorithm's frozen models, by name; None: as settings and files of this
    machine have them."""
    # choosing means resolving each packing, so it cannot happen in here
    if run.training.packing == "auto":
        raise ValueError(
            "packing=auto: packing_choice.with_packing chooses it for resolve_run"
        )
    with error_context(""):
        cfg = trained_architecture(run.model, cfg, run.algorithm.needs)
    run, reasons = with_defaults(run, cfg, lora, platform)

    # The model on the mesh, and what is sampled of it.
    if lora is not None:
        # else the error of a wrong target would name the mesh
        with error_context("model.lora"):
            trained_weights(decoder.weights(cfg), lora)
    with error_context("model.mesh_shape"):
        _check_model_divides(run, cfg, lora, mesh_shape)
    base = run.model.lora.base
    if lora is None and base in BLOCKS:
        raise ConfigError(
            f"model.lora: base={base} is for the frozen weights under adapters, and rank=0 trains "
            "all weights; set model.lora.rank=16, or leave base out"
        )
    # The mesh that only samples.
    if (shape := run.rollout.mesh_shape) is not None:
        sizes = dict.fromkeys(AXES, 1) | dict(zip(shape[1], shape[0]))
        with error_context("rollout.mesh_shape"):
            try:
                _check_model_divides(run, cfg, lora, sizes)
            except ValueError as error:
                # the message was made for the mesh that learns
                text = str(error).replace("model.mesh_shape", "rollout.mesh_shape")
                raise ValueError(text) from error
        with error_context("rollout"):
            _check_decode_kernels(run, cfg, platform, sizes["tp"])
    with error_context("generation"):
        check_generation(run, cfg)

    # The batch of an update.
    batch = plan_batch(run, mesh_shape["fsdp"])
    rows = plan_rows(run, batch, narrows(cfg), tokens_at_once(cfg, platform))
    width = rows.width or sum(run.generation.lengths)
    tp = mesh_shape["tp"]
    if run.sharding.train.get("residual_seq") == "tp" and width % tp:
        # sequence parallelism divides rows into pieces
        raise ConfigError(
            f"sharding: train.residual_seq=tp: tp={tp} does not divide rows of {width} tokens; "
            f"generation.max_prompt_length and max_new_tokens in multiples of {tp} would do"
        )

    every = run.training.sync_gradients_every
    if cfg.experts is not None and every > 1 and mesh_shape["fsdp"] > 1:
        raise ConfigError(
            f"training: sync_gradients_every={every}: the gradients of experts cross the mesh in "
            "every micro-batch; set training.sync_gradients_every=1"
        )

    is_bf16 = DTYPES[run.training.mixed_precision] == jnp.bfloat16
    is_there = is_attached and platform in ("cuda", "gpu") and find_spec("tokamax")
    if run.training.expert_kernels == "tokamax" and not (cfg.experts and is_bf16 and is_there):
        raise ConfigError(
            "training: expert_kernels=tokamax multiplies experts in bfloat16 on Hopper GPUs that "
            "jax sees (pip install -e '.[tokamax]'); set training.expert_kernels=auto"
        )

    # The choices.
    slots = run.rollout.slots(batch.sequences, mesh_shape["fsdp"])
    with error_context("training"):
        implementation, reason = _choose_attention(run, cfg, rows, platform, is_attached)
    with error_context("rollout"):
        _check_decode_kernels(run, cfg, platform, mesh_shape["tp"])
    resolved = ResolvedRun(
        run,
        cfg,
        lora,
        mesh_shape,
        batch,
        rows,
        slots,
        implementation,
        platform,
        attention_reason=reason,
        **reasons,
    )

    return replace(resolved, frozen_models=_frozen_models(resolved, is_attached, frozen_cfgs))


def _frozen_models(
    resolved: ResolvedRun, is_attached: bool, frozen_cfgs: dict[str, Architecture] | None
) -> dict[str, _FrozenModel]:
    """The models that only score: they go with the mesh and with the lengths."""
    run = resolved.run
    frozen = {}
    for name, scoring in run.scoring_models.items():
        settings = scoring.settings
        with error_context(scoring.where):
            theirs = frozen_cfgs and frozen_cfgs[name]
            theirs = scoring.architecture(theirs or find_model(settings.as_model())[0])
            table = stored_table(decoder.weights(theirs), settings.storage)
            reward = scoring.reward
            mesh_shape = resolved.mesh_shape
            if reward is not None and reward.mesh_shape is not None:
                num_devices = math.prod(mesh_shape.values())
                mesh_shape = resolve_mesh_shape(reward.mesh_shape, num_devices)
            # a plan has the sizes of a mesh, and no devices for one
            shape = SimpleNamespace(shape=mesh_shape)
            weights.check_divisible(table, shape, run.sharding.table("train"))
            # it may have heads that a kernel cannot take
            layout = resolved.rows if reward is None else RowLayout()
            chosen, _ = _choose_attention(run, theirs, layout, resolved.platform, is_attached)
        frozen[name] = _FrozenModel(theirs, settings.storage, chosen, mesh_shape)
    return frozen


def narrows(cfg: Architecture) -> bool:
    """Returns whether an update takes so long that a batch with short prompts is worth the time to
    compile another program."""
    return weights.num_params(decoder.weights(cfg)) >= NARROWS_FROM


def tokens_at_once(cfg: Architecture, platform: str) -> int:
    """Returns the tokens of packed rows in a micro-batch of a shard, where no setting says."""
    if platform != "cpu":
        return TOKENS_AT_ONCE
    outputs = sum(
        math.prod(w.shape[w.num_counted + w.inputs :])
        for kind in cfg.kinds_of_weights
        for w in decoder.layer_weights(cfg, kind).values()
        if w.inputs
    )
    return min(TOKENS_AT_ONCE, _KEPT_ON_CPU // (4 * outputs))


def with_defaults(
    run: RunConfig, cfg: Architecture, lora: LoraConfig | None, platform: str
) -> tuple[RunConfig, dict[str, str]]:
    """The run with values for optimizer.learning_rate=auto and training.mixed_precision=auto, and
    why, as the fields of a ResolvedRun. Raises ConfigError where another setting does not go with
    the precision or the model."""
    num_params = weights.num_params(decoder.weights(cfg))
    # adapters bear a rate that would ruin all weights
    trains = what_trains(lora is not None, num_params)
    # the column of learner.defaults.RATES that suits the algorithm's data
    learned = {(): "rewards", ("completion",): "demonstrations"}.get(
        tuple(run.algorithm.needs.demonstrations), "preferences"
    )
    reasons = {}
    if run.optimizer.learning_rate == AUTO:
        reasons["rate_reason"] = f"auto: {trains}, from {learned}"
    if run.training.mixed_precision == AUTO:
        size = "a real model" if num_params >= REAL else "a small model"
        reasons["precision_reason"] = f"auto: {size} on {platform}"
    optimizer = with_rate(run.optimizer, trains, learned)
    with error_context("training"):
        for name in ("router_aux_loss_coef", "router_z_loss_coef"):
            if cfg.experts is None and (coef := getattr(run.training, name)):
                raise ValueError(f"{name}={coef}: the model has no experts; leave it out")
        name = precision(run.training.mixed_precision, num_params, platform)
        training = replace(run.training, mixed_precision=name)
    return replace(run, optimizer=optimizer, training=training), reasons


def _check_model_divides(
    run: RunConfig, cfg: Architecture, lora: LoraConfig | None, mesh_shape: dict[str, int]
) -> None:
    """Raises ValueError, naming the weight, if the mesh does not divide model or adapters."""
    table = decoder.weights(cfg)
    tables = [table]
    if lora is not None:
        tables = [stored_table(table, lora.base), trained_weights(table, lora)]
    mesh = SimpleNamespace(shape=mesh_shape)
    for part in tables:
        weights.check_divisible(part, mesh, run.sharding.table("train"))


def check_generation(run: RunConfig, cfg: Architecture) -> None:
    """Raises ValueError for settings that a model cannot follow, or that would train wrongly."""
    settings = run.generation
    total = settings.max_prompt_length + settings.max_new_tokens
    if total > cfg.max_positions and run.task.packs_rows:
        raise ValueError(
            f"task.row_tokens={total} is more than the {cfg.max_positions} tokens that the model "
            f"was made for; set task.row_tokens={cfg.max_positions}"
        )
    if total > cfg.max_positions:
        more = 0 if cfg.longrope is None else cfg.longrope.long_positions
        longer = f"; model.architecture.max_positions={more} takes factors of long sequences"
        raise ValueError(
            f"max_prompt_length={settings.max_prompt_length} + "
            f"max_new_tokens={settings.max_new_tokens} = {total} tokens, and the model was made "
            f"for {cfg.max_positions}{longer if more > cfg.max_positions else ''}"
        )
    # a setting that changes nothing is a mistake
    settings.check_fits(cfg.vocab_size)
    if settings.top_k >= cfg.vocab_size:
        raise ValueError(
            f"top_k={settings.top_k} would change nothing: it leaves no token out of "
            f"vocab_size={cfg.vocab_size}; generation.top_k=0 draws from all tokens"
        )
    if settings.temperature == 0 and run.algorithm.needs.is_sampled:
        raise ValueError(
            "temperature=0.0 must be above 0: a group needs completions that differ"
        )


def _choose_attention(
    run: RunConfig, cfg: Architecture, rows: RowLayout, platform: str, is_attached: bool
) -> tuple[str, str]:
    """The implementation of attention that training uses, and why. Raises ValueError. Where the
    devices are not attached, cuDNN that is asked for by name is assumed to work there."""
    choice = run.training.attention
    dtype = DTYPES[run.training.mixed_precision]
    shares_prompts = rows.packing == "prefix"
    try:
        width = rows.width or sum(run.generation.lengths)
        return attention.choose(choice, cfg, platform, dtype, width, shares_prompts)
    except attention.CannotCompile:
        if is_attached:
            raise
        return choice, "as training.attention says"


def _check_decode_kernels(run: RunConfig, cfg: Architecture, platform: str, tp: int) -> None:
    """Raises ValueError where decoding cannot use the kernels that `rollout.kernels` asks for."""
    if run.rollout.is_fused:
        check_fused(
            cfg,
            DTYPES[run.training.mixed_precision],
            platform,
            tp,
            run.rollout.cache == "int8",
            not run.model.lora.rank and run.model.lora.adapter is None,
            run.generation.has_cutoffs,
        )
