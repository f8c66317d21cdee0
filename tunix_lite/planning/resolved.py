"""What a run comes to on a mesh: its batch, rows, slots and choices, by arithmetic. Needs no device
and no weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from tunix_lite.config import RunConfig
from tunix_lite.errors import ConfigError, error_context
from tunix_lite.learner.policy import DTYPES
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models import attention, decoder, families, hub, peft, weights
from tunix_lite.models.decoder import Architecture
from tunix_lite.models.lora import LoraConfig, adapter_weights
from tunix_lite.models.quantize import stored_table
from tunix_lite.models.source import BUNDLED, ModelConfig
from tunix_lite.parallel.mesh import set_rules
from tunix_lite.planning.batch_size import (
    BatchPlan,
    check_residual,
    lengths_of,
    plan_batch,
    plan_rows,
    row_width,
)
from tunix_lite.rollout.scheduler import prompt_cache_blocks, prompt_widths


@dataclass(frozen=True)
class Case:
    """One run on one mesh. `sizes` are those of the mesh by axis; nothing here lives on a
    device."""

    run: RunConfig
    cfg: Architecture
    lora: LoraConfig | None  # None: all weights train
    sizes: dict[str, int]
    batch: BatchPlan
    rows: RowLayout
    slots: int  # sequences decoded at once, a multiple of fsdp
    attention: str  # one of attention.IMPLEMENTATIONS
    weights: str = "gathered"  # or sharded: the weights over fsdp while sampling

    @property
    def dtype(self):
        return DTYPES[self.run.training.mixed_precision]

    @property
    def copies_reference(self) -> bool:
        """Whether a second copy of the weights is kept for the KL term; under LoRA the frozen base
        serves."""
        return self.run.algorithm.needs_reference and self.lora is None

    @property
    def copies_adapters(self) -> bool:
        """Whether the reference has adapters of its own beside the frozen base: those that training
        starts from."""
        starts_from = self.run.model.lora.adapter is not None or self.run.resume.folder not in (
            "auto",
            "none",
        )
        return self.run.algorithm.needs_reference and self.lora is not None and starts_from

    @property
    def samples(self) -> bool:
        """Whether anything is sampled: to learn from, or to evaluate."""
        return not self.run.algorithm.needs_demonstrations or self.run.evaluation.num_examples > 0

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of the longest prompt and the longest completion."""
        return lengths_of(self.run)


def find_model(model: ModelConfig) -> tuple[Architecture, LoraConfig | None]:
    """The architecture and the adapters, from settings and files of this machine: no weights,
    nothing from the hub.

    Raises ConfigError.
    """
    with error_context("model"):
        cfg, family = (
            model.architecture,
            None if model.family is None else families.find_family(model.family),
        )
        if cfg is None:
            if hub.is_hub_name(model.weights):
                raise ValueError(
                    "architecture is not given, and a plan does not ask the hub for that of "
                    f"{model.weights}; choose "
                    "one with model=NAME, or give model.weights as a folder"
                )
            folder = BUNDLED if model.weights == "bundled" else Path(model.weights).expanduser()
            cfg, family = families.read_config(folder, family)
        lora = (
            model.lora
            if model.lora.adapter is None
            else peft.read_adapter_config(model.lora, cfg, family)
        )
    return cfg, lora if lora.rank else None


def make_case(
    run: RunConfig, cfg: Architecture, lora: LoraConfig | None, sizes: dict[str, int], platform: str
) -> Case:
    """The run on a mesh of these sizes. Raises ConfigError where the mesh does not divide the model
    or the batch."""
    set_rules(run.sharding)
    with error_context("model.mesh_shape"):
        table = decoder.weights(cfg)
        for part in (
            [table]
            if lora is None
            else [stored_table(table, lora.base), adapter_weights(table, lora)]
        ):
            weights.check_divisible(part, SimpleNamespace(shape=sizes))
    if (total := sum(lengths_of(run))) > cfg.max_positions:
        raise ConfigError(
            f"generation: {total} tokens of prompt and completion; the model takes "
            f"{cfg.max_positions}"
        )
    batch = plan_batch(run, sizes["fsdp"])
    rows = plan_rows(run, batch)
    with error_context("sharding"):
        check_residual(run, rows, sizes["tp"])
    slots = slots_of(run, batch, sizes["fsdp"])
    case = Case(run, cfg, lora, sizes, batch, rows, slots, run.training.attention)
    with error_context("training"):
        return replace(case, attention=_choose_attention(case, platform))


