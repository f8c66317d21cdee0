"""The run: build the parts, then learn, one batch of experience at a time."""

import contextlib
import json
import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite import __version__
from tunix_lite.checkpoint import Checkpoints
from tunix_lite.config import BatchPlan, ConfigError, RunConfig, at, plan_batch
from tunix_lite.evaluate import evaluate
from tunix_lite.models import decoder, source, weights
from tunix_lite.models.lora import attached
from tunix_lite.models.source import Source
from tunix_lite.optim import describe, init_opt_state, learning_rate_at, make_optimizer
from tunix_lite.parallel.mesh import as_text, make_mesh, put
from tunix_lite.policy import DTYPES, Policy, make_policy
from tunix_lite.rollout import memory
from tunix_lite.rollout.engine import MOST_SLOTS, in_shards, make_generate
from tunix_lite.step import make_train_step
from tunix_lite.tasks.task import Judged, Task
from tunix_lite.tracking.console import Console, minutes
from tunix_lite.tracking.rundir import RunDir, Status
from tunix_lite.tracking.tracker import JsonLines, TensorBoard, Tracker
from tunix_lite.types import Batch, Metrics, Params, TrainState


@dataclass(frozen=True)
class Parts:
    """What a run is made of, once its settings have been found right."""

    model: Source
    mesh: jax.sharding.Mesh
    batch: BatchPlan
    task: Task
    resume_from: Path | None  # a folder with checkpoints


def prepare(run: RunConfig, run_dir: RunDir) -> Parts:
    """Every check that needs files or devices. Raises ConfigError; compiles nothing and writes nothing."""
    with at(""):  # the messages begin with the setting
        model = source.find(run.model)
    with at("model.mesh_shape"):
        mesh = make_mesh(run.model.mesh_shape)
        source.check_mesh(model, mesh)
    with at("generation"):
        check_generation(run, model)
    batch = plan_batch(run, mesh.shape["fsdp"])
    lengths = run.generation.max_prompt_length, run.generation.max_new_tokens
    task = Task(run.task, model.tokenizer, *lengths, run.generation.long_prompts)
    with at("hydra.run.dir"):
        run_dir.check()
    with at("task"):
        first, _ = task.batch(batch.prompts, run.seed, 0)
        asked = task.prompts([*task.held_out(run.evaluation.num_examples), *first])
        if (top := int(asked.tokens.max())) >= model.cfg.vocab_size:
            raise ValueError(f"a prompt holds token {top}, beyond the model's vocab_size={model.cfg.vocab_size}")
        if run.algorithm.needs_demonstrations:
            task.demonstrations(first)
    resume_from = _resume_from(run, run_dir)
    if resume_from is not None:
        with at("resume"):
            _check_same_model(source.settings_to_keep(run.model, model, run.seed)["model"], RunDir(resume_from.parent))
    with at(""):
        return Parts(source.fetch(model), mesh, batch, task, resume_from)


def check_generation(run: RunConfig, model: Source) -> None:
    """Raises ValueError for what a model cannot do, or what training would do wrongly."""
    settings, longest = run.generation, model.cfg.max_positions
    if (total := settings.max_prompt_length + settings.max_new_tokens) > longest:
        raise ValueError(
            f"max_prompt_length={settings.max_prompt_length} + max_new_tokens={settings.max_new_tokens} = {total} "
            f"tokens, and the model was made for {longest}"
        )
    settings.check_fits(model.cfg.vocab_size)
    if settings.temperature == 0:
        raise ValueError("temperature=0.0 must be above 0: a group needs completions that differ")


