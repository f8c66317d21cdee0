"""Prepares a run: every check that needs files or devices, and the summary shown at its start."""

import contextlib
import json
import platform
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import jax

from tunix_lite import __version__
from tunix_lite.algorithms.objective import described
from tunix_lite.basics.addresses import shown_place
from tunix_lite.basics.errors import ConfigError, error_context
from tunix_lite.basics.plain_text import counted, device_name
from tunix_lite.basics.untrusted import as_path
from tunix_lite.distributed.join import is_restart
from tunix_lite.learner.optim import describe
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models import decoder, sizes, source, weights
from tunix_lite.models.hub import is_hub_name
from tunix_lite.models.source import FoundModel
from tunix_lite.parallel.mesh import (
    as_text,
    devices_taken,
    make_mesh,
    set_rules,
    split_devices,
)
from tunix_lite.planning.packing_choice import AUTO, with_packing
from tunix_lite.rewards.scores import field_of
from tunix_lite.runs.fingerprint import (
    HUB_SETTINGS,
    check_same_run,
    fingerprint,
    packing_of,
    read_fingerprint,
    with_commits_of,
)
from tunix_lite.runs.reference import Reference, find_reference
from tunix_lite.settings.batch_size import BatchPlan
from tunix_lite.settings.config import EVALUATED, RunConfig
from tunix_lite.settings.resolved_run import (
    ResolvedRun,
    resolve_run,
    trained_architecture,
)
from tunix_lite.tasks.check_rows import check_all_rows, held_out_in_training, measured_rows
from tunix_lite.tasks.hub_rows import is_hub
from tunix_lite.tasks.messages import fields_of
from tunix_lite.tasks.preferences import is_chosen
from tunix_lite.tasks.reward_models import ScoringModel
from tunix_lite.tasks.row_files import place_of
from tunix_lite.tasks.task import Reward, Task, TaskLengthsConfig
from tunix_lite.tasks.try_rewards import failing_functions
from tunix_lite.tracking.checkpoint import Checkpoints
from tunix_lite.tracking.progress import Progress, StandardError
from tunix_lite.tracking.rows import check_rows
from tunix_lite.tracking.rundir import RunDir, read_status


