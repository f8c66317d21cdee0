"""A run has few programs: rows, prompts and caches have few widths, and all are compiled before the second step ends."""

import json
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import set_mesh

from tunix_lite.parallel.compiling import compiled_together, stopwatch
from tunix_lite.rollout import cache as kv_cache
from tunix_lite.rollout import engine
from tunix_lite.rollout.generate import _results as results
from tunix_lite.runs import watch
from tunix_lite.runs.experience import TaskExperience
from tunix_lite.settings import resolved_run as resolved
from tunix_lite.settings.compose import compose
from tunix_lite.train import train

TINY = [
    *("model=random", "model.architecture.num_layers=1", "model.architecture.pattern=[global]"),
    *("model.architecture.vocab_size=512", "model.architecture.embed_dim=16", "model.architecture.mlp_dim=16"),
    *("task=jsonl", "task.prompt='{question}'", "task.reward=tunix_lite.rewards.text.brevity"),
    *("training.prompts_per_step=1", "algorithm.num_generations=4", "training.max_steps=6"),
    *("evaluation.num_examples=3", "evaluation.num_samples=2", "evaluation.interval_steps=3"),
    *("generation.max_prompt_length=64", "generation.max_new_tokens=64", "rollout.chunk=4", "rollout.num_slots=4"),
    *("model.mesh_shape=[[1,1],[fsdp,tp]]", "tracking.samples_interval_steps=0"),
]
STALE = "rollout.max_staleness=1"


@pytest.fixture
def rows(tmp_path):
    """Questions whose lengths are spread as those of GSM8K are, a third to two thirds of the longest most of them: the
    first two prompts that a run takes have the least width."""
    lengths = np.random.default_rng(0).lognormal(2.0, 0.5, 40).clip(2, 24).astype(int)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": " ".join("7" * n), "answer": "1"}) + "\n" for n in lengths))
    return [f"task.train={file}"]


@pytest.fixture
def narrow(monkeypatch):
    """Widths of real models, for a model whose prompts have up to 64 tokens."""
    monkeypatch.setattr(engine, "MIN_PROMPT_WIDTH", 8)
    monkeypatch.setattr(kv_cache, "MIN_COLUMNS", 16)
    monkeypatch.setattr(resolved, "NARROWS_FROM", 1)


@pytest.fixture
def compiled(monkeypatch):
    """By step, the programs that were compiled in it."""
    by_step, at, is_open = {}, [0], [True]

    def listen(event: str, _: float, fun_name: str = "", **__) -> None:
        # Slices of sharded arrays are those of orbax, when it writes the last step.
        if is_open[0] and event == "/jax/core/compile/backend_compile_duration" and fun_name != "jit(slice)":
            by_step.setdefault(at[0], []).append(fun_name)

    take = TaskExperience.take

    def noting(self, step, params):
        at[0] = step + 1
        return take(self, step, params)

    monkeypatch.setattr(TaskExperience, "take", noting)
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield by_step, at
    is_open[0] = False


WIDE = [
    "training.packing=prefix algorithm.kl_coef=0.04 model.mesh_shape=[[2,2],[fsdp,tp]]",
    f"training.packing=none rollout.overlap=carry {STALE}",
    f"training.packing=none rollout.overlap=one_step {STALE}",
    "training.packing=sequences model.lora.rank=2 algorithm.old_logprobs=rescored",
    "training.packing=none algorithm=dapo algorithm.num_generations=4",
]


