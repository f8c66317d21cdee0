"""A predicted step: what compiled programs take, how often each runs, and the arithmetic around it."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import NEW, PROMPT, ragged_prompts, set_mesh

from tunix_lite.basics.errors import ConfigError
from tunix_lite.commands import plan as command
from tunix_lite.commands.plan import PlanConfig, make_plans, recorded_lengths
from tunix_lite.parallel.collectives import CollectiveTotal
from tunix_lite.planning import lengths
from tunix_lite.planning.forecast import Forecast, decode_steps, forecast
from tunix_lite.planning.hardware import find_machine
from tunix_lite.planning.kernels import Kernel
from tunix_lite.planning.lengths import Lengths
from tunix_lite.planning.programs import Compiled
from tunix_lite.rollout.generate import make_generate
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.settings.compose import compose
from tunix_lite.settings.resolved_run import ResolvedRun, find_model, resolve_run

SMALL = [
    *("model=random", "training.prompts_per_step=5", "algorithm.num_generations=4", "evaluation.num_examples=0"),
    *(f"generation.max_prompt_length={PROMPT}", f"generation.max_new_tokens={NEW}"),
]


# Hardware on which a kernel takes as many seconds as it reads bytes, and nothing else takes time.
SECOND_A_BYTE = replace(find_machine("h100x8").hardware, platform="cpu", peak_flops=1e30, memory_bandwidth=1.0)


@pytest.fixture(autouse=True)
def nothing_to_launch(monkeypatch):
    monkeypatch.setattr("tunix_lite.planning.kernels.LAUNCH_SECONDS", {"cuda": 2e-6, "tpu": 1.2e-6, "cpu": 0.0})


def taking(name: str, seconds: int) -> Compiled:
    """A program that takes so long on SECOND_A_BYTE."""
    return Compiled(name, 0, 0, 0, 0, 0, kernels=(Kernel("fusion", "fusion", 1, seconds, 0),))


PROGRAMS = {name: taking(name, n) for name, n in {"prefill": 3, "decode": 100, "scoring": 7, "update": 5}.items()}
# longer than any may be, so all have the longest length
FULL = Lengths(completions=(10**6,), mean_prompt=1e6)


def case_of(cfg, *overrides: str) -> ResolvedRun:
    run = compose([*SMALL, "training.packing=none", *overrides])
    run = replace(run, model=replace(run.model, architecture=cfg))
    return resolve_run(run, *find_model(run.model), {"fsdp": 1, "tp": 1}, "cpu")


def test_decode_steps_are_nearly_those_of_a_rollout_of_these_lengths(cfg, params):
    """The real rollout is asked for completions of given lengths. Its slots wait for a chunk more now and then."""
    set_mesh(1, 1)
    rollout = RolloutConfig(num_slots=3, chunk=2)
    # no token ends a completion, so its limit does
    generate = make_generate(cfg, GenerationConfig(PROMPT, NEW), (cfg.vocab_size,), 0, rollout=rollout)
    wanted = np.random.default_rng(3).integers(1, NEW + 1, (5, 4))
    done = generate(params, ragged_prompts(5), jax.random.key(0), 4, limits=wanted.reshape(-1).tolist())
    assert decode_steps(wanted, 3, 2) == pytest.approx(done.metrics["rollout/decode_steps"], rel=0.15)


def test_a_step_is_the_sum_of_its_phases_and_a_run_of_its_steps(cfg):
    case = case_of(cfg, "algorithm.kl_coef=0.04", "training.max_steps=36", "training.gradient_accumulation_steps=2")
    found = forecast(case, PROGRAMS, FULL, SECOND_A_BYTE)
    chunk = min(case.run.rollout.chunk, NEW)
    chunks = math.ceil(NEW / chunk)
    block, _, _ = case.sampling_memory.prompt_cache
    # the micro-batches of an update that is not packed stand in its text as turns of a loop
    assert found.seconds == {"prefill": 3 * 5 / block, "decode": 100 * chunks, "scoring": 7, "update": 5}
    assert found.decode_steps == chunk * chunks
    assert found.step_seconds == sum(found.seconds.values())
    assert found.tokens == 20 * (PROMPT + NEW)
    assert found.tokens_per_second == found.tokens / found.step_seconds
    assert found.hours == pytest.approx(36 * found.step_seconds / 3600)


def test_a_rollout_for_several_updates_is_divided_among_them(cfg):
    """A rollout of 10 prompts serves 4 updates of 5: each has a quarter of it, and of the scores of both halves."""
    words = ["algorithm.kl_coef=0.04", "training.gradient_accumulation_steps=2"]
    whole = case_of(cfg, *words, "training.prompts_per_step=10")
    whole = forecast(whole, PROGRAMS, FULL, SECOND_A_BYTE)
    shared = [*words, "algorithm.mini_batches=2", "algorithm.updates_per_rollout=4"]
    found = forecast(case_of(cfg, *shared), PROGRAMS, FULL, SECOND_A_BYTE)
    assert found.decode_steps == whole.decode_steps > 0
    assert found.seconds["decode"] == pytest.approx(whole.seconds["decode"] / 4)
    # 7 s for each of 2 halves
    assert found.seconds["scoring"] == pytest.approx(7 * 2 / 4)
    assert found.seconds["update"] == 5


def test_assumed_lengths_are_half_of_the_longest_on_average():
    drawn = lengths._assumed(np.random.default_rng(0), (200_000,), 1000)
    assert drawn.min() >= 1 and drawn.max() == 1000
    assert drawn.mean() == pytest.approx(500, rel=0.01)


def recorded_run(folder):
    """The files of a run of 4 steps, as far as a forecast reads them."""
    (folder / "samples").mkdir(parents=True)
    rows = [{"tokens": [1] * n, "completion": "x"} for n in (2, 4, 9)]
    (folder / "samples" / "step_000004.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = {"train/loss": 0.5, "time/rollout": 2.0, "time/update": 3.0, "time/step": 6.0, "rollout/prefill_tokens": 50}
    metrics = [{"step": i} | row for i in range(4)]
    metrics[0] |= {"time/update": 90.0, "time/step": 99.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics) + "{broken\n")
    (folder / "plan.json").write_text(json.dumps({"plans": [{"prompts_of_rollout": 5}]}))
    return str(folder)


def test_lengths_are_read_from_a_run_and_cut_to_the_longest(tmp_path):
    found = recorded_lengths(recorded_run(tmp_path / "run"))
    assert found.completions == (2, 4, 9) and found.mean_prompt == 10
    prompts, completions = found.draw(3, 50, (8, 6))
    assert prompts.tolist() == [8, 8, 8]
    assert set(completions.reshape(-1).tolist()) == {2, 4, 6}
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"lengths_of=.*no samples with tokens"):
        command.plan(compose(SMALL), PlanConfig(lengths_of=str(tmp_path)))


def test_predicted_stands_against_measured(tmp_path):
    """The first two steps compile and do not count; off is (predicted - measured) / measured."""
    folder = recorded_run(tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[:4]]
    rows[3] |= {"memory/peak_gb": 2.0}
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = Forecast({"prefill": 0.5, "decode": 1.5, "update": 2.4}, 100, 8, 1, 10, "by decree", "assumed")
    found = command.verified(SimpleNamespace(peak_bytes=3e9, forecast=made), folder)
    assert [line.split() for line in found] == [
        ["predicted", "measured", "off", "by"],
        ["memory/peak_gb", "3", "2", "+50%"],
        ["time/rollout", "2", "2", "+0%"],
        ["time/update", "2.4", "3", "-20%"],
        ["time/step", "4.4", "6", "-27%"],
    ]
    without = command.verified(SimpleNamespace(peak_bytes=3e9, forecast=None), folder)
    assert without[1:] == found[1:2]


def test_a_run_with_other_settings_is_not_compared(tmp_path):
    folder = tmp_path / "run"
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text("- training.remat=block\n- seed=3\n- project_name=x\n")
    command.check_same_overrides(str(folder), [f"verify={folder}", "training.remat=block", "target=h100", "seed=1"])
    for other in ([], ["training.remat=block", "training.packing=none"], ["training.remat=none"]):
        with pytest.raises(ConfigError, match=r"other settings: tunix-lite plan target=h100 training\.remat=block$"):
            command.check_same_overrides(str(folder), ["target=h100", *other])


def test_kernels_count_with_their_launches_and_what_crosses_nodes_takes_longer(cfg, monkeypatch):
    """A kernel that reads 3.35 GB on an H100 takes a millisecond and its launch. On hardware where only links between
    nodes take time, a second a byte, what fsdp gathers over two nodes takes it, and what tp sums within one does not."""
    hardware = find_machine("h100").hardware
    case = case_of(cfg, "training.packing=none")
    kernel = Kernel("fusion", "fusion", 2, int(hardware.memory_bandwidth / 1000), 0)
    programs = PROGRAMS | {"update": replace(PROGRAMS["update"], kernels=(kernel,))}
    found = forecast(case, programs, Lengths(), hardware)
    assert found.seconds["update"] == pytest.approx(2 * (0.001 + 2e-6))
    assert "compiled programs on h100" in found.source

    run = compose([*SMALL, "training.packing=none", "training.prompts_per_step=4"])
    run = replace(run, model=replace(run.model, architecture=cfg))
    case = resolve_run(run, *find_model(run.model), {"fsdp": 2, "tp": 2}, "cuda")
    between = replace(SECOND_A_BYTE, host_devices=2, memory_bandwidth=1e30, link_bandwidth=1e30, node_bandwidth=1.0)
    groups = (
        CollectiveTotal("all-gather", "fsdp", 3, 10_000, 5_000, True),
        CollectiveTotal("all-reduce", "tp", 1, 9, 9, True),
    )
    kernel = Kernel("all-gather", "collective", 1, 0, 0, sent_bytes=5009)
    update = Compiled("update", 0, 0, 0, 0, 0, collectives=groups, kernels=(kernel,))
    found = forecast(case, PROGRAMS | {"update": update}, Lengths(), between)
    assert found.seconds["update"] == pytest.approx(5000, rel=1e-3)


def test_a_plan_of_compiled_programs_has_a_forecast_and_an_estimate_has_none(cfg, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tunix-lite"])

    def with_programs(*given):
        plans = make_plans(*given)
        return replace(plans, plans=(replace(plans.plans[0], programs=PROGRAMS),))

    words = ["model=gemma3_1b", "training.max_steps=100"]
    settings = PlanConfig(target="h100x8", analytic=True, out=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(command, "make_plans", with_programs)
        command.plan(compose(words), settings)
    said = capsys.readouterr().out
    assert said.count("\npredicted: a step takes ") == 1
    assert "by the kernels of the compiled programs on h100, each at its roofline" in said
    found = json.loads((tmp_path / "plan.json").read_text())["plans"][0]["forecast"]
    assert found["num_steps"] == 100 and found["step_seconds"] == pytest.approx(sum(found["seconds"].values()))

    command.plan(compose(words), settings)
    assert "predicted" not in "\n".join(capsys.readouterr().out.splitlines()[-6:])
    assert "forecast" not in json.loads((tmp_path / "plan.json").read_text())["plans"][0]


def test_a_plan_that_would_fit_with_other_settings_ends_with_them_and_no_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tunix-lite", "model=gemma3_1b"])
    settings = PlanConfig(target="v5e-1", analytic=True, out=str(tmp_path))
    with pytest.raises(SystemExit, match="1"):
        command.plan(compose(["model=gemma3_1b"]), settings)
    out = capsys.readouterr().out
    assert " fit, with " in out and "  tunix-lite plan model=gemma3_1b " in out