def train(run: RunConfig, folder: str | Path) -> TrainState:
    """Trains as `run` says, and leaves everything in `folder`. Returns the last state.

    Raises ConfigError, before anything is written, if the settings cannot be right.
    """
    run_dir = RunDir(Path(folder))
    parts = prepare(run, run_dir)
    jax.set_mesh(parts.mesh)
    run_dir.make()
    run_dir.write_model(source.settings_to_keep(run.model, parts.model, run.seed))
    status = Status(run_dir, _provenance(run, parts))
    console = Console(run_dir.log, run.training.max_steps, run.training.log_interval_steps)
    try:
        console.panel(*_panel(run, parts, run_dir))
        with contextlib.ExitStack() as closing:
            state = fit(run, parts, run_dir, console, status, closing)
    except BaseException as error:
        if status.started:  # else found while loading: whatever the folder said before still holds
            word = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            status.write(word, error=f"{type(error).__name__}: {error}")
            console.say(f"{word} after step {status.steps}; what was saved is in {run_dir.checkpoints}", style="red")
        raise
    else:
        status.write("completed")
        _say_goodbye(console, run_dir, status)
        return state
    finally:
        console.close()


def fit(run: RunConfig, parts: Parts, run_dir: RunDir, console: Console, status: Status, closing) -> TrainState:
    """The loop: experience, update, and what people want to know about it. `closing` shuts what it opens."""
    algorithm, task, settings = run.algorithm, parts.task, run.training
    optimizer = make_optimizer(run.optimizer, settings.max_steps)
    console.busy("loading the model…")
    state, frozen, policy = initial_state(run, parts, optimizer, console)
    if parts.resume_from is not None:
        state = _restore(parts.resume_from, state, console)
    start = int(state.step)
    status.start(start)
    checkpoints = Checkpoints(run_dir.checkpoints, settings.keep_checkpoints)
    trackers: list[Tracker] = [JsonLines(run_dir.metrics, resume_at=start or None)]
    trackers += [TensorBoard(run_dir.path, resume_at=start or None)] if run.tracking.tensorboard else []
    for opened in (checkpoints, *trackers):
        closing.callback(opened.close)
    trackers.append(console)
    lora = parts.model.lora
    train_step = make_train_step(policy, algorithm, optimizer, parts.batch.num_micro_batches, lora, run.seed)
    seed_key = jax.random.key(run.seed)

    def measure() -> Metrics:
        """Held-out accuracy now; {} if the run has no evaluation."""
        if not run.evaluation.num_examples:
            return {}
        began = time.perf_counter()
        acting = attached(frozen, state.params, lora)
        seen = evaluate(policy, task, acting, seed_key, run.evaluation.num_examples)
        status.saw(seen["eval/accuracy"])
        return {**seen, "time/eval": time.perf_counter() - began}

    console.busy("compiling…")
    if start == 0 and (seen := measure()):
        _log(trackers, 0, seen)

    for step in range(start, settings.max_steps):
        began = time.perf_counter()
        metrics: Metrics = {}
        if step % algorithm.updates_per_rollout == 0:
            key = jax.random.fold_in(seed_key, step)
            acting = attached(frozen, state.params, lora)
            with at(f"step {step + 1}"):
                number = step // algorithm.updates_per_rollout
                examples, dropped = task.batch(parts.batch.prompts, run.seed, number)
                batch, metrics, judged = algorithm.collect(policy, task, acting, examples, key)
            if task.long_prompts == "drop":
                metrics["prompts/dropped"] = dropped
            batch = placed(batch)
        collected = time.perf_counter()
        state, learned = train_step(state, frozen, batch)
        metrics |= {name: float(value) for name, value in learned.items()}
        if not np.isfinite([metrics["train/loss"], metrics["train/grad_norm"]]).all():
            raise FloatingPointError(_diverged(step + 1, metrics))
        metrics["train/learning_rate"] = learning_rate_at(run.optimizer, settings.max_steps, step)
        metrics |= _timing(began, collected, time.perf_counter(), batch)

        done = step + 1
        if _is_due(done, run.evaluation.interval_steps, settings.max_steps):
            metrics |= measure()
        _log(trackers, done, metrics)
        if judged is not None and _is_due(done, run.tracking.samples_interval_steps, settings.max_steps):
            _keep_samples(run, run_dir, console, done, judged)
        if _is_due(done, settings.save_interval_steps, settings.max_steps):
            checkpoints.save(state)
        status.steps = done
    return state


