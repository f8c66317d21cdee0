"""What is kept of a run that ends before its last step: nothing that was learned is lost where it need not be."""

import contextlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import test_train
from faulty_rewards import leaves_a_child
from processes import run_together
from test_reward_pool import are_gone, runs
from test_train import lines, without_time

from tunix_lite.basics.errors import RunFailed
from tunix_lite.basics.types import TrainState
from tunix_lite.distributed.stopping import Stopping, StopRun
from tunix_lite.runs import leaving
from tunix_lite.settings.compose import compose
from tunix_lite.tasks import check_rows, grading
from tunix_lite.tasks import task as task_module
from tunix_lite.tasks.processes import Processes, SharedError
from tunix_lite.tracking.checkpoint import Checkpoints
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.train import train
from tunix_lite.workers.pool import Pool, RewardsConfig

SHORT = [*test_train.SHORT, "tracking.tensorboard=false", "training.save_interval_steps=0", "rollout.chunk=4"]
BAD = 8  # the row, from 0: in the order of seed 0 it comes in step 3


class Rows(Sequence):
    """20 rows that are made when they are asked for: nobody looks through all of them before the start."""

    def __init__(self, bad: bool):
        self.bad = bad

    def __len__(self) -> int:
        return 20

    def __getitem__(self, n: int) -> dict:
        row = {"question": f"{n} + 1", "answer": str(n + 1)}
        return {"answer": row["answer"]} if self.bad and n == BAD else row


@dataclass(frozen=True)
class Source:
    """Of these rows one may lack its question."""

    bad: bool = False

    @property
    def train(self) -> Rows:
        return Rows(self.bad)

    @property
    def held_out(self) -> list[dict]:
        return [{"question": "1 + 1", "answer": "2"}]


def of_rows(bad: bool, *more: str):
    """A run on 20 rows; two are taken a step, each once in ten steps."""
    source = f"task.source={{_target_: {__name__}.Source, bad: {str(bad).lower()}}}"
    settings = ["evaluation.num_examples=0", "training.prompts_per_step=2", "training.max_steps=10", *more]
    return compose([*SHORT, "~task.source", f"+{source}", *settings])


def test_a_bad_row_costs_no_step_and_with_a_corrected_file_the_run_goes_on(tmp_path, monkeypatch):
    # Of rows that are made when they are asked for, some are looked at before the start: here the first and the last.
    monkeypatch.setattr(check_rows, "MEASURED_LAZILY", 2)
    run, folder = of_rows(True, "training.max_steps=4"), tmp_path / "outputs" / "run"
    with pytest.raises(RunFailed, match="^step 3: task.prompt names 'question', but an example has answer"):
        train(run, folder)
    assert Checkpoints(folder / "checkpoints").steps() == [2]
    status = json.loads((folder / "status.json").read_text())
    assert (status["status"], status["steps"]) == ("failed", 2)
    said = f"failed after step 2; checkpoint 2 is in {folder}/checkpoints\n"
    assert said in (folder / "train.log").read_text()
    assert [row["step"] for row in lines(folder)] == [1, 2]
    assert (tmp_path / "outputs" / "latest").resolve() == folder
    train(of_rows(False, "training.max_steps=4", "resume.force=true"), folder)
    log = (folder / "train.log").read_text()
    assert "resumed from step 2" in log and "settings that differ from the run that it goes on from: " in log
    assert [row["step"] for row in lines(folder)] == [1, 2, 3, 4]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of three steps that is not disturbed, evaluated after two and three, and its state."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(compose(EVALUATED), folder)


EVALUATED = [*SHORT, "training.max_steps=3", "rewards.workers=0"]