def slots_of(run: RunConfig, batch: BatchPlan, fsdp: int) -> int:
    """Sequences decoded at once: as many as are asked for, or can be of use, up to a multiple of
    fsdp."""
    return run.rollout.slots(batch.sequences, fsdp)


# attention's words, where cuDNN is not on this machine
NOT_TRIED = "a small one does not compile"


def _choose_attention(case: Case, platform: str) -> str:
    """As training chooses; cuDNN that is asked for by name, for GPUs that are not here, is believed
    to work there."""
    width, shares = row_width(case.run, case.rows), case.rows.packing == "prefix"
    try:
        return attention.choose(case.attention, case.cfg, platform, case.dtype, width, shares)[0]
    except ValueError as error:
        if (case.attention, platform) != ("cudnn", "cuda") or NOT_TRIED not in str(error):
            raise
        return "cudnn"


def check_can_be_lowered(case: Case, platform: str) -> None:
    """Raises ConfigError for a kernel that only a machine which has its library can put into a
    program."""
    if (case.attention, platform) == ("cudnn", "cuda") and attention.obstacle(
        "cudnn", case.cfg, platform, case.dtype, row_width(case.run, case.rows), False
    ):
        raise ConfigError(
            "training.attention=cudnn: cuDNN's kernel can be lowered only where cuDNN is "
            "installed, and here it is "
            "not; training.attention=xla would do, or an estimate: analytic=true"
        )


def chooses_micro_batch(run: RunConfig) -> bool:
    """Whether the size of a micro-batch is still to be found."""
    return run.training.micro_batch_size == "auto"


def micro_batches_to_try(run: RunConfig, fsdp: int) -> list[int]:
    """The values of micro_batch_size that this batch allows, the largest first."""
    per_shard = plan_batch(with_micro_batch(run, None), fsdp).sequences // fsdp
    return [
        size
        for size in range(per_shard, 0, -1)
        if per_shard % size == 0 and _syncs(run, per_shard // size)
    ]


def _syncs(run: RunConfig, parts: int) -> bool:
    return parts % run.training.sync_gradients_every == 0


def with_micro_batch(run: RunConfig, size: int | None) -> RunConfig:
    """The run with micro-batches of this size, the accumulation derived; null: sync_gradients_every
    of them."""
    accumulation = run.training.sync_gradients_every if size is None else None
    settings = {"micro_batch_size": size, "gradient_accumulation_steps": accumulation}
    return replace(run, training=replace(run.training, **settings))


def rollouts_of(run: RunConfig, batch: BatchPlan) -> list[tuple[int, int]]:
    """(prompts, completions of each) of what is sampled: to learn from, and to evaluate."""
    learning = (
        []
        if run.algorithm.needs_demonstrations
        else [(batch.prompts, run.algorithm.num_generations)]
    )
    return learning + ([(run.evaluation.num_examples, 1)] if run.evaluation.num_examples else [])


def shelf(case: Case) -> tuple[int, int, int]:
    """(prompts read together, tokens of the widest, prompts that wait on the shelf at most).

    Asked of rollout.scheduler itself, for a step and for an evaluation; the larger shelf counts.
    """
    run, (prompt, new) = case.run, case.lengths
    chunk, asked = min(run.rollout.chunk, new), rollouts_of(run, case.batch)
    found = [
        _shelf(prompt, new, prompts, generations, case, chunk) for prompts, generations in asked
    ]
    return max(found, key=lambda blocks: blocks[2], default=(0, 0, 0))


def _shelf(
    prompt: int, new: int, prompts: int, generations: int, case: Case, chunk: int
) -> tuple[int, int, int]:
    widths = prompt_widths(prompt)
    fsdp = case.sizes["fsdp"]
    block, room = prompt_cache_blocks(prompts, generations, widths, case.slots, new, chunk, fsdp)
    return block, widths[0], block * room
