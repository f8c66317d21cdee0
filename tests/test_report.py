"""Reports: their numbers computed again from the files of a run, hostile texts, size, time, and runs that were killed."""

import html.parser
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml

from tunix_lite.__main__ import main
from tunix_lite.basics.locks import is_held
from tunix_lite.report.charts import Chart, Line, line_chart
from tunix_lite.report.comparison import runs_in
from tunix_lite.report.page import write_at_end, write_page
from tunix_lite.report.run_page import run_page

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>](javascript:x)|`</pre>&\x1b[31m\u202e"
STEPS, EXAMPLES, SAMPLES = 60, 40, 4
EVALUATION = "samples/evaluation_000000.jsonl"


# ---- folders of runs, made here


def metric_rows(steps: int, rng: np.random.Generator, every: int = 15) -> list[dict]:
    rows = []
    for step in range(steps + 1):
        row: dict = {"step": step}
        if step:
            row |= {"train/loss": float(rng.normal()), "reward/mean": step / steps / 2 + float(rng.normal() / 20)}
            row |= {"completions/mean_length": 20 + step / 10, "completions/correct": float(rng.random())}
            row |= {"train/entropy": 1 / step, "train/grad_norm": float(rng.random()) + 0.1, "train/update_norm": 1e-3}
            row |= {
                "train/learning_rate": 4e-5 * min(step / 5, 1),
                "train/num_tokens": 1000 * step,
                "train/skipped": 0.0,
            }
            row |= {"time/rollout": 0.5 + float(rng.random()), "time/rewards": 0.01, "time/reference": 0.2}
            row |= {"time/update": 0.4, "perf/tokens_per_second": 500 + step, "memory/peak_gb": 1.5}
            row["time/collect"] = row["time/rollout"] + 0.31
            row["time/step"] = row["time/collect"] + row["time/update"]
        if step % every == 0:
            row |= {"eval/accuracy": 0.0, "eval/reward": 0.0, "time/eval": 1.25}
        rows.append(row)
    return rows


def evaluation(step: int, right: np.ndarray, sampled: np.ndarray, text: str = "") -> list[dict]:
    rows = []
    for group, is_right in enumerate(right):
        row = {"prompt": f"What is {group}?{text}", "completion": f"{group} at {step}{text}", "group": group}
        row |= {"expected": f"{group}{text}", "extracted": f"{group}{text}", "rewards": {f"correct{text}": 1.0}}
        rows.append(row | {"sampled": False, "correct": bool(is_right), "reward": float(is_right)})
    for group, row_S in enumerate(sampled):
        for is_right in row_S:
            answer = str(group) if is_right else f"no {group}"
            row = {"sampled": True, "group": group, "correct": bool(is_right), "extracted": answer}
            rows.append(row | {"prompt": "?"})
    return rows


def make_run(folder, steps: int = STEPS, seed: int = 0, text: str = "", **settings):
    """The folder of a run that never was, and what is true of it."""
    rng = np.random.default_rng(seed)
    rows = metric_rows(steps, rng)
    truth = {}
    (folder / "samples").mkdir(parents=True)
    for step in (0, steps):
        right = rng.random(EXAMPLES) < (0.9 if step else 0.4)
        sampled = rng.random((EXAMPLES, SAMPLES)) < (0.7 if step else 0.5)
        truth[step] = (right, sampled)
        rows[step] |= {"eval/accuracy": float(right.mean()), f"eval/avg_at_{SAMPLES}": float(sampled.mean())}
        lines = evaluation(step, right, sampled, text)
        (folder / "samples" / f"evaluation_{step:06d}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    group = [{"prompt": f"p{text}", "completion": f"c{i}{text}", "correct": i > 2, "reward": i / 4} for i in range(4)]
    group = [row | {"group": 0, "rewards": {f"near{text}": 0.5}, "advantage": -0.5} for row in group]
    (folder / "samples" / f"step_{steps:06d}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in group))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status = {"status": "completed", "steps": steps, "seconds": 400.0, "algorithm": f"GRPO{text}", "seed": seed}
    status |= {"parameters": 632448, "mesh": {f"fsdp{text}": 2, "tp": 1}, "versions": {"jax": f"0.10{text}"}}
    (folder / "status.json").write_text(json.dumps(status | {"batch": f"16 x 8{text}"}))
    (folder / ".hydra").mkdir()
    known = {"optimizer": {"learning_rate": 4e-5}, "training": {"max_steps": steps}, "seed": seed, f"k{text}": text}
    known |= {"algorithm": {"num_generations": 4}, "evaluation": {"num_examples": EXAMPLES}, **settings}
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(known))
    given = [f"seed={seed}", f"training.max_steps={steps}", *([f"task.x={text}"] if text else [])]
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(given))
    (folder / "checkpoints" / "60").mkdir(parents=True)
    return rows, truth


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    return folder, *make_run(folder)


# ---- a reader of HTML that knows nothing of how it was made


class Reader(html.parser.HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag != "meta":
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words.append(data)
        if self.open[-1:] in (["td"], ["th"]):
            self.tables[-1][-1][-1] += data

    def table(self, head: str) -> dict[str, list[str]]:
        """The rows of the table whose first head is this, by their first cell."""
        (found,) = [t for t in self.tables if t[0][0] == head]
        return {row[0]: row[1:] for row in found[1:]}


def read(folder) -> Reader:
    return Reader(write_page(run_page(folder), folder / "page").read_text())


def numbers(text: str) -> list[float]:
    return [float(x.replace(",", "")) for x in re.findall(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?", text)]


# ---- numbers


def test_scores_before_and_after_are_those_of_the_samples(run):
    folder, _, truth = run
    table = read(folder).table("score")
    (right0, sampled0), (right1, sampled1) = truth[0], truth[STEPS]
    of = {
        "accuracy": (right0, right1),
        "avg@4": (sampled0.mean(1), sampled1.mean(1)),
        "pass@4": (sampled0.any(1), sampled1.any(1)),
    }
    for name, (before, after) in of.items():
        cells = table[name]
        for cell, values in zip(cells, (before, after)):
            mean, low, high = numbers(cell)
            assert mean == pytest.approx(100 * values.mean(), abs=0.051)
            reach = 196 * values.std() / np.sqrt(EXAMPLES)
            assert (low + high) / 2 == pytest.approx(mean, abs=5) and (high - low) / 2 == pytest.approx(reach, rel=0.25)
        change = np.float64(after) - np.float64(before)
        assert numbers(cells[2])[0] == pytest.approx(100 * change.mean(), abs=0.051)
        low, high = numbers(cells[3].replace(" to ", " "))
        assert (high - low) / 2 == pytest.approx(196 * change.std() / np.sqrt(EXAMPLES), rel=0.25)
        assert numbers(cells[4]) == [(change > 0).sum(), (change < 0).sum()]


def test_every_number_behind_the_curves_is_that_of_metrics_jsonl(run):
    folder, rows, _ = run
    found = read(folder).table("metric")
    trained = {name for row in rows for name in row if name.partition("/")[0] in ("reward", "train", "completions")}
    assert trained - {"train/num_tokens", "train/skipped", "train/update_norm"} <= found.keys()
    for name, cells in found.items():
        values = np.array([row[name] for row in rows if name in row], np.float64)
        third = max(len(values) // 3, 1)
        of = [values[0], values[-1], values.min(), values.max(), values[:third].mean(), values[-third:].mean()]
        assert [float(cell) for cell in cells] == pytest.approx(of, rel=6e-4), name


def test_best_middle_and_worst_of_the_group_whose_rewards_differ_most_are_shown(run):
    folder, _, _ = run
    groups = ((1.0, None, 3.0, 2.0), (9.0, 9.0))
    rows = [{"prompt": "p", "group": i, "reward": r} for i, rewards in enumerate(groups) for r in rewards]
    (folder / "samples" / f"step_{STEPS:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert re.findall(r"reward \d", "".join(read(folder).words)) == ["reward 3", "reward 2", "reward 1"]


def test_a_drawn_curve_lies_where_its_numbers_are():
    """Read back through the numbers at the grid, as an eye does."""
    steps, values = list(range(1, 41)), np.random.default_rng(0).normal(3, 1, 40).tolist()
    drawn = line_chart(Chart("loss", [Line("", steps, values)]))
    marks = re.findall(r'<text class="tick" x="38" y="([\d.]+)" text-anchor="end">([-\d.]+)<', drawn)
    (y0, v0), (y1, v1) = [(float(y) - 3.5, float(v)) for y, v in (marks[0], marks[-1])]
    below = re.findall(r'<text class="tick" x="([\d.]+)" y="172" text-anchor="middle">(\d+)<', drawn)
    (x0, s0), (x1, s1) = [(float(x), float(s)) for x, s in (below[0], below[-1])]
    points = [p.split() for p in re.search(r'class="line c0" d="M([^"]+)"', drawn)[1].split("L")]
    seen = [v0 + (float(y) - y0) * (v1 - v0) / (y1 - y0) for _, y in points]
    assert seen == pytest.approx(values, abs=0.01 * (v1 - v0))
    assert [s0 + (float(x) - x0) * (s1 - s0) / (x1 - x0) for x, _ in points] == pytest.approx(steps, abs=0.05)


# ---- what a stranger's folder may do


def test_texts_of_a_stranger_stay_texts_and_a_page_loads_nothing_from_elsewhere(run, tmp_path):
    folder = tmp_path / "other"
    make_run(folder, text=EVIL)
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"status": "failed", "error": EVIL}))
    text = write_page(run_page(folder), folder).read_text()
    found = Reader(text)
    allowed = "html head meta title style body main header div h1 h2 h3 span p section footer table tr th td svg path"
    allowed += " text circle rect b i pre ul li code details summary"
    assert found.tags <= set(allowed.split())
    assert not [name for name, _ in found.attributes if name.startswith("on") or name in ("href", "src", "style")]
    assert "alert(1)" in "".join(found.words), "it is shown, as text"
    assert "\x1b" not in text and "\u202e" not in text
    assert "default-src 'none'" in text
    sound = write_page(run_page(run[0]), run[0] / "page").read_text()
    assert not re.search(r"https?:|//|url\(|@import|<link|<script|<iframe|src=|href=", sound)


@pytest.mark.parametrize("name", ["status.json", ".hydra/config.yaml", ".hydra/overrides.yaml", EVALUATION])
def test_a_damaged_or_missing_file_leaves_the_rest(run, name):
    folder, _, _ = run
    file = folder / name
    for content in (b"", b"[1]", b'{"a": ', b"\xff\xfe", None):
        file.unlink() if content is None else file.write_bytes(content)
        assert "held-out accuracy" in " ".join(read(folder).words)


# ---- time, size, and runs that ended badly


def test_a_report_of_thousands_of_steps_is_small_and_soon_there(tmp_path):
    make_run(tmp_path / "run", steps=6_000)
    began = time.process_time()
    file = write_page(run_page(tmp_path / "run"), tmp_path)
    assert time.process_time() - began < 12, "some 2.5 s; a page that reads the rows once a metric takes minutes"
    assert file.stat().st_size < 2_000_000


HOLDS = """
import sys, time
from pathlib import Path
from tunix_lite.distributed.folder_lock import lock_folder
with lock_folder(Path(sys.argv[1]), 0):
    print("has it", flush=True)
    time.sleep(60)
"""


def test_a_killed_run_has_one_by_the_command(run, monkeypatch, capsys):
    folder, _, _ = run
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"status": "running"}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "train/lo')
    trainer = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "has it\n" and is_held(folder)
    monkeypatch.setattr(sys, "argv", ["tunix-lite", "doctor", str(folder), f"doctor.report={folder}"])
    main()
    assert ">running<" in (folder / "report.html").read_text()
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.communicate()
    assert is_held(folder) is False
    monkeypatch.setattr(sys, "argv", ["tunix-lite", "doctor", str(folder), f"doctor.report={folder}"])
    main()
    text = (folder / "report.html").read_text()
    assert ">killed<" in text and "metrics.jsonl holds 60 steps" in text
    assert capsys.readouterr().out.split()[-1] == str(folder / "report.html")


def test_a_report_that_cannot_be_written_is_one_line(run):
    folder, _, _ = run
    said: list[str] = []
    (folder / "report.html").mkdir()
    write_at_end(folder, lambda: run_page(folder), said.append)
    assert len(said) == 1 and said[0].startswith("warning: the report could not be written (IsADirectoryError")

    def full(text: str) -> None:
        raise OSError(28, "No space left on device")

    write_at_end(folder, lambda: run_page(folder), full)


# ---- several


def test_runs_are_compared_by_their_own_numbers_and_settings(tmp_path, monkeypatch, capsys):
    truths = [make_run(tmp_path / "sweep" / str(seed), seed=seed)[1] for seed in (0, 1, 10)]
    (tmp_path / "sweep" / ".hydra").mkdir()
    assert [path.name for path in runs_in(tmp_path / "sweep")] == ["0", "1", "10"]
    monkeypatch.setattr(sys, "argv", ["tunix-lite", "doctor", str(tmp_path / "sweep")])
    main()
    heads, *rows = capsys.readouterr().out.splitlines()
    assert heads.split()[:3] == ["run", "status", "steps"]
    for row, seed, truth in zip(rows, (0, 1, 10), truths):
        assert row.split()[:3] == [f"seed={seed}", "completed", "60"]
        before, after = (f"{truth[step][0].mean():.1%}".replace("%", " %") for step in (0, STEPS))
        assert re.search(rf"60 +{before} +{after} ", row)
