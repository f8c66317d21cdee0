"""Watches a run: numbers, evaluation, logs, checkpoints, signals. `Watch.after` has their order: a
crash between two of them leaves no file that says something wrong."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from tunix_lite.basics.best import Best, is_lower_better
from tunix_lite.basics.errors import RunFailed, SamplerFault, error_context
from tunix_lite.basics.plain_text import without_secrets
from tunix_lite.basics.types import Metrics, TrainState
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.distributed.host_memory import give_back_freed_memory
from tunix_lite.distributed.join import heartbeat
from tunix_lite.distributed.stopping import COMPILATION, UPDATE
from tunix_lite.learner.optim import learning_rates, num_updates
from tunix_lite.models.source import weight_tables
from tunix_lite.models.weights import num_params
from tunix_lite.parallel.compiling import stopwatch, watching_compiler
from tunix_lite.planning.at_start import (
    check_fits,
    memory_line,
    plan_of_this_run,
)
from tunix_lite.planning.flops import Throughput
from tunix_lite.planning.hardware import of_device
from tunix_lite.planning.plans import Plans
from tunix_lite.runs.experience import Experience, ExperienceSource
from tunix_lite.runs.held_out_loss import held_out_loss
from tunix_lite.runs.learner import Learner
from tunix_lite.runs.leaving import (
    Unfinished,
    diverged,
    is_due,
    loss_numbers,
    unmeasured,
)
from tunix_lite.runs.profiler import Profile
from tunix_lite.runs.samples import (
    advantage_metrics,
    arrays_of_batch,
    evaluation_rows,
    from_best_to_worst,
    keep_samples,
    sample_rows,
)
from tunix_lite.runs.session import Session, closed_at_end
from tunix_lite.settings.config import plain
from tunix_lite.tracking.checkpoint import Checkpoints
from tunix_lite.tracking.console import OUR_PARTS
from tunix_lite.tracking.plugs import Guarded, TrackedRun
from tunix_lite.tracking.progress import compiling
from tunix_lite.tracking.rows import is_number
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.tracking.tracker import JsonLines, TensorBoard, Tracker

# Seconds from which on a program that a step had to compile is worth a line.
LONG_COMPILATION = 1.0
# Seconds after which an evaluation in the middle of a run says how far it is.
_EVALUATION_PATIENCE = 10.0
# Held-out completions that are shown before the first step, at most.
_HELD_OUT_SHOWN = 2


@dataclass(frozen=True)
class StepDone:
    """A step that is over. Do not keep it: the next update donates its state. Example: an observer
    `def rows(done): return {"my/rows": len(done.experience.batch.tokens)}`."""

    # updates so far, those that were skipped included: 1 after the first
    step: int
    state: TrainState
    experience: Experience
    # of the update, on the devices: train/loss and the like
    learned: Metrics
    is_last: bool

    @property
    def ends_rollout(self) -> bool:
        """Returns whether a run can resume here: the next update has experience of its own."""
        return self.experience.updates_left == 1


class Watch:
    """Everything around the loop: `before` it, `step` and `updating` around the parts of a step,
    and `after` a step. Example: `with watch.step(step): ...`, then `watch.after(StepDone(step + 1,
    ...))`."""

    def __init__(self, session: Session, learner: Learner, source: ExperienceSource):
        """Opens trackers, checkpoints and the profiler. Raises FloatingPointError if the run gave
        up at this step before, and nothing has changed since."""
        run = session.run
        run_dir = session.run_dir
        closing = session.closing
        self.session = session
        self.learner = learner
        self.source = source
        # the newest state, before the next update donates it
        self.state = session.state
        # the step that this invocation begins at
        self.start = int(session.state.step)
        # updates in a row that were not made, because a number was not finite
        self.skipped = session.skipped
        # the checkpoints of this folder are of another run until one of ours is whole
        self.is_fingerprint_pending = session.parts.overwrites_other_run(run_dir)
        # the best until now: that of an earlier start counts
        is_lower = is_lower_better(run.training.best_metric, run.training.best_is)
        self.best = session.status.best = Best(run.training.best_metric, is_lower)
        for row in allgather_values(run_dir.measured(self.best.metric, self.start))[0]:
            self.best.take(*row)
        session.status.start(self.start, session.begins_here)
        if self.skipped >= run.training.max_skipped_in_a_row:
            raise FloatingPointError(
                diverged(self.start, self.skipped, session.parts.resume_from)
            )

        # Signals count from here until everything is on the disk.
        closing.enter_context(session.stopping)
        how_many = (run.training.keep_checkpoints, run.training.keep_best_checkpoints)
        self.checkpoints = Checkpoints(
            run_dir.checkpoints, *how_many, self.best, run_dir.point_latest_here
        )
        closing.push(closed_at_end(self.checkpoints.close))
        # the metrics of step `start`, if its evaluation was cut short and is made now
        missing = None if session.begins_here else unmeasured(run, run_dir, self.start)
        self.row_without_evaluation = missing
        # Real tokens of all updates until now, prompts too. Counted before the line of this step
        # is taken back, to get its evaluation.
        self.num_tokens = 0
        if (earlier := session.parts.resume_from) is not None:
            counts = RunDir(earlier.parent).measured("train/num_tokens", self.start)
            self.num_tokens = int(
                max((count for _, count in counts if is_number(count)), default=0)
            )
        self.trackers = _open_trackers(session, self.start, is_measured=missing is None)

        # The rate of each update, the profiler, and what the seconds of a step are set against.
        resolved = learner.resolved
        self.learning_rate = learning_rates(resolved.optimizer, resolved.policy_updates)
        is_profiled = run.training.profile_communication and run_dir.is_first
        num_steps = run.training.max_steps - self.start
        self.profile = Profile(run_dir.path if is_profiled else None, num_steps)
        closing.callback(self.profile.close)
        model = session.parts.model
        # the mesh may take only some of the machine
        devices = session.parts.mesh.devices
        adapters = 0 if model.lora is None else num_params(weight_tables(model)[1])
        peaks = of_device(devices.flat[0])
        critic = resolved.needs.critic
        of_critic = critic is not None and critic.is_own
        self.throughput = Throughput(model.cfg, adapters, devices.size, peaks, of_critic)

        # An end before the last step keeps the last whole one.
        self.unfinished = Unfinished(
            session, lambda: self.state, self.save, self.checkpoints.wait, self.start
        )
        # entered last, so left first: what it saves needs all that was opened before
        closing.enter_context(self.unfinished.kept())

    def before(self, state: TrainState) -> None:
        """Compiles, writes plan.json, and evaluates where the start was not evaluated."""
        session = self.session
        console = session.console
        learner = self.learner

        # The plan, by the programs of this run, which compile now.
        to_compile = session.stopping.uninterruptible(COMPILATION)
        with compiling(console, "the update"), to_compile:
            plan = plan_of_this_run(
                learner.resolved, learner.policy, learner.train_step, state, learner.frozen
            )
        if session.run_dir.is_first:
            Plans((plan,)).write(session.run_dir.path)
        console.say(memory_line(plan))
        check_fits(plan, console.say)

        # The accuracy at the start, or the one that an earlier start did not come to.
        session.stopping.may_stop = True
        # A signal that came until now ends the run before the sampler is compiled.
        session.stopping.check_before_update()
        self.source.compile_ahead(state)
        session.stopping.check_before_update()
        if self.start == 0 or self.row_without_evaluation is not None:
            measured = self.evaluate(is_first=True)
            if measured:
                row = (self.row_without_evaluation or {}) | measured
                self.log(self.start, row)
                self.rank(self.start, row)
                session.status.write("running")
        # Patience may have run out before: the run that goes on ends at once, too.
        ended = self.best.ended_by(session.run.training.early_stopping_patience)
        session.status.early_stopping = ended
        session.stopping.stop_if(bool(ended))

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around collecting and the update of step `number`, from 0: the clock, and the trace."""
        # they are counted by step
        self.learner.seconds.clear()
        console = self.session.console
        if number == self.start:
            console.busy(f"step {number + 1}: collecting…")
        self._do(f"step {number + 1}: collecting")
        with (
            watching_compiler(self.compiling) as self._compiling,
            self.profile.step(number - self.start),
        ):
            # The update before may have freed its temporaries only after its state was there.
            self._give_back_memory()
            self._elapsed = stopwatch()
            yield
        # The update's temporaries, before an evaluation or a checkpoint takes memory of its own.
        self._give_back_memory()

    def compiling(self, program: str, seconds: float | None) -> None:
        """A `CompileWatcher`: names the program that a step waits for."""
        console = self.session.console
        if seconds is None:
            console.show(f"{self._doing}: compiling {program}")
            return
        console.show(self._doing)
        if seconds >= LONG_COMPILATION:
            console.say(f"{self._doing}: compiled {program}, {seconds:.1f} s")

    def _give_back_memory(self) -> None:
        # The programs of other devices take no memory of the host.
        if self.learner.resolved.platform == "cpu":
            give_back_freed_memory()

    def _do(self, text: str) -> None:
        """Shows the step's current activity."""
        self._doing = text
        self.session.console.show(text)

    @contextlib.contextmanager
    def updating(self, experience: Experience, update: jax.stages.Compiled) -> Iterator[None]:
        """Around the update alone: until it is done nothing can stop the run. Raises StopRun, on
        all processes, if one of them was asked to stop: nothing has changed yet."""
        stopping = self.session.stopping
        if int(self.state.step) == self.start:
            self.profile.write_table(update, self.session.parts.mesh)
        stopping.check_before_update()
        collected = self._elapsed()
        # what sets the learning rate of this update
        self._updates_before = num_updates(self.state.opt_state)
        stopping.may_stop = False
        self._do(f"step {int(self.state.step) + 1}: updating")
        self._give_back_memory()
        with stopping.uninterruptible(UPDATE, times=experience.updates_left):
            yield
        updated = self._elapsed()
        compiled = self._compiling()
        # without compiling, but for the whole step
        self._seconds = {
            "time/collect": collected,
            "time/update": updated - collected,
            "time/compile": compiled,
            "time/step": updated + compiled,
        }

    def rank(self, step: int, metrics: Metrics) -> bool:
        """Compares training.best_metric of this step with the best so far. Returns whether it is a
        new best. Raises RunFailed if something depends on it, and an evaluation does not have
        it."""
        name = self.best.metric
        if name not in metrics:
            if (
                self.session.run.training.ranks
                and name.startswith("eval/")
                and "time/eval" in metrics
            ):
                names = ", ".join(key for key in metrics if key.startswith("eval/"))
                raise RunFailed(
                    f"training.best_metric={name} is not measured; there is {names}"
                )
            return False
        # where processes differ, as in a metric of the user's, the first one decides for all
        return self.best.take(step, allgather_values(float(metrics[name]))[0])

    def after(self, done: StepDone) -> str | None:
        """Does everything that follows an update. Returns a reason to end the run; "" or None: it
        goes on.

        Metrics and their log, then peers and signals, then status and checkpoint. Raises
        FloatingPointError after training.max_skipped_in_a_row updates that were not finite, at the
        end of a rollout: it saves the state first, if it can. Raises SamplerFault if sampler and
        trainer disagree by more than training.max_sampler_gap, RunFailed if an observer or a reward
        fails, StopRun if a signal ends the evaluation."""
        session = self.session
        self.state = done.state
        metrics = self.numbers(done)

        # An end from here on keeps this step: it is logged even if its evaluation is cut short.
        session.stopping.may_stop = done.ends_rollout
        session.stopping.has_learned = True
        self.unfinished.pending.append(partial(self.log_step, done, metrics))
        self.check_sampler(done, metrics)
        if session.run.tracking.observers:
            metrics |= self.call_observers(done)
        last = session.run.training.max_steps
        if is_due(done.step, session.run.evaluation.interval_steps, last):
            metrics |= self.evaluate()
        is_new_best = self.rank(done.step, metrics)
        self.unfinished.log_pending()

        # Signs of life. `reason` asks all processes: each comes here at the end of a rollout.
        # a save that failed in the background is an error now, and not at the end of the run
        self.checkpoints.check()
        heartbeat(f"step {done.step}")
        reason = None
        if done.ends_rollout and not done.is_last:
            reason = session.stopping.reason()
        if done.ends_rollout and self.skipped >= session.run.training.max_skipped_in_a_row:
            # Too many in a row. The state is saved first; a disk that is full is the error then.
            self.save()
            self.checkpoints.wait()
            folder = session.run_dir.checkpoints
            raise FloatingPointError(diverged(done.step, self.skipped, folder, metrics))

        # The disk: status.json first, since a kill during the save leaves it as it is then.
        training = session.run.training
        ended = ""
        if done.ends_rollout and not reason and not done.is_last:
            ended = self.best.ended_by(training.early_stopping_patience)
        is_kept = is_new_best and training.keep_best_checkpoints and done.ends_rollout
        saves = (
            reason or ended or is_kept or is_due(done.step, training.save_interval_steps, last)
        )
        if saves or "time/eval" in metrics:
            session.status.write("running")
        if saves:
            self.save()
        session.status.stopped = reason
        session.status.early_stopping = ended
        return reason or ended

    # ---- numbers

    def numbers(self, done: StepDone) -> Metrics:
        """The metrics of a step: of collecting, of the update, and of the clock."""
        # a copy: the experience may be handed out again, and its metrics must stay those of
        # collecting
        metrics = dict(done.experience.metrics)
        metrics |= {name: float(value) for name, value in done.learned.items()}

        # An update that was not made leaves its batch behind for who looks for the reason.
        self.skipped = self.skipped + 1 if metrics["train/skipped"] else 0
        if self.skipped:
            arrays = arrays_of_batch(done.experience.batch)
            file = self.session.run_dir.write_skipped(done.step, arrays)
            text = f"step {done.step} skipped: {loss_numbers(metrics)}; its batch is in {file}"
            self.session.console.say(text, style="red")

        # What was learned from, as far as a rollout has not been looked at before.
        if done.experience.is_fresh:
            metrics |= advantage_metrics(done.experience.batch)
        # prompts too: they are computed as well
        self.num_tokens += int(np.asarray(done.experience.batch.token_mask).sum())
        metrics["train/num_tokens"] = self.num_tokens
        training = self.session.run.training
        if training.epochs is not None:
            metrics["train/epoch"] = training.epochs * done.step / training.max_steps

        # The learning rate of this update, and where the time went.
        metrics["train/learning_rate"] = self.learning_rate(self._updates_before)
        metrics |= self.learner.seconds | self._seconds
        metrics |= self.throughput.metrics(
            done.experience.batch, metrics["time/update"], metrics["time/step"]
        )
        return metrics

    def call_observers(self, done: StepDone) -> Metrics:
        """Returns the metrics of the user's observers. Raises RunFailed, naming the observer."""
        metrics = {}
        for name, observer in self.session.run.tracking.observers.items():
            with error_context(f"tracking.observers.{name}", RunFailed):
                returned = observer(done)
                if not isinstance(returned, dict):
                    kind = type(returned).__name__
                    raise ValueError(
                        f"it returned {kind}; return a dict like {{'my/number': 1.0}}"
                    )
                for key, value in returned.items():
                    is_key = isinstance(key, str) and key.count("/") == 1
                    if not is_key or key.split("/")[0] in OUR_PARTS:
                        raise ValueError(
                            f"{key!r} is not the name of a metric of yours: part/name, and the "
                            f"part is none of {', '.join(OUR_PARTS)}"
                        )
                    # an observer may give a number of numpy or jax
                    number = np.asarray(value)
                    if number.shape or not np.issubdtype(number.dtype, np.number):
                        raise ValueError(f"{key} is {type(value).__name__}; give one number")
                    metrics[key] = float(number)
        return metrics

    def evaluate(self, is_first: bool = False) -> Metrics:
        """What held-out examples say now; {} without an evaluation. is_first: before any step."""
        session = self.session
        if not session.run.evaluation.num_examples and not session.run.loss_examples:
            return {}
        began = time.perf_counter()
        # A launcher's clock starts with the first heartbeat, and before it everything compiles.
        if session.status.steps > self.start:
            heartbeat("evaluating")
        metrics = {}
        if session.run.loss_examples:
            session.console.show("measuring held-out loss")
            metrics |= held_out_loss(self.learner, session.task, self.state)
        if session.run.evaluation.num_examples:
            session.console.show("measuring held-out accuracy")
            metrics |= self.evaluate_completions(is_first)
        session.status.record(metrics)
        return {**metrics, "time/eval": time.perf_counter() - began}

    def evaluate_completions(self, is_first: bool) -> Metrics:
        """The metrics of completions of held-out prompts, which samples/ gets when it is due."""
        session = self.session
        step = int(self.state.step)
        patience = 0.0 if is_first else _EVALUATION_PATIENCE
        params = self.learner.acting_params(self.state)
        evaluation = self.source.evaluate(params, patience)
        every = session.run.tracking.samples_interval_steps
        if every and (step == 0 or is_due(step, every, session.run.training.max_steps)):
            session.run_dir.write_samples(step, evaluation_rows(evaluation), "evaluation")
        if every and is_first:
            # The first completions that anybody sees: a wrong template or reward shows here.
            # the table of settings should not scroll away
            shown = min(session.run.tracking.samples_shown, _HELD_OUT_SHOWN)
            rows = from_best_to_worst(sample_rows(evaluation.greedy), shown)
            session.console.samples(rows, with_rewards=True)
        return evaluation.metrics

    def check_sampler(self, done: StepDone, metrics: Metrics) -> None:
        """Raises SamplerFault where sampler and trainer disagree by more nats a token than
        training.max_sampler_gap, though only rounding may differ: in the first update of a rollout
        both have the same weights."""
        # With old_logprobs=sampled they differ on purpose, and so do tokens of earlier weights.
        limit = self.session.run.training.max_sampler_gap
        cuts_off = getattr(self.session.run.algorithm, "old_logprobs", "whole") == "sampled"
        is_stale = metrics.get("rollout/staleness_max", 0) > 0
        has_own = done.experience.is_fresh and "train/sampler_gap" in metrics
        if limit is None or cuts_off or is_stale or not has_own:
            return
        # where old_logprobs=rescored the trainer's own are compared before the update
        total = float(np.sum(done.experience.batch.loss_weight)) or 1.0
        gap = metrics.get("sampler/logprob_gap", metrics["train/sampler_gap"] / total)
        if gap > limit:
            self.log(done.step, metrics)
            raise SamplerFault(
                f"step {done.step}: the trainer gives the sampler's tokens log-probabilities that "
                f"differ by {gap:.3g} nats a token on average; training.max_sampler_gap={limit:g} "
                "is the limit, and rounding in bfloat16 is below 0.01. The weights that sample, or "
                "one of the two programs, are wrong, so the update is not kept. "
                "training.max_sampler_gap=null turns this check off"
            )

    # ---- what is written

    def log(self, step: int, metrics: Metrics) -> None:
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def log_step(self, done: StepDone, metrics: Metrics) -> None:
        """Logs a whole step: its metrics, and its completions when due."""
        self.log(done.step, metrics)
        graded = done.experience.graded
        run = self.session.run
        tracking = run.tracking
        every = tracking.samples_interval_steps
        if graded is not None and is_due(done.step, every, run.training.max_steps):
            rows = keep_samples(
                self.session.run_dir,
                self.session.console,
                done.step,
                graded,
                tracking.samples_shown,
                done.experience.batch,
            )
            for tracker in self.trackers:
                if hasattr(tracker, "log_samples"):
                    tracker.log_samples(done.step, rows)
        self.session.status.steps = done.step

    def save(self) -> None:
        """Saves a checkpoint of the state as it is now. The fingerprint is written after it, for
        the reason in Parts.write_fingerprint."""
        session = self.session
        step = int(self.state.step)
        overlap = self.learner.overlap
        in_flight = None if overlap is None else overlap.at(step)
        self.checkpoints.save(self.state, self.skipped, in_flight)
        if self.is_fingerprint_pending:
            self.checkpoints.wait()
            session.parts.write_fingerprint(session.run_dir)
        self.is_fingerprint_pending = False
        self.unfinished.on_disk = int(self.state.step)


