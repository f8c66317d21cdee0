"""`python run_training.py ...` and `tunix-lite train ...`: the same program."""

import contextlib
import os
import sys
from pathlib import Path

from tunix_lite.commands import program
from tunix_lite.config import ConfigError, RunConfig, at, plain
from tunix_lite.launch import folder_given, fresh_folder, in_folder
from tunix_lite.models.source import stamp
from tunix_lite.parallel import distributed
from tunix_lite.parallel.agreement import about
from tunix_lite.parallel.host import take_gpu_memory
from tunix_lite.prepare import prepare
from tunix_lite.tracking.claim import claimed
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.train import train


def main() -> None:
    take_gpu_memory()
    with distributed.leaving():
        program.main(start, check)


def check(run: RunConfig, folder: Path) -> None:
    join(run)
    found, error = {}, None
    try:
        found["weights"] = stamp(prepare(run, RunDir(folder)).model)
    except ConfigError as problem:  # perhaps of this machine alone, and the others must hear of it
        error = str(problem)
    with at(""):
        distributed.agree(found, error)


def start(run: RunConfig, folder: Path) -> None:
    join(run)  # where a flag of Hydra's left no check to make
    with contextlib.ExitStack() as until_done, distributed.noticing_lost_peers():
        claim(folder, run.launch.timeout, until_done)
        train(run, folder)


def claim(folder: Path, timeout: float, until_done: contextlib.ExitStack) -> None:
    """The folder is this run's, on all of its processes, and nobody reads a checkpoint before it is."""
    error = None
    if distributed.is_first():
        try:
            until_done.enter_context(claimed(folder, timeout))
        except ValueError as problem:
            error = str(problem)
    with at(""):
        distributed.agree({}, error)


def join(run: RunConfig) -> None:
    """One run of all processes that were started as one, in the folder of the first of them."""
    if distributed.has_joined():
        return
    given = folder_given(sys.argv[1:])
    values = plain(run) | ({"hydra": {"run.dir": given}} if given else {})
    ours = about(values, given or fresh_folder(run.project_name))
    with at(""):
        place, agreed = distributed.initialise(run.launch, os.environ, ours)
    if len(agreed.hosts) > 1 and given is None:
        sys.argv += in_folder(agreed.folder, sys.argv[1:])
    if place.process_id > 0:
        sys.argv.append("hydra.output_subdir=null")  # .hydra/ is written by one