@dataclass(frozen=True)
class Parts:
    """The components of a run whose settings are checked. `find_parts` gives it without a folder,
    `prepare` adds what the folder says. Example: `parts = prepare(run, RunDir(folder))`, then
    `jax.set_mesh(parts.mesh)`."""

    model: FoundModel
    mesh: jax.sharding.Mesh
    # values derived from the settings on the mesh: batch, rows, slots, attention
    resolved: ResolvedRun
    task: Task
    # facts about the examples for the start-up summary; empty where they are not in memory
    data: str = ""
    # the folder of checkpoints to resume from; None: the run starts from step 0
    resume_from: Path | None = None
    # the reference of the KL term; None: there is no KL term
    reference: Reference | None = None
    # text: settings that differ from those of the run that made the checkpoints
    differs: str = ""
    # text: damaged files of the run's folder, which the run goes on without
    damaged: str = ""
    # models that only score, by name, such as a teacher or a reward model
    frozen_models: dict[str, FoundModel] = field(default_factory=dict)
    # text: rewards that fail on made-up completions, where the settings let the run go on
    failing: str = ""
    # the mesh of sampling on devices of its own (rollout.mesh_shape); None: there is none
    rollout_mesh: jax.sharding.Mesh | None = None

    @property
    def batch(self) -> BatchPlan:
        """Returns the batch of an update: its prompts, completions and micro-batches."""
        return self.resolved.batch

    @property
    def rows(self) -> RowLayout:
        """Returns the layout of a batch's sequences in rows."""
        return self.resolved.rows

    def overwrites_other_run(self, run_dir: RunDir) -> bool:
        """Returns whether the run's own checkpoints had other settings (resume.force=true)."""
        return bool(self.differs) and self.resume_from == run_dir.checkpoints

    @property
    def metadata(self) -> dict:
        """Returns the facts about the run that status.json holds beside its progress."""
        run = self.resolved.run
        task_source = self.task.config.source
        return {
            "algorithm": type(run.algorithm).__name__,
            "seed": run.seed,
            "mesh": dict(self.mesh.shape),
            "batch": str(self.batch),
            "parameters": weights.num_params(decoder.weights(self.model.cfg)),
            # of adapters, those alone
            "trained_parameters": weights.num_params(source.weight_tables(self.model)[1]),
            "data": {
                # null: of a stream nobody has counted them
                "train": len(task_source.train)
                if isinstance(task_source.train, Sized)
                else None,
                "held_out": len(task_source.held_out),
                # null: not looked for, since the examples are not in memory
                "held_out_in_train": held_out_in_training(self.task),
            },
            "versions": {
                "tunix_lite": __version__,
                "jax": jax.__version__,
                "python": platform.python_version(),
            },
        }

    def write_fingerprint(self, run_dir: RunDir) -> None:
        """Write into the folder which run makes its checkpoints: fingerprint.json, model.json, and
        the text of the chat template. Where the folder holds checkpoints of another run, call it
        when our first one is whole: until then the other run must be able to go on. A kill in
        between leaves our checkpoint under their fingerprint; both runs can still resume."""
        run = self.resolved.run
        with error_context(""):
            run_dir.write_json(run_dir.fingerprint, _fingerprint_of(self))
            template = self.model.tokenizer.template
            if run_dir.is_first:
                run_dir.chat_template.unlink(missing_ok=True)
            if run_dir.is_first and template is not None:
                run_dir.chat_template.write_text(template.text, encoding="utf-8")
            kept = source.settings_to_keep(run.model, self.model, run.seed)
            run_dir.write_json(run_dir.path / RunDir.MODEL, kept)

    def summary(self, run_dir: RunDir) -> tuple[str, list[tuple[str, str]]]:
        """The title and the rows, (name, text) each, of the panel at the start of a run."""
        resolved = self.resolved
        run = resolved.run

        def size(model: FoundModel) -> str:
            total = f"{weights.num_params(decoder.weights(model.cfg)):,} parameters"
            if model.lora is None:
                return total
            frozen, trained = source.weight_tables(model)
            return (
                f"{total} frozen in {model.lora.base} ({weights.num_bytes(frozen) / 1e6:,.1f} MB), "
                f"{weights.num_params(trained):,} in adapters of rank {model.lora.rank}"
            )

        def because(text: str) -> str:
            return f" ({text})" if text else ""

        # The machine.
        device = self.mesh.devices.flat[0]
        kind = device_name(device.device_kind, device.platform)
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        rows = [
            ("devices", f"{devices_taken(self.mesh)} x {kind}, jax {jax.__version__}"),
            ("mesh", f"{axes} from {as_text(run.model.mesh_shape)}"),
        ]
        if self.rollout_mesh is not None:
            axes = ", ".join(
                f"{name}={size}" for name, size in self.rollout_mesh.shape.items()
            )
            count = self.rollout_mesh.size
            rows.append(("sampling", f"{axes} on {count} x {kind}, after those of the mesh"))

        # What trains, on what.
        precision = f"{run.training.mixed_precision}{because(resolved.precision_reason)}"
        precision += float32_products(run.training.mixed_precision, device.platform)
        rows.append(("model", f"{size(self.model)}, weights {run.model.weights}, {precision}"))
        if run.model.target_params is not None:
            rows.append(("shape", sizes.shape_line(self.model.cfg)))
        if self.reference:
            rows.append(("reference", self.reference.words))
        if run.model.chat_template or run.model.template:
            sets = [f"{name}={value}" for name, value in run.model.template.items()]
            where = self.model.tokenizer.template.where
            rows.append(("template", ", ".join([where, *sets])))
        for name, model in self.frozen_models.items():
            storage = resolved.frozen_models[name].storage
            rows.append((name, f"{size(model)}, weights {model.name}, kept as {storage}"))
        rows += resolved.rows_of_critic
        layout = self.rows
        packed = ""
        if layout.packing != "none":
            times = (
                f"{layout.num_micro_batches} passes of "
                if layout.num_micro_batches > 1
                else ""
            )
            plural = "s" if layout.rows_per_micro_batch > 1 else ""
            counts = f"{layout.rows_per_micro_batch} row{plural} of {layout.width} tokens"
            where = " a shard" if self.batch.fsdp > 1 else ""
            packed = f", packed ({layout.packing}): {times}{counts}{where}"
        rows.append(("batch", f"{self.batch}{packed}"))
        if resolved.packing_reason:
            rows.append(("packing", resolved.packing_reason))
        if self.data:
            rows.append(("data", self.data))
        rows.append(("attention", f"{resolved.attention}: {resolved.attention_reason}"))
        prompt, new = resolved.lengths
        is_usual = run.task.lengths == TaskLengthsConfig(prompt, new)
        lengths = f"prompt up to {prompt} tokens, completion up to {new}"
        lengths += because("auto: those of the task" if is_usual else "")
        if run.task.packs_rows:
            lengths = f"rows of {prompt + new} tokens, attention {run.task.attention}"
        rows.append(("lengths", lengths))
        if run.rollout.is_stale:
            prompts = self.batch.prompts
            overlap = "one_step: the next batch is sampled beside the update"
            if run.rollout.overlap == "carry":
                overlap = (
                    f"carry: {prompts * (run.rollouts_behind + 1)} prompts in flight, {prompts} an "
                    f"update; tokens are up to {run.rollout.max_staleness} updates old"
                )
            rows.append(("overlap", overlap))

        # What is minimised, how long, and where to.
        if objective := described(run.algorithm):
            rows.append(("objective", objective))
        max_steps = run.training.max_steps
        rate = describe(run.optimizer, self.batch.fsdp) + because(resolved.rate_reason)
        begins = f", from the checkpoint in {self.resume_from}" if self.resume_from else ""
        epochs = run.training.epochs
        of_epochs = f" ({counted(epochs, 'epoch')} of {max_steps // epochs})" if epochs else ""
        rows.append(("optimizer", f"{rate}, {counted(max_steps, 'step')}{of_epochs}{begins}"))
        all_runs = "outputs/" if run_dir.path.parts[0] == "outputs" else run_dir.path
        viewer = f"  (tensorboard --logdir {all_runs})" if run.tracking.tensorboard else ""
        rows.append(("outputs", f"{shown_place(run_dir.path)}{viewer}"))
        algorithm = type(run.algorithm).__name__
        return f"tunix_lite {__version__} · {algorithm} · {run.project_name}", rows


