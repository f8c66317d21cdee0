"""The launcher, with processes that are plain Python: one fails, stalls, or is told to stop, and all are gone."""

import json
import os
import re
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
from tunix_lite.distributed.launcher import _LocalProcesses, local_processes
from tunix_lite.distributed.process_place import TORCH_SETS, LaunchConfig, ProcessPlace, find_place
from tunix_lite.settings.compose import compose

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
        # Under nohup it would be ignored.
        main = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); {main}"
        call = [sys.executable, "-c", main, *flags, "child.py", str(folder), *words]
        self.folder, self.began = folder, time.monotonic()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(call, cwd=folder, env=environment, **pipes)

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


@pytest.mark.parametrize(
    "peer",
    [
        "while not (folder / 'started1').exists(): time.sleep(0.01)\n    time.sleep(0.4); os.abort()",
        # The kernel closes the connections of a killed process before its parent can see that it has ended.
        f"print({LOST_A_PEER!r}, file=sys.stderr); sys.exit(1)",
    ],
    ids=["aborts", "has lost it"],
)
def test_one_that_is_killed_is_the_culprit_though_its_peer_ends_because_of_it(peer, tmp_path):
    body = f"if rank == '0':\n    {peer}\ntime.sleep(0.3)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    code, _, err = Launched(tmp_path, body, "--nprocs=2").end()
    assert code == 128 + signal.SIGKILL
    assert "launch: process 1 was ended by SIGKILL; perhaps the machine ran out of memory\n" in err


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


def test_a_restart_does_not_set_the_clock_of_a_job_anew(tmp_path, monkeypatch):
    """It is that of the launcher, or of the script that started it."""
    body = """
with (folder / f"clock{rank}").open("a") as file:
    file.write(os.environ["TUNIX_LITE_STARTED"] + "\\n")
if (folder / "clock0").read_text().count("\\n") < 2: sys.exit(1)
"""
    monkeypatch.delenv("TUNIX_LITE_STARTED", raising=False)
    before = time.time()
    assert Launched(tmp_path, body, max_restarts=2).end()[0] == 0
    first, second = (tmp_path / "clock0").read_text().splitlines()
    assert first == second and before < float(first) < time.time()
    monkeypatch.setenv("TUNIX_LITE_STARTED", "1700000000")
    (tmp_path / "clock0").unlink()
    assert Launched(tmp_path, body, max_restarts=2).end()[0] == 0
    assert (tmp_path / "clock0").read_text() == "1700000000\n" * 2


def test_wrong_settings_are_not_tried_again_and_leave_nothing(tmp_path):
    body = "\nwhile not (folder / 'started0').exists(): time.sleep(0.01)\nsys.exit(2)"
    run = Launched(tmp_path, body, "--nprocs=2", max_restarts=5)
    code, *_ = run.end()
    assert code == 2 and len((tmp_path / "started0").read_text().splitlines()) == 1
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


@pytest.mark.parametrize("stop, code", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_is_handed_on_and_all_stop_by_themselves(stop, code, tmp_path):
    """A run that Ctrl-C stopped well is not taken for a whole one."""
    # what a shell runs in its background ignores Ctrl-C, and so would the launcher
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run = Launched(tmp_path, STOPS.replace("SIGTERM", stop.name), "--nprocs=2", max_restarts=3)
    finally:
        signal.signal(signal.SIGINT, before)
    wait_until_ready(run)
    run.process.send_signal(stop)
    assert run.end() == (code, "here is 0\nstopping\n", "")


def test_a_second_signal_ends_what_does_not_stop(tmp_path):
    run = Launched(tmp_path, STOPS + WAIT, "--nprocs=2", max_restarts=3)
    wait_until_ready(run)
    run.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert (code, err) == (128 + signal.SIGTERM, "launch: stopped by SIGTERM\n")


def test_two_signals_at_once_are_no_success(tmp_path):
    run = Launched(tmp_path, STOPS + WAIT, "--nprocs=2", max_restarts=3)
    wait_until_ready(run)
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGHUP)
    code, _, err = run.end()
    assert code - 128 in (signal.SIGTERM, signal.SIGHUP)
    assert err == f"launch: stopped by {signal.Signals(code - 128).name}\n"