def initial_state(run: RunConfig, parts: Parts, optimizer, console) -> tuple[TrainState, Params | None, Policy]:
    """What trains, the frozen base beside it (None without adapters), and the policy that acts with both.

    The reference of the KL term is the base itself; without one, a copy of the weights that training starts from.
    """
    model, dtype = parts.model, DTYPES[run.training.mixed_precision]
    with at("model.weights"):
        frozen, params = source.load(model, run.seed)
    reference = None
    if run.algorithm.needs_reference:
        reference = jax.tree.map(jnp.copy, params) if frozen is None else frozen
    slots = in_shards(run.rollout.num_slots or min(MOST_SLOTS, parts.batch.sequences))
    acting = attached(frozen, params, model.lora)
    weights, why = memory.choose_weights(acting, model.cfg, dtype, run.generation, run.rollout, slots)
    console.say(f"sampling: {slots} slots, {why}")
    rollout, tokenizer = replace(run.rollout, num_slots=slots, weights=weights), model.tokenizer
    ends = tokenizer.eos_ids, tokenizer.pad_id
    generate = make_generate(model.cfg, run.generation, *ends, dtype, rollout, tokenizer)
    policy = make_policy(model.cfg, generate, run.generation.temperature, dtype, reference)
    step = put(np.int32(0))
    return TrainState(step, params, init_opt_state(optimizer, params)), frozen, policy


def placed(batch: Batch) -> Batch:
    """The batch on the mesh: rows divided over fsdp. What is there already stays."""
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else put(x, "batch", "seq"), batch)


# ---- small print


def _diverged(step: int, metrics: Metrics) -> str:
    numbers = ", ".join(f"{name} {metrics[name]}" for name in ("train/loss", "train/grad_norm"))
    return (
        f"step {step}: {numbers}. The update was not saved, so the newest checkpoint is good. A learning rate that is "
        "too high is the usual cause; next a reward or a loss of your own that divides by zero"
    )


def _is_due(step: int, every: int, last: int) -> bool:
    return step == last or bool(every and step % every == 0)


def _log(trackers: list[Tracker], step: int, metrics: Metrics) -> None:
    for tracker in trackers:
        tracker.log(step, metrics)


def _timing(began: float, collected: float, ended: float, batch: Batch) -> Metrics:
    tokens = int(np.asarray(batch.token_mask).sum())
    return {
        "time/collect": collected - began,
        "time/update": ended - collected,
        "time/step": ended - began,
        "perf/tokens_per_second": tokens / (ended - began),
    }


def _keep_samples(run: RunConfig, run_dir: RunDir, console: Console, step: int, judged: Judged) -> None:
    """All completions of this step to a file, and a few of them, best and worst, to the console."""
    rows = [
        {
            "prompt": judged.prompts[i],
            "completion": text,
            "extracted": judged.extracted[i],
            "correct": bool(judged.correct[i]),
            "reward": float(judged.rewards[i]),
        }
        for i, text in enumerate(judged.completions)
    ]
    run_dir.write_samples(step, rows)
    ranked = sorted(rows, key=lambda row: -row["reward"])
    places = np.linspace(0, len(ranked) - 1, min(run.tracking.samples_shown, len(ranked))).round().astype(int)
    console.samples(step, [ranked[i] for i in places])


def _resume_from(run: RunConfig, run_dir: RunDir) -> Path | None:
    resume, own = run.resume, Checkpoints(run_dir.checkpoints).latest_step() is not None
    with at("resume"):
        if own and resume != "auto":
            raise ValueError(f"{resume}, but {run_dir.path} already holds checkpoints; auto continues them")
        if resume == "none" or (resume == "auto" and not own):
            return None
        folder = run_dir.checkpoints if own else RunDir(Path(resume)).checkpoints
        if (step := Checkpoints(folder).latest_step()) is None:
            raise ValueError(f"{resume} holds no checkpoint; give auto, none, or the folder of a run that has one")
        if step % (updates := run.algorithm.updates_per_rollout):
            raise ValueError(f"the checkpoint of step {step} stands inside a rollout of updates_per_rollout={updates}")
        if step >= run.training.max_steps:
            raise ValueError(f"{folder} is at step {step} already; raise training.max_steps={run.training.max_steps}")
        return folder


