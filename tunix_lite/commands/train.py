"""`python run_training.py ...` and `tunix-lite train ...`: the same program."""

from tunix_lite.commands import program
from tunix_lite.parallel.host import take_gpu_memory
from tunix_lite.prepare import prepare
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.train import train


def main() -> None:
    take_gpu_memory()
    program.main(train, check=lambda run, folder: prepare(run, RunDir(folder)))
