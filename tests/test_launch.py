"""The launcher, with processes that are plain Python: one fails, stalls, or is told to stop, and all are gone."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from tunix_lite.distributed import command_line, join, launcher
from tunix_lite.distributed.join import LOST_A_PEER
from tunix_lite.distributed.launcher import LocalProcesses, local_processes
from tunix_lite.distributed.process_place import (
    TORCH_SETS,
    LaunchConfig,
    ProcessPlace,
    find_place,
)
from tunix_lite.settings.compose import compose, conf_dir

CHILD = """
import json, os, pathlib, signal, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
with (folder / f"started{{rank}}").open("a") as file:
    file.write(os.environ["MASTER_PORT"] + " " + os.environ["WORLD_SIZE"] + "\\n")
beat = pathlib.Path(os.environ["TUNIX_LITE_HEARTBEAT"])
pathlib.Path(f"{{beat}}.settings").write_text(json.dumps({settings}))
print("here is", rank, flush=True)
"""
WAIT = "\ntime.sleep(120)\n"
SOON = 60  # seconds in which a launcher of such processes must be done; that they wait for takes longer


class Launched:
    """A launcher that runs in the background, and what it says."""

    def __init__(self, folder: Path, body: str, *flags: str, words: tuple[str, ...] = (), grace=5.0, **settings):
        """settings: of launch, which each process reports."""
        (folder / "child.py").write_text(CHILD.format(settings=settings) + body)
        environment = {k: v for k, v in os.environ.items() if k not in TORCH_SETS}
        main = f"from tunix_lite.distributed import launcher; launcher.GRACE = {grace}; launcher.main()"
        call = [sys.executable, "-c", main, *flags, "child.py", str(folder), *words]
        self.folder, self.began = folder, time.monotonic()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(call, cwd=folder, env=environment, **pipes)

    def starts(self, rank: int) -> list[str]:
        file = self.folder / f"started{rank}"
        return file.read_text().splitlines() if file.exists() else []

    def wait_for(self, *ranks: int) -> None:
        while not all(self.starts(rank) for rank in ranks):
            assert time.monotonic() < self.began + SOON
            time.sleep(0.02)

    def end(self) -> tuple[int, str, str]:
        try:
            out, err = self.process.communicate(timeout=SOON)
        finally:
            self.process.kill()
        return self.process.returncode, out, err


def test_all_end_well_and_the_first_has_the_screen(tmp_path):
    code, out, err = Launched(tmp_path, "", "--nprocs=3").end()
    assert (code, out, err) == (0, "here is 0\n", "")
    (log,) = tmp_path.glob("outputs/tunix_lite/*/*/launch/p2.log")
    assert log.read_text() == "here is 2\n"
    ports = {line.split()[0] for rank in range(3) for line in (tmp_path / f"started{rank}").read_text().splitlines()}
    assert len(ports) == 1


def test_one_that_fails_is_named_with_its_last_lines_and_the_others_are_gone(tmp_path):
    body = "\nif rank == '2':\n    print('no more'); sys.exit(7)" + WAIT
    run = Launched(tmp_path, body, "--nprocs=3")
    code, _, err = run.end()
    lines = err.splitlines()
    assert code == 7
    assert lines[0] == "launch: process 2 ended with exit code 7"
    assert lines[1].startswith("launch: its last lines, of outputs/tunix_lite/") and lines[1].endswith("p2.log:")
    assert lines[2:4] == ["launch:   here is 2", "launch:   no more"]
    (seconds,) = re.fullmatch(r"launch: the others were ended in (\d+\.\d) s", lines[4]).groups()
    assert float(seconds) < 5, "they were asked to end, and not killed after --grace"
    assert time.monotonic() - run.began < SOON


def test_one_that_is_killed_is_the_culprit_though_its_peers_abort_because_of_it(tmp_path):
    body = """
if rank == "1": os.kill(os.getpid(), signal.SIGKILL)
while not (folder / "started1").exists(): time.sleep(0.01)
time.sleep(0.02)
print("mine", file=sys.stderr)
os.abort()
"""
    code, _, err = Launched(tmp_path, body, "--nprocs=2").end()
    assert code == 128 + signal.SIGKILL
    assert "launch: process 1 was ended by SIGKILL; perhaps the machine ran out of memory\n" in err
    (log,) = tmp_path.glob("outputs/*/*/*/launch/p0.log")
    assert ("mine" in err) == ("mine" in log.read_text())  # unless it was ended before it came so far


def test_one_that_ends_a_moment_after_its_peer_has_lost_it_is_the_culprit(tmp_path):
    """The kernel closes the connections of a killed process before its parent can see that it has ended."""
    body = f"""
