"""benchmarks/gpu.py keeps what its parts have found, whatever becomes of them."""

import importlib.util
import json
import signal
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """The module, with parts of ours in place of the real ones."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "benchmarks" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    script = tmp_path / "parts.py"
    script.write_text(
        "import sys, time, subprocess\n"
        'print(\'{"name": "first", "value": 1, "bound": 2, "ok": true}\', flush=True)\n'
        "print('not a result', flush=True)\n"
        "part = sys.argv[1]\n"
        "if part == 'bf16': raise SystemExit('ran out of memory')\n"
        'if part == \'memory\': print(\'{"name": "second", "ok": false}\')\n'
        "if part == 'resume':\n"
        f"    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"    open(r'{tmp_path}/child', 'w').write(str(child.pid))\n"
        "    time.sleep(60)\n"
    )
    monkeypatch.setattr(module, "SCRIPT", script)
    return module


def run(gpu, monkeypatch, out: Path, *arguments: str) -> tuple[int, list[dict]]:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(out), *arguments])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            gpu.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    return ended.value.code, [json.loads(line) for line in (out / "gpu.jsonl").read_text().split("\n") if line]


def test_a_part_that_fails_costs_only_itself(gpu, monkeypatch, tmp_path):
    code, lines = run(gpu, monkeypatch, tmp_path / "out", "--parts", "bf16", "memory", "device")
    assert code == 1
    assert [line["part"] for line in lines if line.get("name") == "first"] == ["bf16", "memory", "device"]
    (failed,) = [line for line in lines if "failed" in line]
    assert failed["part"] == "bf16" and "exit code 1" in failed["failed"] and "ran out of memory" in failed["failed"]
    page = (tmp_path / "out" / "gpu.md").read_text()
    assert page.count("|first|") == 3 and "**failed**" in page
    assert "not a result" in (tmp_path / "out" / "device.out").read_text()


def test_a_part_that_hangs_is_stopped_with_all_that_it_started(gpu, monkeypatch, tmp_path):
    monkeypatch.setitem(gpu.SECONDS, "resume", 6)
    began = time.monotonic()
    code, lines = run(gpu, monkeypatch, tmp_path / "out", "--parts", "resume", "device")
    assert time.monotonic() - began < 40
    assert code == 1 and any("stopped at its limit of 6 s" in line.get("failed", "") for line in lines)
    assert {line["part"] for line in lines if line.get("name") == "first"} == {"resume", "device"}
    child = Path("/proc") / (tmp_path / "child").read_text()
    assert not child.exists() or "Z" in (child / "stat").read_text().split()[2]


def test_all_parts_together_stay_below_twenty_minutes(gpu):
    assert max(gpu.CHECKS.values()) + sum(gpu.TIMED.values()) + 10 < 1200
    assert gpu.TOTAL_SECONDS + 10 < 1200
    assert set(gpu.SECONDS) == set(parts_there_are())


def parts_there_are() -> list[str]:
    text = (ROOT / "benchmarks" / "gpu_parts.py").read_text()
    table = text.partition("\nPARTS = {\n")[2].partition("}")[0]
    return [line.split('"')[1] for line in table.splitlines() if '"' in line]
