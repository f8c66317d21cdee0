"""Who a process is, how processes meet, and what is said when they cannot be one run."""

import contextlib
import importlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax.experimental import mesh_utils, topologies
from processes import free_port, own_lines

from tunix_lite.distributed import agreement, join
from tunix_lite.distributed.agreement import ProcessInfo, _flatten_settings, describe_differences
from tunix_lite.distributed.meeting import NotMet, meet
from tunix_lite.distributed.process_place import LaunchConfig, ProcessPlace, find_place
from tunix_lite.parallel import mesh

ROOT = Path(__file__).parents[1]
TORCHRUN = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "RANK": "5"}
LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "gpu[007-009,012],login1",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "4",
}
WITH_ADDRESS = SLURM | {"MASTER_ADDR": "gpu007"}
MASTER = "MASTER_ADDR and MASTER_PORT"
OF_TORCHRUN = ProcessPlace(5, 8, "10.0.0.1:29500", source=MASTER)
OF_SLURM = ProcessPlace(5, 8, f"gpu007:{5000 % 4096 + 61440}", 1, 2, "srun")
THREE = {"coordinator": "a:1", "num_processes": 3, "process_id": 2}
OPEN_MPI = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://a:1", "OMPI_COMM_WORLD_SIZE": "2"}


# ---- who a process is