def prepare(
    run: RunConfig, run_dir: RunDir, checked: Parts | None = None, downloads: bool = True
) -> Parts:
    """The parts of a run that will write to this folder, and every check that needs files or
    devices. Raises ConfigError.

    checked: the result of an earlier call for the same run in this process, such as the check
    before Hydra makes a folder. Loads no weights and makes no folder. It calls plain functions
    among the user's rewards, and compiles small programs where attention tries cuDNN (NVIDIA). It
    downloads the files of a hub model after everything else has been found right. To see whether a
    folder can be written, it writes and removes a small file there. downloads: False leaves weights
    of the hub where they are, and finds no reference: for a look at the run."""
    names = [getattr(run.task, name, None) for name in HUB_SETTINGS]
    earlier = resume_from_folder(run, run_dir) if any(map(is_hub, names)) else None
    if earlier is not None:
        # The commits of the hub's data that were read before: somebody may have changed the data
        # since. check_resumed says what is wrong with the file.
        with contextlib.suppress(ValueError):
            theirs = read_fingerprint(RunDir(earlier.parent).fingerprint)
            run = replace(run, task=with_commits_of(theirs, run.task))
    parts = find_parts(run) if checked is None else checked
    if checked is None and jax.process_index() == 0:
        parts = replace(parts, failing=_failing_rewards(parts))
    # this process may have looked at other runs since then, as in a sweep
    set_rules(run.sharding)
    with error_context("hydra.run.dir"):
        run_dir.check()
    resume_from = resume_from_folder(parts.resolved.run, run_dir)
    parts = with_packing_as_before(run, replace(parts, resume_from=resume_from))
    run = parts.resolved.run

    if downloads:
        # All weights come to this machine.
        with error_context(""):
            model = source.download(parts.model)
        frozen_models = download_frozen(run.scoring_models, parts.frozen_models)
        parts = replace(parts, model=model, frozen_models=frozen_models)

    # The run's numbers do not depend on its own files. But metrics.jsonl promises every step, so a
    # run does not go on in silence where one is missing. If status.json is damaged, it says which
    # counts begin anew.
    if resume_from is not None:
        differs = check_resumed(parts, RunDir(resume_from.parent), downloads)
        parts = replace(parts, differs=differs)
    if resume_from == run_dir.checkpoints:
        parts = replace(parts, damaged=_damaged_files(run_dir, run.resume.force))
    if not downloads:
        return parts
    with error_context("resume"):
        reference = find_reference(run, parts.model, run_dir, resume_from)
    return replace(parts, reference=reference)


