"""The run: build the parts, then learn, one batch of experience at a time."""

import contextlib
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite import __version__
from tunix_lite.checkpoint import Checkpoints
from tunix_lite.config import BatchPlan, ConfigError, RunConfig, at, plan_batch
from tunix_lite.evaluate import evaluate
from tunix_lite.models import decoder, hf, weights
from tunix_lite.models.decoder import ModelConfig
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.optim import describe, init_opt_state, learning_rate_at, make_optimizer
from tunix_lite.parallel.mesh import as_text, make_mesh, put
from tunix_lite.policy import Policy, make_policy
from tunix_lite.rollout.engine import make_generate
from tunix_lite.step import make_train_step
from tunix_lite.tasks.task import Judged, Task
from tunix_lite.tracking.console import Console, minutes
from tunix_lite.tracking.rundir import RunDir, Status
from tunix_lite.tracking.tracker import JsonLines, TensorBoard, Tracker
from tunix_lite.types import Batch, Metrics, TrainState

BUNDLED = Path(__file__).parent / "models" / "bundled"


@dataclass(frozen=True)
class Parts:
    """What a run is made of, once its settings have been found right."""

    cfg: ModelConfig
    folder: Path | None  # of the weights; None: random
    tokenizer: Tokenizer
    mesh: jax.sharding.Mesh
    batch: BatchPlan
    task: Task
    resume_from: Path | None  # a folder with checkpoints


def prepare(run: RunConfig, run_dir: RunDir) -> Parts:
    """Every check that needs files or devices. Raises ConfigError; compiles nothing and writes nothing."""
    with at("model.weights"):
        folder = None if run.model.weights == "random" else _folder(run.model.weights)
        cfg = hf.read_config(folder) if folder else run.model.architecture
        if folder:
            hf.check_weights(folder, cfg)
    with at("model.tokenizer" if folder is None else "model.weights"):
        tokenizer = Tokenizer.load(folder or _folder(run.model.tokenizer))
        if (top := max(*tokenizer.eos_ids, tokenizer.pad_id)) >= cfg.vocab_size:
            raise ValueError(f"the tokenizer's token {top} is beyond the model's vocab_size={cfg.vocab_size}")
    with at("model.mesh_shape"):
        mesh = make_mesh(run.model.mesh_shape)
        weights.check_divisible(decoder.weights(cfg), mesh)
    batch = plan_batch(run, mesh.shape["fsdp"])
    task = Task(run.task, tokenizer, run.generation.max_prompt_length, run.generation.max_new_tokens)
    with at("hydra.run.dir"):
        run_dir.check()
    with at("task"):
        first = next(task.batches(batch.prompts, run.seed))
        asked = task.prompts([*task.held_out(run.evaluation.num_examples), *first])
        if (top := int(asked.tokens.max())) >= cfg.vocab_size:
            raise ValueError(f"a prompt holds token {top}, beyond the model's vocab_size={cfg.vocab_size}")
        if run.algorithm.needs_demonstrations:
            task.demonstrations(first)
    return Parts(cfg, folder, tokenizer, mesh, batch, task, _resume_from(run, run_dir))


def train(run: RunConfig, folder: str | Path) -> TrainState:
    """Trains as `run` says, and leaves everything in `folder`. Returns the last state.

    Raises ConfigError, before anything is written, if the settings cannot be right.
    """
    run_dir = RunDir(Path(folder))
    parts = prepare(run, run_dir)
    jax.set_mesh(parts.mesh)
    run_dir.make()
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
    state, policy = initial_state(run, parts, optimizer)
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
    train_step = make_train_step(policy, algorithm, optimizer, parts.batch.num_micro_batches)
    batches = task.batches(parts.batch.prompts, run.seed, start // algorithm.updates_per_rollout)
    seed_key = jax.random.key(run.seed)

    def measure() -> Metrics:
        """Held-out accuracy now; {} if the run has no evaluation."""
        if not run.evaluation.num_examples:
            return {}
        began = time.perf_counter()
        seen = evaluate(policy, task, state.params, seed_key, run.evaluation.num_examples, parts.batch.sequences)
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
            with at(f"step {step + 1}"):
                batch, metrics, judged = algorithm.collect(policy, task, state.params, next(batches), key)
            batch = placed(batch)
        collected = time.perf_counter()
        state, learned = train_step(state, batch)
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


def initial_state(run: RunConfig, parts: Parts, optimizer) -> tuple[TrainState, Policy]:
    """What trains, and the policy that acts with it. The reference is a copy of the weights it starts from."""
    dtype = {"fp32": jnp.float32, "bf16": jnp.bfloat16}[run.training.mixed_precision]
    if parts.folder is None:
        params = weights.init_params(decoder.weights(parts.cfg), jax.random.key(run.seed))
    else:
        with at("model.weights"):
            params = hf.load_params(parts.folder, parts.cfg)
    reference = jax.tree.map(jnp.copy, params) if run.algorithm.needs_reference else None
    generate = make_generate(parts.cfg, run.generation, parts.tokenizer.eos_ids, parts.tokenizer.pad_id, dtype)
    policy = make_policy(parts.cfg, generate, run.generation.temperature, dtype, reference)
    step = put(np.int32(0))
    return TrainState(step, params, init_opt_state(optimizer, params)), policy


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


def _folder(name: str) -> Path:
    return BUNDLED if name == "bundled" else Path(name)


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
    devices, table = parts.mesh.devices.ravel(), decoder.weights(parts.cfg)
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
        (
            "model",
            f"{weights.num_params(table):,} parameters, weights {run.model.weights}, {run.training.mixed_precision}",
        ),
        ("batch", str(parts.batch)),
        ("lengths", f"prompt up to {width[0]} tokens, completion up to {width[1]}"),
        ("optimizer", f"{optimizer}, {run.training.max_steps} steps{resume}"),
        ("outputs", f"{run_dir.path}" + ("  (tensorboard --logdir outputs/)" if run.tracking.tensorboard else "")),
    ]


def _provenance(run: RunConfig, parts: Parts) -> dict:
    return {
        "seed": run.seed,
        "mesh": dict(parts.mesh.shape),
        "batch": str(parts.batch),
        "parameters": weights.num_params(decoder.weights(parts.cfg)),
        "versions": {"tunix_lite": __version__, "jax": jax.__version__, "python": platform.python_version()},
    }


def _say_goodbye(console: Console, run_dir: RunDir, status: Status) -> None:
    if status.eval:
        first, last = (status.eval[k]["accuracy"] for k in ("first", "last"))
        console.say(f"held-out accuracy {first:.1%} → {last:.1%}", style="bold green")
    console.say(f"{status.steps} steps in {minutes(status.seconds)}; everything is in {run_dir.path}")