def _check_same_model(ours: dict, earlier: RunDir) -> None:
    """Raises ValueError naming what differs: another base, or another scale of adapters, is another model."""
    ours, theirs = json.loads(json.dumps(ours)), earlier.read_model()["model"]
    for name in ("architecture", "lora"):
        for key, value in ours[name].items():
            if value != (there := (theirs.get(name) or {}).get(key)) and key != "dropout":
                raise ValueError(f"model.{name}.{key}={value!r}, but the run in {earlier.path} has {there!r}")


def _restore(folder: Path, state: TrainState, console: Console) -> TrainState:
    checkpoints = Checkpoints(folder)
    try:
        state = checkpoints.restore(state)
    except ValueError as error:
        first_line = str(error).strip().splitlines()[0][:300]
        raise ConfigError(f"resume: {folder} does not fit this run's model or optimizer: {first_line}") from error
    finally:
        checkpoints.close()
    console.say(f"resumed from step {int(state.step)} of {folder}")
    return state


def _panel(run: RunConfig, parts: Parts, run_dir: RunDir) -> tuple[str, list[tuple[str, str]]]:
    devices = parts.mesh.devices.ravel()
    width = run.generation.max_prompt_length, run.generation.max_new_tokens
    resume = "" if parts.resume_from is None else f", from the checkpoint in {parts.resume_from}"
    optimizer = describe(run.optimizer)
    return f"tunix_lite {__version__} · {type(run.algorithm).__name__} · {run.project_name}", [
        ("devices", f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}), jax {jax.__version__}"),
        (
            "mesh",
            ", ".join(f"{name}={size}" for name, size in parts.mesh.shape.items())
            + f" from {as_text(run.model.mesh_shape)}",
        ),
        ("model", f"{_size(parts.model)}, weights {run.model.weights}, {run.training.mixed_precision}"),
        ("batch", str(parts.batch)),
        ("lengths", f"prompt up to {width[0]} tokens, completion up to {width[1]}"),
        ("optimizer", f"{optimizer}, {run.training.max_steps} steps{resume}"),
        ("outputs", f"{run_dir.path}" + ("  (tensorboard --logdir outputs/)" if run.tracking.tensorboard else "")),
    ]


def _size(model: Source) -> str:
    total = f"{weights.num_params(decoder.weights(model.cfg)):,} parameters"
    if model.lora is None:
        return total
    frozen, trained = source.tables(model)
    return (
        f"{total} frozen in {model.lora.base} ({weights.num_bytes(frozen) / 1e6:,.1f} MB), "
        f"{weights.num_params(trained):,} in adapters of rank {model.lora.rank}"
    )


def _provenance(run: RunConfig, parts: Parts) -> dict:
    return {
        "algorithm": type(run.algorithm).__name__,
        "seed": run.seed,
        "mesh": dict(parts.mesh.shape),
        "batch": str(parts.batch),
        "parameters": weights.num_params(decoder.weights(parts.model.cfg)),
        "versions": {"tunix_lite": __version__, "jax": jax.__version__, "python": platform.python_version()},
    }


def _say_goodbye(console: Console, run_dir: RunDir, status: Status) -> None:
    if status.eval:
        first, last = (status.eval[k]["accuracy"] for k in ("first", "last"))
        console.say(f"held-out accuracy {first:.1%} → {last:.1%}", style="bold green")
    console.say(f"{status.steps} steps in {minutes(status.seconds)}; everything is in {run_dir.path}")
