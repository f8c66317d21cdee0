"""`python run_training.py ...` and `tunix-lite train ...`: the same program."""

import contextlib
import os
import shlex
import sys
from pathlib import Path

from tunix_lite.basics.addresses import shown_place
from tunix_lite.basics.errors import ConfigError, RunFailed, error_context
from tunix_lite.basics.imports import looking_in_working_folder
from tunix_lite.basics.plain_text import visible
from tunix_lite.commands import program
from tunix_lite.distributed.agreement import digests_of_code, process_info
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.distributed.command_line import folder_given, fresh_folder, in_folder
from tunix_lite.distributed.folder_lock import bring_for_all, lock_folder_for_all
from tunix_lite.distributed.host_memory import prepare_gpu
from tunix_lite.distributed.join import (
    HEARTBEAT,
    agree,
    exit_at_once_on_failure,
    exit_when_a_peer_is_lost,
    has_joined,
    hosts,
    initialise,
    is_first,
)
from tunix_lite.distributed.process_place import find_place
from tunix_lite.distributed.stopping import job_start_time
from tunix_lite.models.source import weights_digest
from tunix_lite.parallel.compiling import keep_programs
from tunix_lite.planning import plan as planning
from tunix_lite.planning.at_start import check_fits
from tunix_lite.planning.hardware import find_machine
from tunix_lite.planning.plans import Plans
from tunix_lite.runs.session import Job
from tunix_lite.runs.setup import Parts, prepare
from tunix_lite.settings import compose as composing
from tunix_lite.settings.config import RunConfig, plain
from tunix_lite.tracking.checkpoint import Checkpoints
from tunix_lite.tracking.rundir import RunDir, read_status
from tunix_lite.train import train


def main() -> None:
    prepare_gpu()
    with looking_in_working_folder(), exit_at_once_on_failure():
        program.main(start, check)


def check(run: RunConfig, folder: Path) -> Parts:
    """Everything that can be checked before Hydra makes a folder, on all processes alike. Returns
    what `start` need not find again. Raises ConfigError, on all processes, and RunFailed."""
    if not run.runtime.dry_run:
        keep_programs(run.runtime.program_cache)
    join(run)
    seen = {}
    error = None
    with exit_when_a_peer_is_lost():
        with error_context("hydra.run.dir", RunFailed):
            bring_for_all(folder)
        # A problem may be of this machine alone, and the others must hear of it.
        try:
            if run.runtime.dry_run:
                parts = _look_at(run, folder)
            else:
                parts = prepare(run, RunDir(folder))
            if len(hosts()) > 1:
                # files and code that the settings name: all hosts must have the same
                first = parts.task.batch(parts.batch.prompts, run.seed, 0)
                examples = [*parts.task.held_out(run.evaluation.num_examples), *first]
                seen = {
                    "code": str(digests_of_code(plain(run))),
                    "weights": weights_digest(parts.model),
                    "data or tokenizer": parts.task.digest(examples),
                }
        except ConfigError as problem:
            error = str(problem)
        with error_context(""):
            agree(seen, error)

        # Hydra writes there, and not while another run has it.
        if allgather_values(folder.is_dir())[0]:
            with error_context("", RunFailed), lock_folder_for_all(folder, run.launch.timeout):
                pass
    return parts


def _look_at(run: RunConfig, folder: Path) -> Parts:
    """Checks a run as its start would, prints its summary and its plan, and leaves nothing behind.
    Weights of a hub model are not downloaded. Raises ConfigError for what would stop the run."""
    run_dir = RunDir(folder)
    parts = prepare(run, run_dir, downloads=False)

    # The plan by formulas: compiling would take as long as a start.
    model = parts.model
    sizes = dict(parts.mesh.shape)
    machine = find_machine("attached")
    plan = planning.estimated(run, machine, model.cfg, model.lora, sizes)
    messages = []
    check_fits(plan, messages.append)
    title, rows = parts.summary(run_dir)
    shown = [(name, text) for name, text in rows if name != "outputs"]
    if parts.resume_from is not None:
        differs = parts.differs and f"; what differs from its run: {parts.differs}"
        shown.append(("resume", f"from the checkpoint in {parts.resume_from}{differs}"))
    if is_first():
        lines = [f"{title}: a dry run", *(f"  {name:<10}{text}" for name, text in shown)]
        lines += Plans((plan,)).short_form()[-2:]
        lines += [*messages, "nothing was run, nothing was written"]
        print("\n".join(visible(line) for line in lines), flush=True)
    return parts


def start(run: RunConfig, folder: Path, parts: Parts | None) -> float | None:
    """Trains. parts: what `check` found. Returns the last held-out accuracy, which a sweeper such
    as optuna makes highest, or without completions the held-out loss; None without either."""
    # where a flag of Hydra's left no check to make
    join(run)
    sweep = composing.sweep_folder()
    # None: hydra.run.dir of its folder
    resume_hint = None if sweep is None else f"hydra.sweep.dir={sweep}"
    with contextlib.ExitStack() as until_done, exit_when_a_peer_is_lost():
        with error_context("", RunFailed):
            until_done.enter_context(lock_folder_for_all(folder, run.launch.timeout))

        job = Job(job_start_time(os.environ), resume_hint, parts)
        train(run, folder, job)
        # A signal may have come with the last step, which ends the run but not the sweep.
        if sweep is not None and (reason := job.stopping.reason()):
            print(f"{reason}: the sweep starts no further run", flush=True)
            sys.exit(_exit_code_of(reason))
    if sweep is None and is_first() and sys.stdout.isatty():
        print(next_command(folder), end="", flush=True)
    if code := _exit_code_of(job.stopped):
        sys.exit(code)
    status, *_ = read_status(RunDir(folder).status)
    last = status.get("last", {})
    return last.get("accuracy", last.get("loss"))


def _exit_code_of(reason: str | None) -> int:
    """The exit code of a run that ended before its last step for this reason, with a checkpoint."""
    # A scheduler that ends a job, or the time limit, is part of the plan. A person's Ctrl-C is not:
    # a script must not take the run for a whole one. Of several processes the launcher says it, for
    # one that failed would end the others.
    is_alone_here = HEARTBEAT not in os.environ and len(hosts()) <= 1
    return program.EXIT_INTERRUPTED if reason == "SIGINT" and is_alone_here else 0


def next_command(folder: Path) -> str:
    """Returns the line that says how to talk to the trained model; "" where nothing was saved."""
    if not Checkpoints(RunDir(folder).checkpoints).whole_steps():
        return ""
    return f"talk to it: tunix-lite generate {shlex.quote(shown_place(folder))}\n"


def join(run: RunConfig) -> None:
    """One run of all processes that were started as one, in the folder of the first of them."""
    if has_joined():
        return
    run_dir, values = folder_given(sys.argv[1:]), plain(run)
    folder = run_dir or fresh_folder(run.project_name, sys.argv)
    with error_context(""):
        # can it be read?
        job_start_time(os.environ)
        if "$" in folder and not find_place(run.launch, os.environ).is_alone:
            # each process would expand ${now} differently; process 0 decides
            folder = composing.fill_in_folder(folder, values)
        ours = process_info(
            values | ({"hydra": {"run.dir": shown_place(Path(run_dir))}} if run_dir else {}),
            folder,
        )
        place, agreed = initialise(run.launch, os.environ, ours)
    if len(agreed.hosts) > 1 and (run_dir is None or "$" in run_dir):
        sys.argv += in_folder(agreed.folder, sys.argv)
    if place.process_id > 0:
        # .hydra/ is written by one
        sys.argv.append("hydra.output_subdir=null")
