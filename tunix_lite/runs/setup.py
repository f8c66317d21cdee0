"""Before a run: every check that needs files or devices, and what is said of it at its start."""

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from tunix_lite import __version__
from tunix_lite.checkpoint import Checkpoints
from tunix_lite.config import RunConfig
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.distributed.join import is_restart
from tunix_lite.errors import error_context
from tunix_lite.learner.micro_batches import Rows
from tunix_lite.learner.optim import describe
from tunix_lite.learner.policy import DTYPES
from tunix_lite.models import attention, decoder, source, weights
from tunix_lite.models.source import FoundModel
from tunix_lite.parallel.mesh import as_text, make_mesh, of_all, set_rules
from tunix_lite.planning.batch_size import (
    BatchPlan,
    check_residual,
    plan_batch,
    plan_rows,
    row_width,
)
from tunix_lite.planning.resolved import Case
from tunix_lite.rollout.settings import RolloutConfig
from tunix_lite.runs.fingerprint import check_same_run, fingerprint, read
from tunix_lite.runs.reference import Reference, find_reference
from tunix_lite.tasks.task import Task
from tunix_lite.tracking.rows import check_rows
from tunix_lite.tracking.rundir import RunDir, read_status


@dataclass(frozen=True)
class Parts:
    """What a run is made of, once its settings have been found right."""

    model: FoundModel
    mesh: jax.sharding.Mesh
    batch: BatchPlan
    rows: Rows  # how its sequences are laid out
    attention: tuple[str, str]  # the implementation, and in words why
    task: Task
    resume_from: Path | None  # a folder with checkpoints
    reference: Reference | None = None  # of the KL term; None: there is none
    differs: str = ""  # from the run that made them, in words
    data: str = ""  # what there is to know about the examples, where they are in memory
    damaged: str = ""  # files of the run that it goes on without, in words
    train_step: Callable | None = None  # where it has been compiled already, to see what fits

    def goes_on_differently(self, run_dir: RunDir) -> bool:
        """Whether what stands in the run's own checkpoints/ was made with other settings
        (resume.force)."""
        return bool(self.differs) and self.resume_from == run_dir.checkpoints


def prepare(run: RunConfig, run_dir: RunDir) -> Parts:
    """Every check that needs files or devices. Raises ConfigError; compiles nothing and writes
    nothing."""
    # the messages begin with the setting
    with error_context(""):
        model = source.locate(run.model)
    with error_context("model.mesh_shape"):
        mesh = make_mesh(run.model.mesh_shape, tp_across_nodes=run.launch.tp_across_nodes)
        set_rules(run.sharding)
        source.check_mesh(model, mesh)
    with error_context("generation"):
        check_generation(run, model)
    batch = plan_batch(run, mesh.shape["fsdp"])
    rows = plan_rows(run, batch)
    with error_context("sharding"):
        check_residual(run, rows, mesh.shape["tp"])
    with error_context("training"):
        attention = choose_attention(run, model, mesh, rows)
    lengths = run.generation.max_prompt_length, run.generation.max_new_tokens
    among = {
        "process": jax.process_index(),
        "num_processes": jax.process_count(),
        "share": allgather_values,
    }
    task = Task(run.task, model.tokenizer, *lengths, run.generation.long_prompts, **among)
    with error_context("hydra.run.dir"):
        run_dir.check()
    with error_context("task"):
        data = task.looked_through(run.algorithm.needs_demonstrations, run.evaluation.num_examples)
        first, _ = task.batch(batch.prompts, run.seed, 0)
        asked = task.prompts([*task.held_out(run.evaluation.num_examples), *first])
        if (top := max(map(max, asked))) >= model.cfg.vocab_size:
            raise ValueError(
                f"a prompt holds token {top}, beyond the model's vocab_size={model.cfg.vocab_size}"
            )
        if run.algorithm.needs_demonstrations:
            task.demonstrations(first)
    resume_from = resume_from_folder(run, run_dir)
    with error_context(""):
        model = source.download(model)
    differs = (
        "" if resume_from is None else check_resumed(run, model, batch, RunDir(resume_from.parent))
    )
    damaged = check_own_files(run, run_dir) if resume_from == run_dir.checkpoints else ""
    with error_context("resume"):
        reference = find_reference(run, model, run_dir, resume_from)
    found = {"reference": reference, "differs": differs, "data": data, "damaged": damaged}
    return Parts(model, mesh, batch, rows, attention, task, resume_from, **found)


