"""Everything that only a GPU can tell, in one command that takes at most twenty minutes and needs no network.

    python benchmarks/gpu.py                      # on a machine with a GPU: checks, the quickstart, figures
    python benchmarks/gpu.py --tiny               # the same parts at toy sizes, on a CPU: what CI runs
    python benchmarks/gpu.py --parts bf16 resume  # some of them
    python benchmarks/gpu.py --seconds 600        # what ten minutes allow; checks come first

Each part (gpu_parts.py) runs in a process of its own with its own limit of seconds, so that a crash, a hang or a lack
of memory costs that part only. Nearly all of the time is compiling: so the parts that only check run side by side, and
those that measure time run alone after them. Results are kept as they come: OUT/gpu.jsonl has one line a result,
OUT/gpu.md is a page of them, OUT/PART.log has the stderr of a part, and OUT/PART.out what else it printed. Exit code 1
means that a check failed or that a part did not end well.

It needs Python 3.11 or newer and the packages of pyproject.toml; jax 0.10 to 0.12 with CUDA 12 or 13.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import arguments

ROOT = Path(__file__).resolve().parents[1]
TOTAL_SECONDS = 1180  # for all parts together: below twenty minutes with what stands around them
# Parts that check, and the limit of each. On an H200 with 16 cores, eight processes that compiled at a time needed half
# of these.
CHECKS = {"quickstart": 240, "resume": 240, "bf16": 240, "exactness": 300, "attention": 300}
# Parts that measure time; those that are worth most come first.
TIMED = {"device": 45, "step": 180, "gemma3_1b": 200, "decode": 120, "memory": 90, "qwen3_0.6b": 120, "peers": 120}
SECONDS = CHECKS | TIMED
SCRIPT = ROOT / "benchmarks" / "gpu_parts.py"
TINY_SECONDS = 300  # a part's limit with --tiny: a CPU that others use may be slow
END_SECONDS = 10  # that a part may take to end after SIGTERM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="toy sizes, on a CPU where there is no GPU")
    parser.add_argument("--parts", nargs="+", choices=SECONDS, default=list(SECONDS))
    parser.add_argument(
        "--seconds", type=arguments.seconds, help=f"for all parts together; {TOTAL_SECONDS}, or no limit if tiny"
    )
    parser.add_argument("--out", type=arguments.new_folder, help="folder for the results; outputs/gpu/<date and time>")
    args = parser.parse_args()
    out = args.out or ROOT / "outputs" / "gpu" / time.strftime("%Y-%m-%d_%H-%M-%S")
    out.mkdir(parents=True, exist_ok=True)
    total = args.seconds or (float("inf") if args.tiny else TOTAL_SECONDS)
    ends = time.monotonic() + total

    # Ended from outside, it ends its part, too: that would keep the GPU.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results, lock = Results(out), threading.Lock()

    def one(part: str, beside: int) -> None:
        left = min(ends - time.monotonic(), TINY_SECONDS if args.tiny else SECONDS[part])
        lines = iter([{"failed": "not started: no time was left"}])
        if left >= 5:
            lines = lines_of(part, left, args.tiny, out, beside)
        for line in lines:
            with lock:
                results.add({"part": part} | line)

    # A program is compiled by some two threads.
    at_once = max(1, min(len(CHECKS), (os.cpu_count() or 1) // 2))
    pool = ThreadPoolExecutor(at_once)
    try:
        for _ in pool.map(one, [part for part in args.parts if part in CHECKS], repeat(at_once)):
            pass
        for part in args.parts:
            if part in TIMED:
                one(part, 1)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(RUNNING):
            end(process)
    print(f"{results.passed} passed, {results.failed} failed\n{out / 'gpu.md'}")
    sys.exit(1 if results.failed else 0)


RUNNING: set[subprocess.Popen] = set()


def lines_of(part: str, seconds: float, tiny: bool, out: Path, beside: int) -> Iterator[dict]:
    """What a part finds, line by line as it comes, and how it ended if that was not well. beside: parts that run at a
    time."""
    command = [sys.executable, str(SCRIPT), part, "--out", str(out)]
    command += ["--seconds", str(seconds), *(["--tiny"] if tiny else [])]
    began = time.monotonic()
    with (out / f"{part}.log").open("w") as log, (out / f"{part}.out").open("w") as other:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env=environment(tiny, out, beside),
        )
        RUNNING.add(process)
        timer = threading.Timer(seconds, end, [process])
        timer.start()
        try:
            for line in process.stdout:
                found = as_result(line)
                if found is None:
                    other.write(line)
                else:
                    yield found
            code = process.wait()
        finally:
            timer.cancel()
            end(process)
            RUNNING.discard(process)
    took = time.monotonic() - began
    if code:
        what = f"stopped at its limit of {seconds:.0f} s" if took >= seconds else f"ended with exit code {code}"
        yield {"failed": f"{what}; the end of {part}.log: {last_words(out / f'{part}.log')}"}
    yield {"name": "seconds of this part", "value": round(took, 1)}


def environment(tiny: bool, out: Path, beside: int) -> dict[str, str]:
    """Our code first, programs kept on disk from part to part, a share of the GPU's memory, and a CPU where a toy run
    finds no GPU."""
    found = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(":")}
    found.setdefault("JAX_COMPILATION_CACHE_DIR", str(out / "compiled"))
    if beside > 1:
        found |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / beside:.2f}"}
    if tiny:
        found.setdefault("JAX_PLATFORMS", "cpu")
    return found


def as_result(line: str) -> dict | None:
    """A line of JSON that a part printed, or None for any other text."""
    if not line.startswith("{"):
        return None
    try:
        return dict(json.loads(line))
    except ValueError:
        return None


def end(process: subprocess.Popen) -> None:
    """Ends a part with all that it started."""
    for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except (ProcessLookupError, PermissionError):
            return
        except subprocess.TimeoutExpired:
            continue


def last_words(file: Path) -> str:
    lines = [line.strip() for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "nothing"


class Results:
    """Lines as they come: on the screen, in gpu.jsonl, and in gpu.md, which is written anew with each."""

    def __init__(self, out: Path):
        self.out, self.lines = out, []
        self.file = (out / "gpu.jsonl").open("a")
        self.passed = self.failed = 0

    def add(self, line: dict) -> None:
        self.lines.append(line)
        self.passed += line.get("ok") is True
        self.failed += "failed" in line or line.get("ok") is False
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        print(as_text(line), flush=True)
        (self.out / "gpu.md").write_text(page(self.lines))


def as_text(line: dict) -> str:
    mark = "FAIL" if "failed" in line or line.get("ok") is False else "ok  " if line.get("ok") else "    "
    return f"{mark} {line['part']:<11} " + "  ".join(cell(key, value) for key, value in told(line))


def told(line: dict) -> list[tuple[str, object]]:
    return [(key, value) for key, value in line.items() if key not in ("part", "ok")]


def cell(key: str, value: object) -> str:
    return str(value) if key in ("name", "failed", "skipped") else f"{key}={value}"


def page(lines: list[dict]) -> str:
    """All results as one page of Markdown, a table a part."""
    about = next((line for line in lines if line["part"] == "device" and "device" in line), {})
    head = ", ".join(f"{key} {value}" for key, value in told(about) if key != "name")
    text = ["# Measured on a GPU", "", "`python benchmarks/gpu.py` writes this page.", "", head, ""]
    for part in dict.fromkeys(line["part"] for line in lines):
        text += [f"## {part}", "", "| result | | |", "|---|---|---|"]
        for line in lines:
            if line["part"] == part:
                verdict = {True: "passed", False: "**failed**"}.get(line.get("ok"), "**failed**" * ("failed" in line))
                rest = ", ".join(cell(key, value) for key, value in told(line) if key != "name")
                text.append(f"|{line.get('name', '')}|{rest.replace('|', '/')}|{verdict}|")
        text.append("")
    return "\n".join(text)


if __name__ == "__main__":
    main()
