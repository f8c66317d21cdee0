"""The run: build the parts, then learn, one batch of experience at a time."""

import contextlib
import time
from collections import Counter
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.checkpoint import Checkpoints
from tunix_lite.config import RunConfig
from tunix_lite.distributed import gloo
from tunix_lite.distributed.join import heartbeat
from tunix_lite.distributed.stopping import COMPILATION, UPDATE, Stopping, StopRun
from tunix_lite.errors import RunFailed, error_context
from tunix_lite.learner.optim import learning_rate_at, make_optimizer, num_updates
from tunix_lite.learner.policy import DTYPES, STORED, Policy, make_policy
from tunix_lite.learner.step import make_train_step
from tunix_lite.models import source
from tunix_lite.models.attention import IMPLEMENTATIONS
from tunix_lite.models.lora import acting_params
from tunix_lite.planning import report
from tunix_lite.planning.at_start import (
    check_at_rest,
    check_fits,
    choose_micro_batch,
    memory_line,
    plan_of_this_run,
    training_programs,
)
from tunix_lite.planning.resolved import chooses_micro_batch, rollouts_of
from tunix_lite.rollout import memory
from tunix_lite.rollout.engine import MOST_SLOTS, make_generate, round_up_to_shards
from tunix_lite.rollout.settings import RolloutConfig
from tunix_lite.runs import resume
from tunix_lite.runs.evaluate import evaluate
from tunix_lite.runs.leaving import Unfinished, diverged, is_due, numbers, saved, unmeasured
from tunix_lite.runs.profiler import Profile
from tunix_lite.runs.reference import reference_of
from tunix_lite.runs.setup import (
    Parts,
    planning_case,
    prepare,
    run_metadata,
    startup_summary,
    with_micro_batch,
    write_fingerprint,
)
from tunix_lite.runs.throughput import Throughput, timed
from tunix_lite.tracking.console import Console
from tunix_lite.tracking.disk import disk_errors_explained
from tunix_lite.tracking.rundir import RunDir, Status, closing_with
from tunix_lite.tracking.tracker import JsonLines, TensorBoard, Tracker
from tunix_lite.types import Batch, Graded, Metrics, Params, TrainState


def train(run: RunConfig, folder: str | Path) -> TrainState:
    """Trains as `run` says, and leaves everything in `folder`. Returns the last state.

    Raises ConfigError, before anything is written, if the settings cannot be right; DiskError, with
    how to go on, if the folder can no longer be written. What micro_batch_size=auto tries is in
    train.log, whether anything fits or not.
    """
    return train_in_job(run, folder, time.time(), f"hydra.run.dir={folder}")[0]


def train_in_job(
    run: RunConfig, folder: str | Path, began: float, goes_on: str
) -> tuple[TrainState, Stopping]:
    """The same in a job that began then (time.time()) and goes on with this setting; and what may
    have stopped it."""
    run_dir = RunDir(Path(folder), jax.process_index())
    parts = prepare(run, run_dir)
    jax.set_mesh(parts.mesh)
    status = Status(run_dir)
    told = partial(
        disk_errors_explained,
        run_dir.path,
        status.progress,
        Checkpoints(run_dir.checkpoints).whole_steps,
    )
    with told(), contextlib.ExitStack() as outside:
        run_dir.make()
        gloo.log_into(run_dir.log)
        every, quiet = run.training.log_interval_steps, not run_dir.is_first
        console = Console(run_dir.log, run.training.max_steps, every, quiet=quiet)
        outside.push(closing_with(console.close))
        if chooses_micro_batch(run):
            console.busy("compiling, to choose training.micro_batch_size…")
            run, train_step = choose_micro_batch(run, parts.model, console.say)
            parts = with_micro_batch(parts, run, train_step)
        if not parts.overwrites_other_run(run_dir):
            write_fingerprint(run, parts, run_dir)
        status.about = run_metadata(run, parts)
        console.panel(*startup_summary(run, parts, run_dir))
        limits = run.training
        stopping = Stopping(
            limits.max_minutes, console.say, time.time() - began, limits.grace_seconds
        )
        try:
            with told(), contextlib.ExitStack() as closing:
                state = fit(run, parts, run_dir, console, status, stopping, closing)
        except StopRun as leave:
            state = leave.state
        except BaseException as error:
            # else found while loading: whatever the folder said before still holds
            if status.started:
                word = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                # perhaps of the same disk; the error under way says more
                with contextlib.suppress(OSError):
                    status.write(word, error=f"{type(error).__name__}: {error}")
                    console.say(f"{word} after step {status.steps}; {saved(run_dir)}", style="red")
            raise
        status.write("stopped" if status.stopped else "completed")
        for text, style in status.closing_lines(goes_on):
            console.say(text, style=style)
        return state, stopping