def _failing_rewards(parts: Parts) -> str:
    """Calls the user's rewards on made-up completions of an example, and says which of them fail.
    Raises ConfigError where the settings do not let the run go on without them."""
    run = parts.resolved.run
    if run.algorithm.needs.is_sampled:
        example = parts.task.batch(parts.batch.prompts, run.seed, 0)[0]
    elif run.evaluation.num_examples:
        example = parts.task.held_out(1)[0]
    else:
        return ""
    group = getattr(run.algorithm, "num_generations", 1)
    failing = failing_functions(run.task, example, group, run.rewards)
    if failing and run.rewards.on_error == "raise":
        raise ConfigError(
            f"task: tried on made-up completions before the run: {failing}; "
            "rewards.on_error=zero or drop continues without it"
        )
    return failing


def _damaged_files(run_dir: RunDir, force: bool) -> str:
    """Says what is damaged in the folder of a run that goes on there. Raises ConfigError where a
    step is missing in metrics.jsonl, unless resume.force=true."""
    _, _, began, damage = read_status(run_dir.status)
    notes = []
    if damage:
        notes.append(
            f"{damage}: seconds are counted from now on, and accuracies are those of metrics.jsonl"
        )
    try:
        check_rows(run_dir.metrics, Checkpoints(run_dir.checkpoints).latest_step(), began)
    except ValueError as error:
        if not force:
            raise ConfigError(
                f"resume: {error}. Put the file back from a copy; or resume.force=true goes on "
                "with the steps that can be read, and keeps what cannot be in "
                "metrics.damaged-1.jsonl"
            ) from error
        notes.append(f"{error}: what can be read of it goes on")
    return "; ".join(notes)