def _open_trackers(session: Session, start: int, is_measured: bool) -> list[Tracker]:
    """Opens the trackers. Rows after `start` were written by a killed run; they are removed.
    is_measured: False if the line of step `start` is still to get its held-out accuracy. Raises
    RunFailed, naming the tracker of the settings that cannot be opened."""
    last_line = None
    if start and not session.begins_here:
        last_line = start if is_measured else start - 1
    trackers = []
    if session.run_dir.is_first:
        run = session.run
        folder = session.run_dir.path
        trackers.append(JsonLines(session.run_dir.metrics, resume_at=last_line))
        if run.tracking.tensorboard:
            trackers.append(TensorBoard(folder, resume_at=start or None))
        settings = without_secrets(plain(run))
        # such as 2026-11-22/14-36-08
        name = "/".join(folder.absolute().parts[-2:])
        about = TrackedRun(folder, name, run.project_name, settings, start or None)
        for name, open_tracker in run.tracking.trackers.items():
            where = f"tracking.trackers.{name}"
            try:
                opened = open_tracker(about)
            # What other projects raise is not known here.
            except Exception as error:
                raise RunFailed(f"{where}: {type(error).__name__}: {error}") from error
            trackers.append(Guarded(where, opened, session.console.say))
    for tracker in trackers:
        session.closing.push(closed_at_end(tracker.close))
    return [*trackers, session.console]