def rebatched(parts: Parts, run: RunConfig, train_step: Callable) -> Parts:
    """The parts of a run whose micro-batch has been chosen since, by compiling this update of
    it."""
    batch = plan_batch(run, parts.mesh.shape["fsdp"])
    return replace(parts, train_step=train_step, batch=batch, rows=plan_rows(run, batch))


def case_of(run: RunConfig, parts: Parts, rollout: RolloutConfig) -> Case:
    """The run as planning sees it; rollout: with slots and weights as they have been chosen."""
    model, (attention, _), sizes = parts.model, parts.attention, dict(parts.mesh.shape)
    chosen = rollout.num_slots, attention, rollout.weights
    return Case(run, model.cfg, model.lora, sizes, parts.batch, parts.rows, *chosen)


def choose_attention(run: RunConfig, model: FoundModel, mesh, rows: Rows) -> tuple[str, str]:
    """The implementation of attention that training uses, and in words why. Raises ValueError."""
    width = row_width(run, rows)
    platform, dtype = mesh.devices.flat[0].platform, DTYPES[run.training.mixed_precision]
    shares = rows.packing == "prefix"
    return attention.choose(run.training.attention, model.cfg, platform, dtype, width, shares)


def check_generation(run: RunConfig, model: FoundModel) -> None:
    """Raises ValueError for what a model cannot do, or what training would do wrongly."""
    settings, longest = run.generation, model.cfg.max_positions
    if (total := settings.max_prompt_length + settings.max_new_tokens) > longest:
        raise ValueError(
            f"max_prompt_length={settings.max_prompt_length} + "
            f"max_new_tokens={settings.max_new_tokens} = {total} "
            f"tokens, and the model was made for {longest}"
        )
    settings.check_fits(model.cfg.vocab_size)
    if settings.temperature == 0 and not run.algorithm.needs_demonstrations:
        raise ValueError("temperature=0.0 must be above 0: a group needs completions that differ")


def resume_from_folder(run: RunConfig, run_dir: RunDir) -> Path | None:
    resume, own = run.resume.folder, Checkpoints(run_dir.checkpoints).latest_step() is not None
    with error_context("resume"):
        if own and resume == "none" and not is_restart():
            raise ValueError(
                f"none, but {run_dir.path} already holds checkpoints; auto continues them"
            )
        if not own and resume in ("auto", "none"):
            return None
        folder = run_dir.checkpoints if own else RunDir(Path(resume)).checkpoints
        if (step := Checkpoints(folder).latest_step()) is None:
            raise ValueError(
                f"{resume} holds no checkpoint; give auto, none, or the folder of a run that has "
                "one"
            )
        Checkpoints(folder).check_whole(step)
        if step % (updates := run.algorithm.updates_per_rollout):
            raise ValueError(
                f"the checkpoint of step {step} stands inside a rollout of "
                f"updates_per_rollout={updates}"
            )
        last = run.training.max_steps
        # our own last one: nothing to do, and nothing wrong
        if step > last or (step == last and not own):
            raise ValueError(
                f"{folder} is at step {step} already; raise "
                f"training.max_steps={run.training.max_steps}"
            )
        return folder


def check_own_files(run: RunConfig, run_dir: RunDir) -> str:
    """What of the run's own files it goes on without, in words. Raises ConfigError if that needs
    resume.force.

    Its numbers do not depend on them. But metrics.jsonl promises every step, so a run does not go
    on in silence where one is missing; of status.json it says what begins anew.
    """
    _, _, began, wrong = read_status(run_dir.status)
    found = (
        [f"{wrong}: its seconds count from now, its accuracies are those of metrics.jsonl"]
        if wrong
        else []
    )
    with error_context("resume"):
        try:
            check_rows(run_dir.metrics, Checkpoints(run_dir.checkpoints).latest_step(), began)
        except ValueError as error:
            if not run.resume.force:
                raise ValueError(
                    f"{error}. Put the file back from a copy; or resume.force=true goes on with "
                    "the steps that can be "
                    "read, and keeps what cannot be in metrics.damaged-1.jsonl"
                ) from error
            found.append(f"{error}: what can be read of it goes on")
    return "; ".join(found)