if rank == "0": print({LOST_A_PEER!r}, file=sys.stderr); sys.exit(1)
time.sleep(0.3)
os.kill(os.getpid(), signal.SIGKILL)
"""
    code, _, err = Launched(tmp_path, body, "--nprocs=2").end()
    assert code == 128 + signal.SIGKILL and "launch: process 1 was ended by SIGKILL" in err


def test_one_that_stands_still_is_named_and_all_are_gone(tmp_path):
    body = "\ntime.sleep(0.3 * (1 - int(rank)))\nbeat.write_text('step 3')" + WAIT
    run = Launched(tmp_path, body, "--nprocs=2", stall_timeout=0.5, grace=0.3)
    code, _, err = run.end()
    assert code == 124
    assert re.search(r"launch: process 1 stalled for \d+ s, and launch.stall_timeout=0\.5\. ", err)
    assert re.search(r"Last signs: process 0 \d+ s ago \(step 3\); process 1 \d+ s ago \(step 3\)", err)


def test_before_the_first_sign_of_life_nobody_is_too_slow(tmp_path):
    code, *_ = Launched(tmp_path, "\ntime.sleep(0.6)", "--nprocs=2", stall_timeout=0.2).end()
    assert code == 0


def test_a_run_that_fails_goes_on_in_its_folder_as_often_as_it_may(tmp_path):
    body = """
with (folder / f"folders{rank}").open("a") as file:
    file.write(sys.argv[2] + "\\n")
if rank == "1" and (folder / "started1").read_text().count("\\n") < 3: sys.exit(1)
"""
    code, _, err = Launched(tmp_path, body, "--nprocs=2", max_restarts=2).end()
    assert code == 0
    assert "launch: restart 2 of 2, from the newest checkpoint\n" in err
    folders = (tmp_path / "folders1").read_text().splitlines()
    assert len(folders) == 3 and len(set(folders)) == 1 and folders[0].startswith("hydra.run.dir=outputs/tunix_lite/")
    code, *_ = Launched(tmp_path, "\nsys.exit(3)", max_restarts=1).end()
    assert code == 3


def test_the_clock_of_a_job_is_that_of_its_launcher_or_of_its_script_and_a_restart_sets_it_not_anew(
    tmp_path, monkeypatch
):
    body = """
with (folder / f"clock{rank}").open("a") as file:
    file.write(os.environ["TUNIX_LITE_STARTED"] + "\\n")