def find_parts(run: RunConfig) -> Parts:
    """Finds the components of a run that need no run folder. Raises ConfigError. Of a hub model it
    downloads config.json and the tokenizer, not the weights. Makes the run's sharding rules those
    of the process."""
    # Messages begin with the setting. A tracker may lack its package.
    for name, open_tracker in run.tracking.trackers.items():
        if (check := getattr(open_tracker, "check", None)) is not None:
            with error_context(f"tracking.trackers.{name}"):
                check()
    with error_context(""):
        model = source.locate(run.model)
        cfg = trained_architecture(run.model, model.cfg, run.algorithm.needs)
        model = replace(model, cfg=cfg)
    shape = run.model.mesh_shape
    own_shape = run.rollout.mesh_shape
    rollout_mesh = None
    if own_shape is not None:
        with error_context("rollout.mesh_shape"):
            learning, sampling = split_devices(shape, own_shape, jax.devices())
            mesh = make_mesh(shape, learning)
            rollout_mesh = make_mesh(own_shape, sampling)
    else:
        with error_context("model.mesh_shape"):
            mesh = make_mesh(shape, tp_across_nodes=run.launch.tp_across_nodes)
    set_rules(run.sharding)
    frozen_models = locate_frozen(run.scoring_models, model)

    task = run.task.task(
        model.tokenizer,
        run.generation.max_prompt_length,
        run.generation.max_new_tokens,
        run.generation.long_prompts,
        learned=run.algorithm.needs.demonstrations,
        last_batch=None if run.training.epochs is None else run.training.last_batch,
    )
    # of text, with its tokens
    run = replace(run, task=task.config)
    resolved = with_packing(run, _resolver(model, mesh, frozen_models))
    if run.task.packs_rows:
        with error_context("task"), Progress(StandardError(), task.config.source.doing):
            task.describe()
            # a short text may hold out nothing
            rows = min(EVALUATED, len(task.config.source.held_out))
            ranks = run.training.ranks and run.training.best_metric.startswith("eval/")
            if (run.evaluation.loss_examples or ranks) and not rows:
                raise ValueError(
                    "no document is held out, so there is no loss to measure: "
                    "task.held_out_every=10 holds out one in ten, task.held_out names a file"
                )
        if run.evaluation.loss_examples is None and run.algorithm.needs.held_out_loss:
            evaluation = replace(run.evaluation, loss_examples=rows)
            resolved = replace(resolved, run=replace(resolved.run, evaluation=evaluation))
    if run.training.epochs is not None:
        with error_context("task"):
            num_rows = len(task.fitting)
        algorithm = run.algorithm
        rows_of_batch = resolved.batch.prompts * algorithm.needs.mini_batches
        counts = (num_rows, rows_of_batch, algorithm.updates_per_rollout)
        with error_context("training"):
            training = resolved.run.training.with_steps(*counts)
        resolved = replace(resolved, run=replace(resolved.run, training=training))
    data = _check_task(resolved.run, task, resolved.batch.prompts)
    return Parts(
        model,
        mesh,
        resolved,
        task,
        data,
        frozen_models=frozen_models,
        rollout_mesh=rollout_mesh,
    )


def _resolver(
    model: FoundModel, mesh: jax.sharding.Mesh, frozen_models: dict[str, FoundModel]
) -> Callable[[RunConfig], ResolvedRun]:
    """resolve_run for these models on the devices of this mesh."""
    return partial(
        resolve_run,
        cfg=model.cfg,
        lora=model.lora,
        mesh_shape=dict(mesh.shape),
        platform=mesh.devices.flat[0].platform,
        is_attached=True,
        frozen_cfgs={name: frozen.cfg for name, frozen in frozen_models.items()},
    )


def with_packing_as_before(run: RunConfig, parts: Parts) -> Parts:
    """The parts of a run that resumes: where training.packing=auto, with the packing of the run
    whose checkpoint it goes on from. Raises ConfigError if these settings do not allow it. Another
    packing would change the last digits of what follows. It is changed only by name."""
    if parts.resume_from is None or run.training.packing != AUTO:
        return parts
    file = RunDir(parts.resume_from.parent).fingerprint
    with error_context("resume"):
        try:
            theirs = read_fingerprint(file)
        except ValueError:
            # check_resumed says so, and stops unless resume.force=true
            return parts
        before = packing_of(theirs, file)
    try:
        resolve = _resolver(parts.model, parts.mesh, parts.frozen_models)
        resolved = resolve(run.packed_as(before))
    except ValueError as error:
        raise ConfigError(
            f"resume: the run in {file.parent} has packing={before}, which these settings do not "
            f"allow ({error}); training.packing=none or another by name goes on with that"
        ) from error
    reason = f"auto: {before}, as in the run that goes on"
    counted = parts.resolved.run
    training = replace(resolved.run.training, max_steps=counted.training.max_steps)
    # the rows were counted before: of a text those held out, of epochs the steps
    again = replace(
        resolved.run, task=counted.task, evaluation=counted.evaluation, training=training
    )
    return replace(parts, resolved=replace(resolved, run=again, packing_reason=reason))