def test_processes_that_a_signal_ends_together_with_the_launcher_have_not_failed(tmp_path):
    body = "\n(folder / f'ready{rank}').write_text(str(os.getpid()))" + WAIT
    run = Launched(tmp_path, body, "--nprocs=2", max_restarts=3)
    wait_until_ready(run)
    pids = [int(file.read_text()) for file in tmp_path.glob("ready*")]
    run.process.send_signal(signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGCONT)
    code, _, err = run.end()
    assert (code, err) == (128 + signal.SIGTERM, "launch: stopped by SIGTERM\n")


def test_one_that_fails_after_a_signal_is_named_and_the_others_do_not_wait_for_ever(tmp_path):
    body = STOPS + "\nif rank == '1':\n    print('saving failed: the culprit'); sys.exit(9)" + WAIT
    run = Launched(tmp_path, body, "--nprocs=2", max_restarts=3, grace=1)
    wait_until_ready(run)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    lines = err.splitlines()
    assert code == 9 and lines[0] == "launch: process 1 ended with exit code 9"
    assert lines[-2:] == [
        "launch:   saving failed: the culprit",
        "launch: process 0: still running 1 s later, and ended",
    ]


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


def test_the_processes_of_a_machine_are_numbered_from_its_rank_or_its_place_in_slurm():
    said = {"MASTER_ADDR": "192.168.1.10", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "RANK": "4"}
    group = local_processes(4, said)
    assert group == _LocalProcesses(4, 8, 4, "192.168.1.10", "29500")
    told = group.environments()
    assert [e["RANK"] for e in told] == ["4", "5", "6", "7"] and [e["LOCAL_RANK"] for e in told] == ["0", "1", "2", "3"]
    assert {e["WORLD_SIZE"] for e in told} == {"8"} and {e["MASTER_ADDR"] for e in told} == {"192.168.1.10"}
    slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "gpu[003-004]", "SLURM_NTASKS": "2"}
    slurm |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    where = slurm | {"MASTER_ADDR": "gpu003"}
    assert local_processes(4, where) == _LocalProcesses(4, 8, 4, "gpu003", str(77 + 61440))
    for environ, message in (
        (
            slurm,
            "MASTER_ADDR is not set: under srun each node has a launcher, and all need the node of process 0; export ",
        ),
        (
            said | {"RANK": "5"},
            "RANK=5 and --nprocs=4 are processes 5 to 8, but WORLD_SIZE=8: RANK is the number of the ",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            local_processes(4, environ)


@pytest.mark.parametrize(
    "words, message",
    [
        (["x.py", "--nprocs=4"], "--nprocs is a flag of the launcher: write it before the program and its settings"),
        (["--nproc_per_node=2", "x.py"], "--nproc_per_node=2: the launcher has no such flag; it has --nprocs. "),
        (["--nprocs=auto", "x.py"], "argument --nprocs: invalid int value: 'auto'"),
        (["--nprocs=0", "x.py"], "--nprocs=0 must be at least 1"),
    ],
)
def test_a_wrong_flag_is_one_line_without_the_usage(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        launcher.main(words)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_without_a_file_it_trains(monkeypatch):
    commands = []
    monkeypatch.setattr(launcher, "_supervise", lambda command, *_: commands.append(command) or 0)
    for words in (["hydra.run.dir=a"], ["run_training.py", "hydra.run.dir=a"], ["evaluate", "checkpoint=RUN"]):
        with pytest.raises(SystemExit):
            launcher.main(words)
    ours = ["-m", "tunix_lite"]
    expected = [[*ours, "train", "hydra.run.dir=a"], ["run_training.py", "hydra.run.dir=a"]]
    assert commands == [[sys.executable, *words] for words in (*expected, [*ours, "evaluate", "checkpoint=RUN"])]


def test_the_settings_of_a_run_reach_its_launcher_and_do_not_say_who_is_who(tmp_path):
    join.tell_launcher(LaunchConfig(max_restarts=2), {"TUNIX_LITE_HEARTBEAT": str(tmp_path / "p0")})
    assert json.loads((tmp_path / "p0.settings").read_text()) == {"stall_timeout": 1800, "max_restarts": 2}
    launch = LaunchConfig("a:1", 2, 1)
    join.tell_launcher(launch, {})
    with pytest.raises(ValueError, match="^launch.coordinator=a:1: the launcher numbers the processes; for several "):
        join.tell_launcher(launch, {"TUNIX_LITE_HEARTBEAT": str(tmp_path / "p0"), "WORLD_SIZE": "2"})


def test_the_folder_is_named_as_conf_or_a_setting_says_and_hydra_reads_odd_characters():
    assert (
        command_line.project_name([]) == "tunix_lite" and command_line.project_name(["++project_name='x y'"]) == "x y"
    )
    (word,) = command_line.in_folder("outputs/it's, 1", [])
    assert word == "hydra.run.dir='outputs/it\\'s, 1'" and command_line.folder_given([word]) == "outputs/it's, 1"
    override = OverridesParser.create().parse_override(word)
    assert override.value() == "outputs/it's, 1"


# ---- examples/launch


EXAMPLES = Path(__file__).parents[1] / "examples" / "launch"
WAITS = "for i in {1..2000}; do sleep 0.05; done"


def program(folder: Path, name: str, body: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/bash\n{body}\n")
    file.chmod(0o755)
    return file


def terminated(call: list[str], folder: Path, sign: Path, **environment: str) -> int:
    """The exit code of a script that gets SIGTERM when this file is there."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    job = subprocess.Popen(call, cwd=folder, env={"PATH": path, **environment})
    until = time.monotonic() + SOON
    while not sign.exists() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.1)
    job.terminate()
    return job.wait(SOON)


def test_the_ssh_example_tells_each_machine_its_place_and_passes_settings_on(tmp_path):
    program(tmp_path, "bin/ssh", 'echo "$2" >> hosts; exec bash -c "$3"')
    said = 'echo "$MASTER_ADDR:$MASTER_PORT $RANK/$WORLD_SIZE $2" >> said; [ $RANK = 0 ]'
    program(tmp_path, ".venv/bin/python", said)
    environment = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    call = ["bash", str(EXAMPLES / "ssh.sh"), "model.mesh_shape=[[16,1],[fsdp, tp]]"]
    done = subprocess.run(call, cwd=tmp_path, env=environment | {"HOSTS": "me@gpu1 gpu2"}, timeout=SOON)
    assert sorted((tmp_path / "said").read_text().splitlines()) == [
        f"gpu1:29500 {rank}/2 model.mesh_shape=[[16,1],[fsdp, tp]]" for rank in (0, 1)
    ]
    assert sorted((tmp_path / "hosts").read_text().split()) == ["gpu2", "me@gpu1"]
    assert done.returncode == 1  # that of the one that failed


def test_the_slurm_example_hands_its_signal_on_and_ends_as_the_run_does(tmp_path):
    srun = 'echo $$ > pid; echo "$@" "$SRUN_CPUS_PER_TASK cores $MASTER_ADDR" > said; trap "exit 7" TERM'
    program(tmp_path, "bin/srun", f"{srun}; {WAITS}")
    program(tmp_path, "bin/scontrol", 'printf "%s of $3\\n" gpu1 gpu2')
    program(tmp_path, "bin/scancel", 'echo "$@" > cancelled; kill -TERM $(cat pid)')
    script = (EXAMPLES / "slurm.sbatch").read_text()
    call = ["bash", "-c", script, "slurm.sbatch", "seed=1"]
    slurm = {"JOB_ID": "9", "NNODES": "2", "JOB_NODELIST": "gpu[1-2]", "GPUS_PER_NODE": "h100:4", "CPUS_PER_TASK": "64"}
    environment = {f"SLURM_{name}": value for name, value in slurm.items()}
    assert terminated(call, tmp_path, tmp_path / "said", **environment) == 7
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
    program(tmp_path, "bin/python", f"{ends}\ntrap end TERM; touch began; {WAITS}")
    call = [*container["command"], script.replace("/outputs/tunix-lite", str(folder))]
    assert terminated(call, tmp_path, tmp_path / "began") == ends_with