@pytest.mark.parametrize(
    "settings, environ, place",
    [
        ({}, {}, ProcessPlace()),
        ({}, TORCHRUN, OF_TORCHRUN),
        ({}, TORCHRUN | LOCAL, replace(OF_TORCHRUN, local_id=1, num_local=4)),
        # torchrun itself listens at the port that it names
        (
            {},
            TORCHRUN | LOCAL | {"TORCHELASTIC_RUN_ID": "none"},
            ProcessPlace(5, 8, "10.0.0.1:29501", 1, 4, f"{MASTER} + 1, torchrun having the port itself"),
        ),
        # explicit settings come first, and whatever is not theirs is not looked at
        (THREE, TORCHRUN | LOCAL, ProcessPlace(2, 3, "a:1", source="launch.coordinator")),
        # Slurm: jax finds the first node; with MASTER_ADDR the processes meet there, at a port from the job
        ({}, SLURM, replace(OF_SLURM, coordinator=None, asks_jax=True)),
        ({}, WITH_ADDRESS, OF_SLURM),
        ({}, {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, ProcessPlace()),  # not inside srun
        # A shell in a job of eight tasks is a step of one, and has the variables of the job beside those of its step.
        ({}, SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ProcessPlace(source="srun")),
        # what only jax knows
        ({}, {"TPU_WORKER_HOSTNAMES": "a,b"}, ProcessPlace(source="TPU_WORKER_HOSTNAMES", asks_jax=True)),
        ({}, OPEN_MPI, ProcessPlace(source="Open MPI", asks_jax=True)),
    ],
)
def test_a_process_finds_its_place(settings, environ, place):
    assert find_place(LaunchConfig(**settings), environ) == place


NO_PORT = "is not a port: it is a number from 1 to 65535, as in 192.168.1.10:29500"
EXPORT = "export MASTER_ADDR=$(scontrol show hostnames | head -n 1)"


@pytest.mark.parametrize(
    "settings, environ, message",
    [
        (THREE | {"coordinator": "a:b"}, {}, f"launch.coordinator: 'b' {NO_PORT}"),
        (THREE | {"process_id": 3}, {}, "launch.process_id=3, but launch.num_processes=3: processes count from 0 to 2"),
        ({}, {"WORLD_SIZE": "8", "RANK": "0"}, "WORLD_SIZE=8, but MASTER_ADDR is not set: it is the address of process 0"),
        ({}, SLURM | {"MASTER_PORT": "1"}, f"MASTER_PORT is set, but MASTER_ADDR is not: {EXPORT}, or unset MASTER_PORT"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_named(settings, environ, message):
    with pytest.raises(ValueError) as caught:
        find_place(LaunchConfig(**settings), environ)
    assert str(caught.value) == message


def test_a_process_has_one_gpu_of_a_machine_that_it_shares_and_all_of_its_own():
    shares = ProcessPlace(5, 8, "a:1", 1, 4)
    assert join.local_devices(shares, {}) == [1]
    assert join.local_devices(shares, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == [1]
    assert join.local_devices(shares, {"CUDA_VISIBLE_DEVICES": "3"}) is None  # srun --gpus-per-task=1
    assert join.local_devices(ProcessPlace(1, 2, "a:1"), {}) is None


def device(process: int, platform: str = "gpu", **more) -> SimpleNamespace:
    return SimpleNamespace(process_index=process, platform=platform, device_kind=platform, **more)


@pytest.mark.parametrize(
    "place, owners, message",
    [
        (
            ProcessPlace(),
            [0, 1, 2, 3],
            "jax sees the devices of 4 processes here, as on the hosts of a TPU slice, and this run was given 1: start every "
            "host with launch.coordinator=auto",
        ),
        (
            ProcessPlace(0, 2),
            [0, 1, 1],
            "process 1 has devices=2, the others 1. All must have as many devices of one kind: check its machine",
        ),
        (
            ProcessPlace(0, 2),
            [0, 0, 1, 1],
            "launch.expect_devices=16, but jax sees 4: 2 (gpu) in each of 2 processes. Several processes on a machine have "
            "one GPU each. Look at CUDA_VISIBLE_DEVICES, at what the cluster was asked for, and whether jax has its GPU or "
            "TPU package",
        ),
    ],
    ids=["other hosts", "uneven", "too few"],
)
def test_devices_that_are_not_as_they_should_be_are_refused_with_what_to_do(place, owners, message, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: len(set(owners)))
    monkeypatch.setattr(jax, "devices", lambda: [device(process) for process in owners])
    with pytest.raises(ValueError) as caught:
        join.check_devices(LaunchConfig(expect_devices=16), place)
    assert str(caught.value) == message


# ---- who differs


def said(*values: dict) -> dict:
    return {p: (f"process {p}", own) for p, own in enumerate(values)}


def test_the_odd_one_out_is_named_and_of_two_it_is_not_process_0():
    same = {"jax": "1", "seed": "0"}
    assert describe_differences(said(same, same, same)) is None
    assert describe_differences(said(same, same, same | {"jax": "2"})) == "process 2 has jax=2, the others 1"
    assert describe_differences(said(same, same | {"seed": "7"})) == "process 1 has seed=7, the others 0"
    odd = same | {"jax": "2", "seed": "3"}
    assert describe_differences(said(same, odd, same, odd)) == (
        "process 1 and process 3 have jax=2, the others 1; process 1 and process 3 have seed=3, the others 0"
    )
    assert describe_differences(said(same, {"jax": "1"})) is None  # what one does not say is no difference


def test_paths_that_belong_to_a_machine_are_compared_by_their_end():
    one = _flatten_settings({"model": {"weights": "/data/a/gemma"}, "launch": {"process_id": 3}, "seed": 1})
    assert one == {"model.weights": "gemma", "seed": "1"}


def heard(*values: dict) -> str | None:
    """What is said of processes on hosts a, b ... that have these values."""
    return agreement.mismatch_error({p: ProcessInfo(own, host="abc"[p]) for p, own in enumerate(values)})


def test_variables_that_change_programs_are_compared_though_only_one_has_them():
    names = "COORDINATOR_ADDRESS COORDINATOR_PORT PROCESS_ID NUM_PROCESSES LOCAL_DEVICE_IDS CUDA_VISIBLE_DEVICES "
    names += "NUM_CPU_DEVICES PLATFORMS COMPILATION_CACHE_DIR PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS LOGGING_LEVEL "
    names += "DEBUG_LOG_MODULES TRACEBACK_FILTERING"
    own = {f"JAX_{name}": "1" for name in names.split()} | {"JAX_DEFAULT_DEVICE": "", "HOME": "/root"}
    own |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_dump_to=/a"}
    assert agreement._compiler_variables(own) == {}
    mine = {"JAX_ENABLE_X64": "1", "XLA_FLAGS": "--xla_a=2  --xla_b --xla_force_host_platform_device_count=4"}
    values = agreement._compiler_variables(mine | {"LIBTPU_INIT_ARGS": "--xla_tpu_c=x"})
    assert values == {
        "variable JAX_ENABLE_X64": "1",
        "variable XLA_FLAGS --xla_a": "2",
        "variable XLA_FLAGS --xla_b": "true",
        "variable LIBTPU_INIT_ARGS --xla_tpu_c": "x",
    }
    assert heard(values, values, agreement._compiler_variables(own) | values) is None
    differs = "process 1 (b) has variable JAX_ENABLE_X64=1, the others not set. "
    assert heard({}, agreement._compiler_variables({"JAX_ENABLE_X64": "1"})).startswith(differs)


# ---- nodes


def test_processes_of_one_machine_or_one_slice_of_tpus_are_one_node(monkeypatch):
    monkeypatch.setattr(join, "hosts", lambda: ["a", "a", "b", "b"])
    devices = [device(p) for p in (0, 2, 1, 3)]
    assert join.nodes_of(devices) == [[devices[0], devices[2]], [devices[1], devices[3]]]
    monkeypatch.setattr(join, "hosts", lambda: ["a"])
    assert join.nodes_of(devices[:1]) == [devices[:1]]
    # A slice of TPUs is one, though it has many hosts.
    monkeypatch.setattr(join, "hosts", lambda: ["a", "b", "c", "d"])
    devices = [device(p, "tpu", slice_index=p // 2) for p in range(4)]
    assert join.nodes_of(devices) == [devices[:2], devices[2:]]


def test_tp_stays_inside_a_node_and_crosses_only_if_asked(monkeypatch):
    d0, d1, d2, d3 = devices = jax.devices()[:4]
    monkeypatch.setattr(mesh, "nodes_of", lambda _: [[d0, d2], [d1, d3]])
    assert mesh.make_mesh(((2, 2), ("fsdp", "tp")), devices).devices.tolist() == [[d0, d2], [d1, d3]]
    assert mesh.make_mesh(((-1, 1), ("fsdp", "tp")), devices).devices.tolist() == [[d0], [d2], [d1], [d3]]
    with pytest.raises(ValueError) as caught:
        mesh.make_mesh(((1, 4), ("fsdp", "tp")), devices)
    assert str(caught.value) == (
        "tp=4 would cross the network between 2 nodes with 2 devices each, in every layer; tp could be 1, 2, and "
        "launch.tp_across_nodes=true allows it"
    )
    crossing = mesh.make_mesh(((1, 4), ("fsdp", "tp")), devices, tp_across_nodes=True)
    assert crossing.devices.tolist() == [[d0, d2, d1, d3]]


@pytest.mark.aot
def test_tp_stays_inside_a_slice_of_real_tpus_as_jax_lays_out_a_hybrid_mesh():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the extra plan-tpu")
    two_slices = topologies.get_topology_desc("v5e:2x4", platform="tpu", num_slices=2).devices
    inside = mesh.make_mesh(((4, 4), ("fsdp", "tp")), two_slices).devices
    assert [[d.slice_index for d in row] for row in inside] == [[0] * 4] * 2 + [[1] * 4] * 2
    assert inside.tolist() == mesh_utils.create_hybrid_device_mesh((2, 4), (2, 1), two_slices).tolist()


@pytest.mark.parametrize("name", ["TUNIX_LITE_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_who_was_started_before_knows_it_from_who_did(name):
    assert [join.is_restart(said) for said in ({}, {name: ""}, {name: "0"}, {name: "2"})] == [False] * 3 + [True]


# ---- meeting: threads are processes enough for that


def together(*abouts: ProcessInfo, timeout: float = 20, count: int | None = None, ids=None, kind=ValueError) -> list:
    """What each process hears: what all agreed on, or the message of its error, which is of this kind."""
    port, heard, kinds = free_port(), [None] * len(abouts), [kind] * len(abouts)
    ids = list(range(len(abouts))) if ids is None else ids

    def take_part(i: int) -> None:
        place = ProcessPlace(ids[i], count or len(abouts), f"127.0.0.1:{port}", source="MASTER_PORT")
        try:
            heard[i] = meet(place, abouts[i], timeout, say=lambda _: None)
        except ValueError as error:
            heard[i], kinds[i] = str(error).replace(str(port), "PORT"), type(error)

    threads = [threading.Thread(target=take_part, args=(i,)) for i in range(len(abouts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 5)
    assert kinds == [kind] * len(abouts)
    return heard


def test_processes_that_meet_know_their_hosts_and_the_folder_of_the_first_and_who_differs():
    heard = together(*(ProcessInfo({"seed": "1"}, f"folder{p}", f"host{p}") for p in range(3)))
    assert heard == [agreement.Agreement(["host0", "host1", "host2"], "folder0")] * 3
    heard = together(*(ProcessInfo({"training.max_steps": str(3 + (p == 1))}, None, f"host{p}") for p in range(3)))
    differs = "process 1 (host1) has training.max_steps=4, the others 3. "
    assert heard == [f"{differs}Start all of them with the same command and the same packages"] * 3
    heard = together(*(ProcessInfo({}, None, host) for host in "abc"), count=4, ids=[0, 1, 1])
    assert heard[0].startswith("two processes say that they are process 1 (") and heard == [heard[0]] * 3


def test_process_0_says_who_did_not_come():
    began = time.monotonic()
    heard = together(ProcessInfo({}, None, "a"), ProcessInfo({}, None, "b"), timeout=1, count=4, kind=NotMet)
    assert time.monotonic() - began < 20
    assert heard == [heard[0]] * 2
    assert heard[0] == (
        "process 0 of 4 waited 1 s at 127.0.0.1:PORT, and processes 2 and 3 did not come. Check that every machine was "
        "started, that the others have this address (ours is from MASTER_PORT), and that no firewall is between them; "
        "processes are counted, not devices. launch.timeout=SECONDS waits longer"
    )


def test_where_nobody_listens_the_address_is_named_in_the_time_given():
    port, began, lines = free_port(), time.monotonic(), []
    place = ProcessPlace(1, 2, f"127.0.0.1:{port}", source="MASTER_ADDR and MASTER_PORT")
    with pytest.raises(NotMet) as caught:
        meet(place, ProcessInfo({}, None, "b"), 3, lines.append)
    assert 2.9 < time.monotonic() - began < 20
    (line,) = lines
    assert re.fullmatch(rf"process 1 looks for process 0 at 127.0.0.1:{port}, [01] s left", line)
    assert str(caught.value) == (
        f"process 1 of 2 (b) could not reach process 0 at 127.0.0.1:{port} in 3 s: Connection refused. Check that "
        "process 0 was started and still runs, that this is its address (it is from MASTER_ADDR and MASTER_PORT), and "
        f"that no firewall is between them: nc -zv 127.0.0.1 {port}. RANK counts processes, not machines. launch.timeout=SECONDS waits longer"
    )


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(NotMet) as caught:
            meet(ProcessPlace(0, 2, f"127.0.0.1:{port}", source="MASTER_PORT"), ProcessInfo({}, None, "a"), 5)
    assert str(caught.value) == (
        f"port {port}, where process 0 listens, is taken: by another run, or by one that has not ended yet "
        f"(ss -ltnp | grep {port} shows which). Choose another, the same on every machine; this one is from MASTER_PORT"
    )


def hello(**other) -> bytes:
    """What process 1 of two says, with something else in it."""
    about = {"values": {}, "folder": None, "host": "x"} | other.pop("about", {})
    return json.dumps({"tunix_lite": 1, "num_processes": 2, "about": about} | other).encode() + b"\n"


STRANGERS = {
    "a browser": b"GET / HTTP/1.1\r\n\r\n",
    "a line without end": b"x" * ((1 << 22) + (1 << 17)),
    "infinity": hello(tunix_lite=float("inf")),
    "beyond the last": hello(tunix_lite=2),
    "values as numbers": hello(about={"values": {"seed": 1}}),
}


def test_strangers_at_the_port_are_ignored_and_named_once():
    port, heard, lines = free_port(), [], []
    place = ProcessPlace(0, 2, f"127.0.0.1:{port}")
    first = threading.Thread(target=lambda: heard.append(meet(place, ProcessInfo({}, "f", "a"), 60, lines.append)))
    first.start()
    for words in STRANGERS.values():
        with connected(port) as stranger, contextlib.suppress(OSError):
            stranger.sendall(words)
            stranger.settimeout(20)
            assert stranger.recv(1) == b""
    assert first.is_alive()
    meet(ProcessPlace(1, 2, f"127.0.0.1:{port}"), ProcessInfo({}, None, "b"), 20)
    first.join(20)
    assert heard == [agreement.Agreement(["a", "b"], "f")]
    said = [line for line in lines if "s left" not in line]
    assert said == [f"process 0: a connection to port {port} is not from this run, and is ignored"]


def connected(port: int) -> socket.socket:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port))
        time.sleep(0.02)
    raise AssertionError("nobody listens")


# ---- processes with jax in them


def launched(folder: Path, *words: str, **environ):
    environment = {k: v for k, v in os.environ.items() if k not in (*TORCHRUN, *LOCAL, "JAX_COMPILATION_CACHE_DIR")}
    environment |= {"PYTHONPATH": str(ROOT)} | environ
    call = [sys.executable, "-m", "tunix_lite.launch", "--nprocs=2", str(ROOT / "tests" / "launch_worker.py")]
    call += [*words, "hydra.run.dir=run"]
    return subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def test_two_processes_become_one_run_and_agree_on_what_is_found_later(tmp_path):
    """No program of theirs is written to the cache on disk."""
    cache = tmp_path / "cache"
    settings = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    done = launched(tmp_path, "join", **settings)
    assert (done.returncode, done.stderr) == (0, "")
    host = socket.gethostname()
    differs = f"process 1 ({host}) has weights=of 1, the others of 0. Start all of them with the same command and the same packages"
    log = (tmp_path / "run" / "launch" / "p1.log").read_text()
    for rank, printed, error in ((0, done.stdout, "no"), (1, log, f"process 0 ({host}): no")):
        # in the middle of what gloo says of its connections
        assert re.findall(r"\[\d, 4, 2, 3, .*?\]", printed) == [f'[{rank}, 4, 2, 3, "folder0"]']
        assert own_lines(printed)[1:] == [differs, error]
    assert not list(cache.rglob("*-cache"))


@pytest.mark.wide
def test_tasks_of_srun_become_one_run_through_jax(tmp_path):
    """As two tasks on one node, of a job that has four."""
    said = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "4"}
    said |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "PYTHONPATH": str(ROOT)}
    call = [sys.executable, str(ROOT / "tests" / "launch_worker.py"), "join"]
    pipes = {"stdout": subprocess.PIPE, "text": True, "cwd": tmp_path}
    numbers = [{"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "RANK": rank} for rank in "01"]
    tasks = [subprocess.Popen(call, env=os.environ | said | own, **pipes) for own in numbers]
    printed = [task.communicate(timeout=240)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0]
    found = [re.findall(r"\[\d, 4, 2, 3, .*?\]", text) for text in printed]
    assert found == [[f'[{rank}, 4, 2, 3, "folder0"]'] for rank in (0, 1)]


def test_launchers_of_two_machines_start_their_processes_again_after_one_was_lost(tmp_path):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-m", "tunix_lite.launch", str(ROOT / "tests" / "launch_worker.py"), "killed once"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    machines = [subprocess.Popen(call, env=os.environ | address | {"RANK": str(rank)}, **pipes) for rank in range(2)]
    said = [machine.communicate(timeout=240) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert "launch: process 1 was ended by SIGKILL" in said[1][1] and "Traceback" not in said[0][1]
    assert "launch: process 0 ended with exit code 1: it lost a process on another machine" in said[0][1]


def test_nobody_waits_for_a_peer_that_is_stopped(tmp_path):
    done = launched(tmp_path, "stopped")
    assert done.returncode == 124
    said = r"launch: process [01] stalled for \d+ s, and launch.stall_timeout=2\. Last signs: "
    assert re.search(said, done.stderr)