def locate_frozen(
    scoring_models: dict[str, ScoringModel], model: FoundModel
) -> dict[str, FoundModel]:
    """The models that only score, by name, short of their weights. Raises ConfigError."""
    models = {}
    for name, scoring in scoring_models.items():
        with _of_frozen(scoring.where):
            if scoring.reward is None:
                models[name] = source.locate_teacher(scoring.settings, model)
            else:
                # it has a tokenizer of its own
                located = source.locate(scoring.settings.as_model())
                models[name] = replace(located, cfg=scoring.architecture(located.cfg))
    return models


def download_frozen(
    scoring_models: dict[str, ScoringModel], located: dict[str, FoundModel]
) -> dict[str, FoundModel]:
    """The same models with their weights on this machine. Raises ConfigError."""
    models = {}
    for name, model in located.items():
        scoring = scoring_models[name]
        with _of_frozen(scoring.where):
            models[name] = source.download(model)
            if scoring.reward is not None:
                models[name] = source.with_score(models[name])
    return models


@contextlib.contextmanager
def _of_frozen(place: str) -> Iterator[None]:
    """A ValueError about a model from inside becomes a ConfigError about the setting of a model
    that only scores: model.weights is algorithm.teacher.weights then."""
    try:
        yield
    except ValueError as error:
        text = str(error).replace("give model.", f"give {place}.")
        where = f"{place}." if text.startswith("model.") else f"{place}: "
        raise ConfigError(f"{where}{text.removeprefix('model.')}") from error


def _check_task(run: RunConfig, task: Task, num_prompts: int) -> str:
    """Checks the examples and describes them; num_prompts: of an update. Raises ConfigError if an
    example, or a prompt of the first update or of the evaluation, is not what the model and the
    algorithm can take."""
    with error_context("task"):
        needs = run.algorithm.needs
        if needs.is_sampled and not needs.frozen_models:
            rewards = run.task.rewards
            if rewards and all(reward.fn is is_chosen for reward in rewards.values()):
                raise ValueError(
                    "reward=tunix_lite.tasks.preferences.is_chosen is for evaluation: it "
                    "gives 1 to the very text of `chosen` alone. Learn from the pairs with "
                    "algorithm=dpo, or give another task.reward=module.function"
                )
        if run.task.packs_rows:
            first = task.batch(num_prompts, run.seed, 0)
            for name in task.learned:
                task.demonstrations(first, name)
            return task.describe()
        data = check_all_rows(task, bool(task.learned), run.evaluation.num_examples)
        first = task.batch(num_prompts, run.seed, 0)
        held_out = task.held_out(run.evaluation.num_examples)
        if held_out or needs.is_sampled:
            check_fields(run.task.rewards, [*held_out, *first])
        task.prompts([*held_out, *first])
        check_in_memory(task, task.learned, getattr(run.algorithm, "check_example", None))
        rows = task.held_out(run.loss_examples, is_learned=True) if run.loss_examples else []
        for name in task.learned:
            task.demonstrations(first, name)
            try:
                task.demonstrations(rows, name)
            except ValueError as error:
                raise ValueError(
                    f"{error}; this row is held out: evaluation.loss_examples=0 measures no loss"
                ) from error
    for name, teacher in needs.frozen_models.items():
        if teacher.prompt is not None:
            with error_context(f"algorithm.{name}"):
                rows = [*first, *measured_rows(task)]
                task.prompts_with(rows, teacher.prompt, teacher.max_prompt_length)
    return data


def check_in_memory(
    task: Task, learned: Sequence[str], check: Callable[[dict], None] | None = None
) -> None:
    """Raises ValueError, with the place of the row, if a row in memory does not pass the check of
    the algorithm, or needs a token that the model has no embedding for. learned: the fields that
    are learned from. The tokenizer finds such tokens, so all rows are tokenised, but only where it
    has them. Of rows that are read later, each is refused when its turn comes."""
    source = task.config.source
    for rows in (source.train, source.held_out):
        for row in rows if isinstance(rows, list | tuple) else ():
            if check is not None:
                with error_context(place_of(row), ValueError):
                    check(row)
            if not task.tokenizer.beyond:
                continue
            task.text.prompt(row)
            for name in learned if rows is source.train else ():
                task.text.demonstration(row, name)