@pytest.mark.parametrize(
    "settings", ["training.packing=sequences", *(pytest.param(words, marks=pytest.mark.wide) for words in WIDE)]
)
def test_nothing_compiles_after_the_second_step_and_a_late_compilation_is_named_and_is_no_part_of_collecting(
    tmp_path, rows, narrow, compiled, monkeypatch, programs_anew, settings, capsys
):
    """Prompts of several widths, caches of several sizes, an evaluation in the middle. Later steps take widths that
    the first two did not. A program that step 2 compiles takes 0.3 s in a model of a compiler."""
    by_step, at = compiled
    take = TaskExperience.take

    def slow(x):
        time.sleep(0.3)
        return x + 1

    def late(self, step, params):
        if step == 1:
            jax.jit(slow)(1.0)
        return take(self, step, params)

    monkeypatch.setattr(TaskExperience, "take", late)
    monkeypatch.setattr(watch, "LONG_COMPILATION", 0.0)
    taken = {name: {} for name in ("prompts", "columns")}
    start_chunk, padded_width = engine.Engine.start_chunk, engine.padded_width

    def watched_chunk(self):
        start_chunk(self)
        taken["columns"].setdefault(self.columns, at[0])

    def watched_width(length, widths):
        width = padded_width(length, widths)
        taken["prompts"].setdefault(width, at[0])
        return width

    monkeypatch.setattr(engine.Engine, "start_chunk", watched_chunk)
    monkeypatch.setattr(engine, "padded_width", watched_width)
    train(compose([*TINY, *rows, *settings.split()]), tmp_path / "run")
    assert at[0] == 6 and by_step[0]
    assert {step: names for step, names in by_step.items() if step > 2} == {}
    assert len(taken["prompts"]) > 1 and len(taken["columns"]) > 1, "one width proves nothing"
    if "overlap" in settings:  # where collecting goes on beside other parts of a step
        return
    assert "step 2: collecting: compiled slow, " in capsys.readouterr().out
    of_step = {row["step"]: row for row in map(json.loads, (tmp_path / "run" / "metrics.jsonl").open())}
    assert of_step[2]["time/compile"] >= 0.3
    for row in (of_step[step] for step in (1, 2, 4, 5)):  # without an evaluation
        parts = sum(row[f"time/{name}"] for name in ("collect", "update", "compile"))
        assert row["time/step"] == pytest.approx(parts)
        assert row["time/rollout"] <= row["time/collect"]


@pytest.fixture
def many_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)


def test_programs_that_compile_together_do_so_on_the_current_mesh_once_each_and_count_once(compiled, many_cores):
    """Two threads need one program; a third needs another one, whose shapes follow from the mesh."""
    set_mesh(2, 1)
    rows = jax.ShapeDtypeStruct((4, 3), jnp.float32)

    def constrained(x):
        for _ in range(100):  # some tenths of a second to compile
            x = jnp.sort(jnp.sin(x))
        return jax.lax.with_sharding_constraint(x * 2, jax.sharding.PartitionSpec("fsdp"))

    one, other = jax.jit(constrained), jax.jit(lambda x: x + 1)
    elapsed = stopwatch()
    began = time.perf_counter()
    first, second, third = compiled_together([partial(results, program, rows) for program in (one, one, other)])
    assert first.sharding.spec == second.sharding.spec == jax.sharding.PartitionSpec("fsdp")
    assert third.shape == (4, 3)
    assert compiled[0][0].count("jit(constrained)") == 1
    assert elapsed() < 0.05 < 0.1 <= time.perf_counter() - began, "it counts as waiting for the compiler"


def test_of_what_compiles_together_an_error_is_raised_and_no_further_program_begins(many_cores):
    """Of calls within calls, where it is not the error of a thread that was told to end."""
    begun = []

    def fails():
        raise RuntimeError("no such program")

    def goes_on():
        for number in range(200):
            results(jax.jit(lambda x, n=number: x + n), jnp.ones(3))
            begun.append(number)
            time.sleep(0.05)

    with pytest.raises(RuntimeError, match="no such program"):
        compiled_together([partial(compiled_together, [goes_on, fails]), goes_on])
    assert len(begun) < 100


@pytest.mark.parametrize("length, longest_prompt, sizes", [
    (96, 64, [96]), (192, 128, [192]), (193, 128, [193, 128]), (320, 256, [320, 200]), (341, 256, [341, 216]),
    (342, 256, [342, 256]), (544, 288, [544, 344]), (768, 256, [768, 512, 256]), (768, 300, [768, 512]),
    (2560, 256, [2560, 1024, 256]), (2560, 2048, [2560, 1600]), (9216, 1024, [9216, 4096, 1024]),
    (16640, 256, [16640, 8192, 2048]),
])  # fmt: skip
def test_a_cache_has_at_most_three_sizes(length, longest_prompt, sizes):
    assert kv_cache.column_sizes(length, longest_prompt) == sizes


@pytest.mark.parametrize("longest, widths", [
    (64, [64]), (128, [128, 64]), (256, [256, 128, 64]), (300, [300, 150, 75]), (512, [512, 128, 64]),
    (1024, [1024, 256, 64]), (2048, [2048, 256, 64]),
])  # fmt: skip
def test_prompts_have_at_most_three_widths(longest, widths):
    assert engine.prompt_widths(longest) == widths