if rank == "0" and (folder / "clock0").read_text().count("\\n") < 2: sys.exit(1)
"""
    monkeypatch.delenv("TUNIX_LITE_STARTED", raising=False)
    before = time.time()
    assert Launched(tmp_path, body, "--nprocs=2", max_restarts=2).end()[0] == 0
    said = [line for rank in (0, 1) for line in (tmp_path / f"clock{rank}").read_text().splitlines()]
    assert len(said) >= 3 and len(set(said)) == 1 and before < float(said[0]) < time.time()
    monkeypatch.setenv("TUNIX_LITE_STARTED", "1700000000")
    (tmp_path / "clock0").unlink()
    assert Launched(tmp_path, body, max_restarts=2).end()[0] == 0
    assert (tmp_path / "clock0").read_text() == "1700000000\n" * 2


def test_wrong_settings_are_not_tried_again_and_leave_nothing(tmp_path):
    body = "\nwhile not (folder / 'started0').exists(): time.sleep(0.01)\nsys.exit(2)"
    run = Launched(tmp_path, body, "--nprocs=2", max_restarts=5)
    code, *_ = run.end()
    assert code == 2 and len(run.starts(0)) == 1
    assert not (tmp_path / "outputs").exists()
    wrote = "\npath = pathlib.Path(sys.argv[2].partition('=')[2])\n(path / 'train.log').touch()\nsys.exit(2)"
    assert Launched(tmp_path, wrote, max_restarts=5).end()[0] == 2
    assert len(list(tmp_path.glob("outputs/*/*/*/launch/p0.log"))) == 1  # it had begun


STOPS = """
stops = []
signal.signal(signal.SIGTERM, lambda *_: stops.append(1))
(folder / f"ready{rank}").touch()
while len(stops) < 1: time.sleep(0.01)
print("stopping")
"""


def wait_until_ready(run: Launched) -> None:
    while len(list(run.folder.glob("ready*"))) < 2:
        assert time.monotonic() < run.began + SOON
        time.sleep(0.02)


def test_a_signal_is_handed_on_and_all_stop_by_themselves(tmp_path):
    run = Launched(tmp_path, STOPS, "--nprocs=2", max_restarts=3)
    wait_until_ready(run)
    run.process.send_signal(signal.SIGTERM)
    code, out, err = run.end()
    assert (code, out, err) == (0, "here is 0\nstopping\n", "")


def test_a_run_that_ctrl_c_stopped_well_is_not_taken_for_a_whole_one(tmp_path):
    # what a shell runs in its background ignores Ctrl-C, and so would the launcher
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run = Launched(tmp_path, STOPS.replace("SIGTERM", "SIGINT"), "--nprocs=2")
    finally:
        signal.signal(signal.SIGINT, before)
    wait_until_ready(run)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == (130, "here is 0\nstopping\n", "")


def test_a_second_signal_ends_what_does_not_stop(tmp_path):
    run = Launched(tmp_path, STOPS + WAIT, "--nprocs=2", max_restarts=3)
    wait_until_ready(run)
    run.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert (code, err) == (128 + signal.SIGTERM, "launch: stopped by SIGTERM\n")


def stopped_by_sigterm(tmp_path, body: str, **settings) -> tuple[int, str, float]:
    """What a launcher of two says that gets one signal, and how long that takes."""
    run = Launched(tmp_path, body, "--nprocs=2", max_restarts=3, **settings)
    wait_until_ready(run)
    run.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    code, _, err = run.end()
    return code, err, time.monotonic() - began


def test_one_that_fails_after_a_signal_is_named_and_the_others_do_not_wait_for_ever(tmp_path):
    body = STOPS + "\nif rank == '1':\n    print('saving failed: the culprit'); sys.exit(9)" + WAIT
    code, err, seconds = stopped_by_sigterm(tmp_path, body, grace=1)
    lines = err.splitlines()
    assert code == 9 and seconds < SOON
    assert lines[0] == "launch: process 1 ended with exit code 9"
    assert lines[-2:] == [
        "launch:   saving failed: the culprit",
        "launch: process 0: still running 1 s later, and ended",
    ]


def is_running(pid: str) -> bool:
    file = Path("/proc") / pid / "stat"
    return file.exists() and file.read_text().rpartition(")")[2].split()[0] != "Z"


# ---- logs


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full, on Linux")
def test_a_log_on_a_full_disk_does_not_end_the_run(tmp_path):
    logs = tmp_path / "run" / "launch"
    logs.mkdir(parents=True)
    (logs / "p0.log").symlink_to("/dev/full")
    body = "\nfor i in range(3): print('line', i, file=sys.stderr, flush=True); time.sleep(0.2)"
    code, _, err = Launched(tmp_path, body, "--nprocs=2", words=("hydra.run.dir=run",)).end()
    assert code == 0
    assert err.splitlines() == ["line 0", "line 1", "line 2"]


# ---- who is started


SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


def test_as_the_seed_says_it_of_two_machines():
    """RANK is the first process on this machine."""
    said = {"MASTER_ADDR": "192.168.1.10", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "RANK": "4"}
    group = local_processes(4, said)
    assert group == LocalProcesses(4, 8, 4, "192.168.1.10", "29500")
    told = group.environments()
    assert [e["RANK"] for e in told] == ["4", "5", "6", "7"] and [e["LOCAL_RANK"] for e in told] == ["0", "1", "2", "3"]
    assert {e["WORLD_SIZE"] for e in told} == {"8"} and {e["MASTER_ADDR"] for e in told} == {"192.168.1.10"}


def test_where_slurm_numbers_machines_each_has_a_launcher():
    where = {"MASTER_ADDR": "gpu003"}
    assert local_processes(4, SLURM | where) == LocalProcesses(4, 8, 4, "gpu003", str(77 + 61440))


@pytest.mark.parametrize(
    "nprocs, environ, message",
    [
        (0, {}, "--nprocs=0 must be at least 1"),
        (
            4,
            SLURM,
            "MASTER_ADDR is not set: under srun each node has a launcher, and all need the node of process 0; "
            "export MASTER_ADDR=$(scontrol show hostnames | head -n 1)",
        ),
        (
            4,
            {"WORLD_SIZE": "8", "RANK": "4"},
            "WORLD_SIZE=8, but MASTER_ADDR is not set: it is the address of process 0",
        ),
        (
            4,
            {"WORLD_SIZE": "8", "MASTER_ADDR": "a"},
            "WORLD_SIZE=8, but RANK is not set: it is the number of this process, from 0",
        ),
        (
            4,
            {"WORLD_SIZE": "8", "MASTER_ADDR": "a", "RANK": "5"},
            "RANK=5 and --nprocs=4 are processes 5 to 8, but WORLD_SIZE=8: RANK is the number of the first process on this machine, and WORLD_SIZE counts the processes of all machines",
        ),
    ],
)
def test_what_cannot_be_is_said(nprocs, environ, message):
    with pytest.raises(ValueError) as caught:
        local_processes(nprocs, environ)
    assert str(caught.value) == message


def test_a_flag_of_ours_behind_the_program_is_not_lost(capsys):
    with pytest.raises(SystemExit) as ended:
        launcher.main(["run_training.py", "--nprocs=4"])
    assert ended.value.code == 2
    said = "error: --nprocs is a flag of the launcher: write it before the program and its settings\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    "words, message",
    [
        (["--nproc_per_node=2", "x.py"], "--nproc_per_node=2: the launcher has no such flag; it has --nprocs. "),
        (["--nnodes", "2", "--nprocs=4", "x.py"], "--nnodes: the launcher has no such flag; it has --nprocs."),
        (["--nprocs=auto", "x.py"], "argument --nprocs: auto: it is a number; one process uses all devices"),
    ],
)
def test_a_wrong_flag_is_one_line_without_the_usage(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        launcher.main(words)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_without_a_file_it_trains():
    assert launcher.process_command(["seed=1"]) == [sys.executable, "-m", "tunix_lite", "train", "seed=1"]
    assert launcher.process_command(["run_training.py", "seed=1"]) == [sys.executable, "run_training.py", "seed=1"]
    evaluate = ["-m", "tunix_lite", "evaluate", "checkpoint=RUN"]
    assert launcher.process_command(["evaluate", "checkpoint=RUN"]) == [sys.executable, *evaluate]


def test_a_sweep_is_not_started_again(tmp_path):
    code, _, err = Launched(tmp_path, "\nsys.exit(1)", words=("--multirun",), max_restarts=2).end()
    said = "launch: launch.max_restarts is for one run: with --multirun it would begin all again\n"
    assert code == 1 and said in err


def test_the_settings_of_a_run_reach_its_launcher_and_do_not_say_who_is_who(tmp_path):
    join.tell_launcher(LaunchConfig(max_restarts=2), {"TUNIX_LITE_HEARTBEAT": str(tmp_path / "p0")})
    assert json.loads((tmp_path / "p0.settings").read_text()) == {"stall_timeout": 1800, "max_restarts": 2}
    launch = LaunchConfig("a:1", 2, 1)
    join.tell_launcher(launch, {})
    with pytest.raises(ValueError, match="^launch.coordinator=a:1: the launcher numbers the processes; for several "):
        join.tell_launcher(launch, {"TUNIX_LITE_HEARTBEAT": str(tmp_path / "p0"), "WORLD_SIZE": "2"})


def test_the_folder_is_named_as_a_conf_that_was_edited_says(tmp_path, monkeypatch):
    shutil.copytree(conf_dir(), tmp_path / "conf")
    monkeypatch.setattr(command_line, "conf_dir", lambda: tmp_path / "conf")
    main = tmp_path / "conf" / "config.yaml"
    main.write_text(main.read_text().replace("tunix_lite  #", "other  #"))
    assert command_line.project_name([]) == "other" and command_line.project_name(["++project_name='x y'"]) == "x y"


def test_a_folder_with_odd_characters_is_one_that_hydra_reads():
    (word,) = command_line.in_folder("outputs/it's, 1", [])
    assert word == "hydra.run.dir='outputs/it\\'s, 1'" and command_line.folder_given([word]) == "outputs/it's, 1"
    override = OverridesParser.create().parse_override(word)
    assert override.value() == "outputs/it's, 1"


# ---- examples/launch


EXAMPLES = Path(__file__).parents[1] / "examples" / "launch"


def program(folder: Path, name: str, body: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/bash\n{body}\n")
    file.chmod(0o755)
    return file


def example(name: str, tmp_path: Path, *settings: str, **environment: str) -> subprocess.CompletedProcess:
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    call = ["bash", str(EXAMPLES / name), *settings]
    environment = {"PATH": path, "HOME": str(tmp_path), **environment}
    return subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SOON)


def test_the_ssh_example_tells_each_machine_its_place_and_passes_settings_on(tmp_path):
    program(tmp_path, "bin/ssh", 'echo "$2" >> hosts; exec bash -c "$3"')
    said = 'echo "$MASTER_ADDR:$MASTER_PORT $RANK/$WORLD_SIZE $2" >> said; [ $RANK = 0 ]'
    program(tmp_path, ".venv/bin/python", said)
    done = example("ssh.sh", tmp_path, "model.mesh_shape=[[16,1],[fsdp, tp]]", HOSTS="me@gpu1 gpu2")
    assert sorted((tmp_path / "said").read_text().splitlines()) == [
        f"gpu1:29500 {rank}/2 model.mesh_shape=[[16,1],[fsdp, tp]]" for rank in (0, 1)
    ]
    assert sorted((tmp_path / "hosts").read_text().split()) == ["gpu2", "me@gpu1"]
    assert done.returncode == 1  # that of the one that failed


def test_the_slurm_example_hands_its_signal_on_and_ends_as_the_run_does(tmp_path):
    program(
        tmp_path,
        "bin/srun",
        'echo $$ > pid; echo "$@" "$SRUN_CPUS_PER_TASK cores $MASTER_ADDR" > said; trap "exit 7" TERM; for i in {1..2000}; do sleep 0.05; done',
    )
    program(tmp_path, "bin/scontrol", 'printf "%s of $3\\n" gpu1 gpu2')
    program(tmp_path, "bin/scancel", 'echo "$@" > cancelled; kill -TERM $(cat pid)')
    script = (EXAMPLES / "slurm.sbatch").read_text()
    call = ["bash", "-c", script, "slurm.sbatch", "seed=1"]
    environment = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "9",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "gpu[1-2]",
        "SLURM_GPUS_PER_NODE": "h100:4",
        "SLURM_CPUS_PER_TASK": "64",
    }
    job = subprocess.Popen(call, cwd=tmp_path, env=environment)
    until = time.monotonic() + SOON
    while not (tmp_path / "said").exists() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.1)
    job.terminate()
    assert job.wait(SOON) == 7
    said = "--kill-on-bad-exit=1 python run_training.py hydra.run.dir=outputs/slurm/9 launch.expect_devices=8 seed=1"
    assert (tmp_path / "said").read_text() == f"{said} 64 cores gpu1 of gpu[1-2]\n"
    assert (tmp_path / "cancelled").read_text() == "--signal=TERM 9.0\n"


def test_the_jobset_example_numbers_its_pods_as_a_run_needs_it():
    job = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())
    (jobs,) = job["spec"]["replicatedJobs"]
    pods, name = jobs["template"]["spec"], job["metadata"]["name"]
    (container,) = pods["template"]["spec"]["containers"]
    said = {entry["name"]: entry.get("value", "1") for entry in container["env"]}  # RANK is the index of the pod
    assert find_place(LaunchConfig(), said) == ProcessPlace(
        1, 2, f"{name}-node-0-0.{name}:29500", source="MASTER_ADDR and MASTER_PORT"
    )
    assert pods["parallelism"] == pods["completions"] == int(said["WORLD_SIZE"]) and pods["completionMode"] == "Indexed"
    assert jobs["name"] == "node" and container["command"] == ["bash", "-c"]
    (start,) = [line for line in container["args"][0].splitlines() if line.startswith("python run_training.py ")]
    words = start.split()
    assert words[-1] == "&"
    compose([word for word in words[2:-1] if not word.startswith("hydra.")])


@pytest.mark.parametrize("status, code, ends_with", [("completed", 0, 0), ("stopped", 0, 1), ("running", 3, 3)])
def test_a_pod_of_the_jobset_example_succeeds_only_with_a_run_that_is_completed(status, code, ends_with, tmp_path):
    job = yaml.safe_load((EXAMPLES / "jobset.yaml").read_text())
    (container,) = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    folder = tmp_path / "run"
    folder.mkdir()
    for file, word in ((folder / "status.json", "running"), (tmp_path / "ended", status)):
        file.write_text(json.dumps({"status": word}, indent=2))
    ends = f"end() {{ sleep 0.3; cp ended run/status.json; exit {code}; }}"
    program(tmp_path, "bin/python", f"{ends}\ntrap end TERM; touch began; for i in {{1..2000}}; do sleep 0.05; done")
    environment = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    call = [*container["command"], script.replace("/outputs/tunix-lite", str(folder))]
    pod = subprocess.Popen(call, cwd=tmp_path, env=environment)
    until = time.monotonic() + SOON
    while not (tmp_path / "began").exists() and time.monotonic() < until:
        time.sleep(0.02)
    pod.terminate()
    assert pod.wait(SOON) == ends_with