def check_fields(rewards: dict[str, Reward], examples: list[dict]) -> None:
    """Raises ValueError if a reward of ours is to read a field that none of these examples has, or
    gets the completions of a group where it takes one."""
    for name, reward in rewards.items():
        # the code of others may mean something else by these names
        if not type(reward.fn).__module__.startswith("tunix_lite.rewards."):
            continue
        wanted = getattr(reward.fn, "field", None)
        if isinstance(wanted, str):
            for example in examples:
                with contextlib.suppress(ValueError):
                    field_of(example, wanted)
                    break
            else:
                raise ValueError(
                    f"rewards.{name}: field={wanted}, and an example has {fields_of(examples[0])}"
                )
        if reward.group:
            raise ValueError(
                f"rewards.{name} takes one completion; set task.rewards.{name}.group=false"
            )


def resume_from_folder(run: RunConfig, run_dir: RunDir) -> Path | None:
    """The folder of the checkpoints to go on from; None: it begins afresh. Raises ConfigError."""
    resume = run.resume.folder
    has_own = Checkpoints(run_dir.checkpoints).latest_step() is not None
    with error_context("resume"):
        if has_own and resume == "none" and not is_restart():
            raise ValueError(
                f"none, but {run_dir.path} holds checkpoints; resume=auto continues from them"
            )
        if not has_own and resume in ("auto", "none"):
            return None

        # The checkpoint is whole, and stands between two rollouts.
        folder = run_dir.checkpoints if has_own else RunDir(as_path(resume)).checkpoints
        checkpoints = Checkpoints(folder)
        step = checkpoints.latest_step()
        if step is None:
            raise ValueError(
                f"{resume} holds no checkpoint; give auto, none, or the folder of a run that has "
                "one"
            )
        checkpoints.check_whole(step)
        updates = run.algorithm.updates_per_rollout
        if step % updates:
            raise ValueError(
                f"the checkpoint of step {step} stands inside a rollout of "
                f"updates_per_rollout={updates}"
            )

        # No step is left: that is an error, unless the last checkpoint is the run's own, which is
        # then complete.
        last = run.training.max_steps
        if step > last or (step == last and not has_own):
            raise ValueError(
                f"{folder} is at step {step} already; raise training.max_steps={last}"
            )
        return folder


def check_resumed(parts: Parts, earlier: RunDir, is_downloaded: bool = True) -> str:
    """Describes allowed differences from the run whose checkpoint this one resumes. Raises
    ConfigError for others. is_downloaded: all weights of `parts` are on this machine; else weights
    are not compared where a model is of the hub."""
    is_forced = parts.resolved.run.resume.force
    with error_context("resume"):
        try:
            theirs = read_fingerprint(earlier.fingerprint)
        except ValueError as error:
            if not is_forced:
                raise ValueError(
                    f"{error}; resume.force=true goes on from them all the same"
                ) from error
            return str(error)
        ours = json.loads(json.dumps(_fingerprint_of(parts)))
        names = [model.name for model in (parts.model, *parts.frozen_models.values())]
        if not is_downloaded and any(map(is_hub_name, names)):
            for values, name in product((ours, theirs), ("weights", "frozen_weights")):
                values.pop(name, None)
        return check_same_run(ours, theirs, earlier.path, is_forced)


def _fingerprint_of(parts: Parts) -> dict:
    run = parts.resolved.run.packed_as(parts.rows.packing)
    batch = parts.batch
    return fingerprint(run, parts.model, batch.prompts, batch.fsdp, parts.frozen_models)


def float32_products(mixed_precision: str, platform: str) -> str:
    """Words for a run in fp32 on an accelerator, where jax multiplies with fewer bits, or ""."""
    is_exact = platform == "cpu" or jax.config.jax_default_matmul_precision
    if mixed_precision != "fp32" or is_exact:
        return ""
    return (
        "; products have fewer bits; JAX_DEFAULT_MATMUL_PRECISION=highest makes them float32"
    )