@pytest.mark.parametrize("how", ["signal", pytest.param("error", marks=pytest.mark.wide)])
def test_an_evaluation_that_is_ended_is_made_when_the_run_goes_on(how, whole, tmp_path, monkeypatch):
    """Step 2 has been learned, so it is kept, and its line; what was not measured is measured by the next start."""
    wanted_folder, wanted = whole
    run, graded, evaluations = compose(EVALUATED), task_module.Grader.results, []

    def ends(self, rollout, look=None):
        if len(self.examples) == 20:
            evaluations.append(1)
            if len(evaluations) == 2:
                if how == "error":
                    raise ValueError("a reward of your own")
                self.task.processes.stopping._signal_name = "SIGTERM"  # as the handler notes it
        return graded(self, rollout)

    with monkeypatch.context() as patch:
        patch.setattr(task_module.Grader, "results", ends)
        # a reward that has no answer, once the signal has come
        patch.setattr(
            grading, "wait", lambda left, **more: (set(), left) if len(evaluations) == 2 else wait(left, **more)
        )
        if how == "error":
            with pytest.raises(RunFailed, match="^evaluation: a reward of your own"):
                train(run, tmp_path)
        else:
            assert int(train(run, tmp_path).step) == 2
    rows = lines(tmp_path)
    assert [(row["step"], "eval/accuracy" in row) for row in rows] == [(0, True), (1, False), (2, False)]
    assert Checkpoints(tmp_path / "checkpoints").steps() == [2]
    assert (tmp_path / "samples" / "step_000002.jsonl").is_file()
    got = train(run, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert [without_time(row) for row in lines(tmp_path)] == [without_time(row) for row in lines(wanted_folder)]
    statuses = [json.loads((folder / "status.json").read_text()) for folder in (tmp_path, wanted_folder)]
    assert statuses[0]["eval"] == statuses[1]["eval"] and statuses[0]["status"] == "completed"


@pytest.mark.parametrize("ours, theirs", [(True, False), (False, True), (False, False)])
def test_verdicts_are_not_waited_for_once_the_run_is_to_end_and_all_processes_leave(ours, theirs):
    """A reward that takes for ever; of two processes one is asked to stop, and the other has all its verdicts."""
    waiting, done = Future(), Future()
    done.set_result({"reward 'a'": ("", 1.0)})
    own = [[[{"reward 'a'": ["", 1.0]}], "digest"], None, theirs]
    stopping = Stopping(None, print)
    stopping.may_stop, stopping._signal_name = True, "SIGTERM" if ours else None
    processes = Processes(0, 2, lambda value: [value, own], stopping)
    began = time.monotonic()
    with pytest.raises(StopRun) if ours or theirs else contextlib.nullcontext():
        found = grading.shared_outcomes((waiting if ours else done, None), "digest", processes)
        assert [one["reward 'a'"][1] for one in found] == [1.0, 1.0]
    assert time.monotonic() - began < 20, "the reward would take for ever"


@pytest.mark.wide
def test_two_processes_of_which_one_is_asked_to_stop_leave_together_and_keep_the_same(tmp_path):
    """Process 1 has its signal after the second chunk of the second rollout; the next time that all ask each other is
    seconds later at most, and a rollout of eight tokens in chunks of two may have ended by then."""
    said = run_together(Path(__file__).with_name("run_worker.py"), 2, 2, tmp_path, "end", tmp_path / "run", limit=400)
    for one in said:
        assert one["step"] in (1, 2) and one["kept"] == [one["step"]] and one["whole"] == 3
        assert one["said"].startswith("step 3: task.prompt names 'question'") and one["bad"] == [2]
    first, second = ({k: v for k, v in one.items() if k != "params"} for one in said)
    assert first == second
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["status"] == "completed"
    assert "stopped by SIGTERM" in (tmp_path / "run" / "train.log").read_text()


def test_what_a_reward_has_put_into_a_session_of_its_own_is_gone_with_its_worker():
    with contextlib.closing(Pool({"reward": leaves_a_child}, RewardsConfig(workers=1))) as pool:
        ((kind, pid),) = pool.submit("text", {}).result(60).values()
        assert kind == "" and runs(int(pid))
    assert are_gone([int(pid)])


def is_running(stat: Path) -> bool:
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


# ---- what may be saved after which error


def behind(outer: BaseException, inner: BaseException) -> BaseException:
    outer.__cause__ = inner
    return outer


OF_A_PEER = "UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer [::1]:7"


@pytest.mark.parametrize(
    "error, alone, together",
    [
        (RunFailed("step 4: a bad row"), True, False),
        (behind(RunFailed("step 4: a bad row"), SharedError("a bad row")), True, True),
        (FileNotFoundError(2, "No such file or directory", "/data/of/a/reward.txt"), True, False),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False, False),
        (OSError(28, "No space left on device", "RUN/metrics.jsonl"), False, False),
        (RuntimeError(OF_A_PEER), False, False),
        (KeyboardInterrupt(), False, False),
    ],
)
def test_the_state_is_saved_after_errors_that_are_not_of_the_machine(error, alone, together, tmp_path, monkeypatch):
    """Of several processes only where all of them find the same error: one alone would wait for the others."""
    for processes, saves in ((1, alone), (2, together)):
        monkeypatch.setattr(leaving.jax, "process_count", lambda count=processes: count)
        assert kept_after(error, tmp_path) == ([3] if saves else []), (processes, error)


def kept_after(error: BaseException, folder, step: int = 3, updates: int = 1, on_disk: int = 1, deleted=False) -> list:
    """The steps that are saved when an error ends a run whose state is that of `step`."""
    state, saved = TrainState(jax.numpy.int32(step), {"w": jax.numpy.zeros(2)}, ()), []
    if deleted:
        state.params["w"].delete()
    told = []
    session = SimpleNamespace(
        run=SimpleNamespace(algorithm=SimpleNamespace(updates_per_rollout=updates)),
        run_dir=RunDir(folder),
        status=SimpleNamespace(steps=step),
        console=SimpleNamespace(say=print),
        stopping=Stopping(None, print),
    )
    ends = leaving.Unfinished(session, lambda: state, lambda: saved.append((step, len(told))), list, on_disk)
    ends.pending.append(lambda: told.append(1))
    with pytest.raises(type(error)), ends.kept():
        raise error
    assert all(said == 1 for _, said in saved), "metrics.jsonl has the step before its checkpoint is there"
    return [saved_step for saved_step, _ in saved]


def test_nothing_is_saved_that_is_on_disk_or_lost_or_in_the_middle_of_a_rollout(tmp_path):
    error = KeyError("of a reward")
    assert kept_after(error, tmp_path) == [3]
    assert kept_after(error, tmp_path, on_disk=3) == []
    assert kept_after(error, tmp_path, deleted=True) == []
    assert [kept_after(error, tmp_path, step, updates=2) for step in (2, 3, 4)] == [[2], [], [4]]