def fit(
    run: RunConfig,
    parts: Parts,
    run_dir: RunDir,
    console: Console,
    status: Status,
    stopping: Stopping,
    closing,
) -> TrainState:
    """The loop: experience, update, and what people want to know about it. `closing` shuts what it
    opens."""
    algorithm, task, settings = run.algorithm, parts.task, run.training
    optimizer = make_optimizer(run.optimizer, settings.max_steps)
    workers = task.with_workers(run.rewards, console.say, stopping)
    # they start while the model loads
    task = closing.enter_context(workers)
    check_at_rest(planning_case(run, parts, run.rollout), console.say)
    console.busy("loading the model…")
    state, frozen, policy, rollout, skipped = initial_state(run, parts, run_dir, optimizer, console)
    limit = settings.max_skipped_in_a_row
    start = int(state.step)
    begins = parts.resume_from != run_dir.checkpoints
    status.start(start, begins)
    # it gave up here, and nothing has changed since
    if skipped >= limit:
        raise FloatingPointError(diverged(start, skipped, parts.resume_from))
    # until all is on disk
    closing.enter_context(stopping)
    kept = settings.keep_checkpoints, settings.keep_best_checkpoints
    checkpoints = Checkpoints(run_dir.checkpoints, *kept, run_dir.point_latest_here)
    row = None if begins else unmeasured(run, run_dir, start)
    cut = None if begins or not start else start if row is None else start - 1
    trackers: list[Tracker] = (
        [JsonLines(run_dir.metrics, resume_at=cut)] if run_dir.is_first else []
    )
    if run.tracking.tensorboard and run_dir.is_first:
        trackers.append(TensorBoard(run_dir.path, resume_at=start or None))
    for opened in (checkpoints, *trackers):
        closing.push(closing_with(opened.close))
    trackers.append(console)
    lora = parts.model.lora
    rows, every = parts.rows, settings.sync_gradients_every
    train_step = parts.train_step
    if train_step is None:
        train_step = make_train_step(
            policy, algorithm, optimizer, rows.num_parts, lora, run.seed, every
        )
    seed_key, seconds = jax.random.key(run.seed), Counter()
    policy = timed(
        replace(
            policy, generate=partial(policy.generate, between_chunks=stopping.check_between_chunks)
        ),
        seconds,
    )
    profiled = settings.profile_communication and run_dir.is_first
    profile = Profile(run_dir.path if profiled else None, settings.max_steps - start)
    closing.callback(profile.close)
    throughput = Throughput.on(parts.mesh, parts.model.cfg, source.num_adapters(parts.model))

    def measure() -> Metrics:
        """Held-out accuracy now; {} if the run has no evaluation."""
        if not run.evaluation.num_examples:
            return {}
        began = time.perf_counter()
        acting = acting_params(frozen, state.params, lora)
        # a launcher's clock starts with the first beat, and before it all is compiled
        if status.steps > start:
            heartbeat("evaluating")
        seen = evaluate(policy, task, acting, seed_key, run.evaluation.num_examples)
        status.record_accuracy(seen["eval/accuracy"])
        return {**seen, "time/eval": time.perf_counter() - began}

    fingerprint_pending = parts.overwrites_other_run(run_dir)

    def save() -> None:
        """The state as it is now. See setup.write_fingerprint for its second half."""
        nonlocal fingerprint_pending
        checkpoints.save(state, accuracy, skipped)
        if fingerprint_pending:
            checkpoints.wait()
            write_fingerprint(run, parts, run_dir)
        fingerprint_pending, ends.on_disk = False, int(state.step)

    def tell(done: int, metrics: Metrics, graded: Graded | None) -> None:
        """What there is to know of a whole step."""
        _log(trackers, done, metrics)
        if graded is not None and is_due(
            done, run.tracking.samples_interval_steps, settings.max_steps
        ):
            _keep_samples(run, run_dir, console, done, graded)
        status.steps = done

    accuracy, updates = None, algorithm.updates_per_rollout
    ends = Unfinished(
        run, run_dir, status, console.say, lambda: state, save, checkpoints.wait, start
    )
    closing.enter_context(ends.kept(stopping))

    console.busy("compiling…")
    case = planning_case(run, parts, rollout)
    with stopping.uninterruptible(COMPILATION):
        plan = plan_of_this_run(case, training_programs(case, policy, train_step, state, frozen))
    if run_dir.is_first:
        report.write(plan, run_dir.path)
    console.say(memory_line(plan))
    check_fits(plan, console.say)
    console.say(str(throughput))
    stopping.may_stop = True
    if (start == 0 or row is not None) and (seen := measure()):
        _log(trackers, start, (row or {}) | seen)
        status.write("running")

    for step in range(start, settings.max_steps):
        began = time.perf_counter()
        seconds.clear()
        metrics: Metrics = {}
        with profile.step(step - start):
            if step % updates == 0:
                key = jax.random.fold_in(seed_key, step)
                acting = acting_params(frozen, state.params, lora)
                with error_context(f"step {step + 1}", RunFailed):
                    examples, dropped = task.batch(parts.batch.prompts, run.seed, step // updates)
                    batch, metrics, graded = algorithm.collect(policy, task, acting, examples, key)
                if task.long_prompts == "drop":
                    metrics["prompts/dropped"] = dropped
                laid_out, _ = rows.lay_out(batch)
                with stopping.uninterruptible(COMPILATION):
                    # here: compiling is not updating
                    update = train_step.compiled(state, frozen, laid_out)
                if step == start:
                    profile.write_table(update, parts.mesh)
                stopping.check_before_update()
            collected, made = time.perf_counter(), num_updates(state.opt_state)
            stopping.may_stop = False
            with stopping.uninterruptible(UPDATE, times=updates - step % updates):
                state, learned = jax.block_until_ready(update(state, frozen, laid_out))
        metrics |= {name: float(value) for name, value in learned.items()}
        skipped = skipped + 1 if metrics["train/skipped"] else 0
        if skipped:
            _keep_skipped(run_dir, console, step + 1, metrics, batch)
        metrics["train/learning_rate"] = learning_rate_at(run.optimizer, settings.max_steps, made)
        metrics |= _timing(began, collected, time.perf_counter(), seconds)
        metrics |= throughput.metrics(batch, metrics["time/update"], metrics["time/step"])

        done, accuracy = step + 1, None
        can_end = stopping.may_stop = done % updates == 0
        stopping.has_learned = True
        ends.tell.append(partial(tell, done, metrics, graded))
        if is_due(done, run.evaluation.interval_steps, settings.max_steps):
            metrics |= measure()
        accuracy = metrics.get("eval/accuracy")
        ends.tell_now()
        checkpoints.check()
        heartbeat(f"step {done}")
        reason = stopping.reason() if can_end and done < settings.max_steps else None
        if can_end and skipped >= limit:
            unsaved = None
            try:
                save()
                checkpoints.wait()
            except OSError as error:
                unsaved = error
            raise FloatingPointError(diverged(done, skipped, run_dir.checkpoints, metrics, unsaved))
        saves = reason or is_due(done, settings.save_interval_steps, settings.max_steps)
        # who kills us leaves it so
        if saves or "eval/accuracy" in metrics:
            status.write("running")
        if saves:
            save()
        if reason:
            status.stopped = reason
            break
    return state


def initial_state(
    run: RunConfig, parts: Parts, run_dir: RunDir, optimizer, console
) -> tuple[TrainState, Params | None, Policy, RolloutConfig, int]:
    """What trains, the frozen base beside it (None without adapters), the policy that acts with
    both, how it samples, and how many updates in a row were skipped until now.

    The reference of the KL term (reference.py) is made of the weights as they are loaded, before a
    checkpoint is read.
    """
    model, dtype = parts.model, DTYPES[run.training.mixed_precision]
    with error_context("model.weights"):
        frozen, params = source.load_weights(model, run.seed, STORED[run.training.mixed_precision])
    with error_context("resume"):
        reference = reference_of(run_dir, parts.reference, model, dtype, frozen, params)
    state, skipped = resume.state_at_start(run, parts, optimizer, params, console)
    slots = round_up_to_shards(run.rollout.num_slots or min(MOST_SLOTS, parts.batch.sequences))
    acting, asked = acting_params(frozen, state.params, model.lora), rollouts_of(run, parts.batch)
    weights, why = memory.choose_weights(
        acting, model.cfg, dtype, run.generation, run.rollout, slots, asked
    )
    console.say(f"sampling: {slots} slots, {why}")
    rollout, tokenizer = replace(run.rollout, num_slots=slots, weights=weights), model.tokenizer
    ends = tokenizer.eos_ids, tokenizer.pad_id
    tp_reduce_dtype = jnp.dtype(run.training.tp_reduce_dtype)
    generate = make_generate(
        model.cfg, run.generation, *ends, dtype, rollout, tokenizer, tp_reduce_dtype
    )
    scoring = {"remat": run.training.remat, "attend": IMPLEMENTATIONS[parts.attention[0]]}
    scoring |= {
        "reduce_dtype": jnp.dtype(run.training.reduce_dtype),
        "tp_reduce_dtype": tp_reduce_dtype,
    }
    policy = make_policy(
        model.cfg, generate, run.learning_temperature, dtype, reference, parts.rows, **scoring
    )
    return state, frozen, policy, rollout, skipped


# ---- small print


def _keep_skipped(
    run_dir: RunDir, console: Console, step: int, metrics: Metrics, batch: Batch
) -> None:
    """The batch of an update that was not made, for whoever looks for the reason."""
    arrays = {field.name: getattr(batch, field.name) for field in fields(batch)}
    file = run_dir.write_skipped(
        step, {name: x for name, x in arrays.items() if isinstance(x, np.ndarray)}
    )
    console.say(f"step {step} skipped: {numbers(metrics)}; its batch is in {file}", style="red")


def _log(trackers: list[Tracker], step: int, metrics: Metrics) -> None:
    for tracker in trackers:
        tracker.log(step, metrics)


def _timing(began: float, collected: float, ended: float, seconds: Counter) -> Metrics:
    """Where the time went; of collecting, what sampling and the reference took."""
    return dict(seconds) | {
        "time/collect": collected - began,
        "time/update": ended - collected,
        "time/step": ended - began,
    }


def _keep_samples(
    run: RunConfig, run_dir: RunDir, console: Console, step: int, graded: Graded
) -> None:
    """All completions of this step to a file, and a few of them, best and worst, to the console."""
    rows = [
        {
            "prompt": graded.prompts[i],
            "completion": text,
            "extracted": graded.extracted[i],
            "correct": bool(graded.correct[i]),
            "reward": None if graded.dropped[i] else float(graded.rewards[i]),
        }
        for i, text in enumerate(graded.completions)
    ]
    run_dir.write_samples(step, rows)
    ranked = sorted(
        (row for row in rows if row["reward"] is not None), key=lambda row: -row["reward"]
    )
    places = (
        np.linspace(0, len(ranked) - 1, min(run.tracking.samples_shown, len(ranked)))
        .round()
        .astype(int)
    )
    console.samples(step, [ranked[i] for i in places])