def check_resumed(run: RunConfig, model: FoundModel, batch: BatchPlan, earlier: RunDir) -> str:
    """What differs from the run whose checkpoint this one goes on from, and may. Raises ConfigError
    if it may not."""
    with error_context("resume"):
        try:
            theirs = read(earlier.fingerprint)
        except ValueError as error:
            if not run.resume.force:
                raise ValueError(
                    f"{error}; resume.force=true goes on from them all the same"
                ) from error
            return str(error)
        ours = json.loads(json.dumps(fingerprint(run, model, batch.prompts)))
        return check_same_run(ours, theirs, earlier.path, run.resume.force)


def sign(run: RunConfig, parts: Parts, run_dir: RunDir) -> None:
    """Says in the folder what makes its checkpoints.

    Where others are there already, not before the first of ours is whole: until then their run must
    be able to go on, and if we are killed in between, ours is taken for theirs, which locks nobody
    out.
    """
    run_dir.write_json(run_dir.fingerprint, fingerprint(run, parts.model, parts.batch.prompts))
    run_dir.write_model(source.settings_to_keep(run.model, parts.model, run.seed))


def panel(run: RunConfig, parts: Parts, run_dir: RunDir) -> tuple[str, list[tuple[str, str]]]:
    devices = parts.mesh.devices.ravel()
    width = run.generation.max_prompt_length, run.generation.max_new_tokens
    resume = "" if parts.resume_from is None else f", from the checkpoint in {parts.resume_from}"
    optimizer = describe(run.optimizer)
    return f"tunix_lite {__version__} · {type(run.algorithm).__name__} · {run.project_name}", [
        (
            "devices",
            f"{of_all(parts.mesh)} x {devices[0].device_kind} ({devices[0].platform}), jax "
            f"{jax.__version__}",
        ),
        (
            "mesh",
            ", ".join(f"{name}={size}" for name, size in parts.mesh.shape.items())
            + f" from {as_text(run.model.mesh_shape)}",
        ),
        (
            "model",
            f"{_size(parts.model)}, weights {run.model.weights}, {run.training.mixed_precision}",
        ),
        *([("reference", parts.reference.words)] if parts.reference else []),
        ("batch", f"{parts.batch}{_packed(parts)}"),
        *([("data", parts.data)] if parts.data else []),
        ("attention", ": ".join(parts.attention)),
        ("lengths", f"prompt up to {width[0]} tokens, completion up to {width[1]}"),
        ("optimizer", f"{optimizer}, {run.training.max_steps} steps{resume}"),
        (
            "outputs",
            f"{run_dir.path}"
            + ("  (tensorboard --logdir outputs/)" if run.tracking.tensorboard else ""),
        ),
    ]


def _packed(parts: Parts) -> str:
    rows = parts.rows
    if rows.packing == "none":
        return ""
    at_once = f"{rows.rows_per_part} rows of {rows.width} tokens x {parts.batch.fsdp} fsdp at once"
    return f", packed ({rows.packing}), {at_once}"


def _size(model: FoundModel) -> str:
    total = f"{weights.num_params(decoder.weights(model.cfg)):,} parameters"
    if model.lora is None:
        return total
    frozen, trained = source.tables(model)
    return (
        f"{total} frozen in {model.lora.base} ({weights.num_bytes(frozen) / 1e6:,.1f} MB), "
        f"{weights.num_params(trained):,} in adapters of rank {model.lora.rank}"
    )


def provenance(run: RunConfig, parts: Parts) -> dict:
    return {
        "algorithm": type(run.algorithm).__name__,
        "seed": run.seed,
        "mesh": dict(parts.mesh.shape),
        "batch": str(parts.batch),
        "parameters": weights.num_params(decoder.weights(parts.model.cfg)),
        "versions": {
            "tunix_lite": __version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        },
    }
