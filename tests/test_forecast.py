"""A predicted step: the scheduler without a model does what it does with one, and the arithmetic around it."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import NEW, PROMPT, ragged_prompts, set_mesh

from tunix_lite.commands import plan as command
from tunix_lite.commands.plan import PlanConfig
from tunix_lite.commands.program import compose
from tunix_lite.errors import ConfigError, RunFailed
from tunix_lite.parallel.collectives import CollectiveTotal
from tunix_lite.planning import compare_run, lengths, speed, timed
from tunix_lite.planning.choices import scaled_by
from tunix_lite.planning.compare_run import PredictedRow
from tunix_lite.planning.forecast import (
    SHARE_OF_BANDWIDTH,
    CompiledCosts,
    Forecast,
    HardwareCosts,
    batch_of,
    forecast,
    row_work,
)
from tunix_lite.planning.hardware import find_target
from tunix_lite.planning.kernels import Kernel
from tunix_lite.planning.lengths import Lengths
from tunix_lite.planning.plan import ESTIMATE_MARGIN
from tunix_lite.planning.programs import Compiled
from tunix_lite.planning.report import as_dict
from tunix_lite.planning.resolved import ResolvedRun, find_model, resolve_run
from tunix_lite.planning.simulated_rollout import simulated
from tunix_lite.rollout.engine import make_generate
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "foresight.py"
SMALL = [
    *("model=random", "training.prompts_per_step=5", "algorithm.num_generations=4", "evaluation.num_examples=0"),
    *(f"generation.max_prompt_length={PROMPT}", f"generation.max_new_tokens={NEW}"),
]


class Costs:
    """Of each program a second or more, so that the seconds count its calls."""

    source = "by decree"

    def begin(self, slots, columns, requests):
        return 0.001 * requests

    def prefill(self, prompts, width):
        return 1.0

    def refill(self, slots, columns):
        return 10.0

    resize = refill

    def decode(self, slots, columns, steps, held):
        return 100.0 * steps

    def scoring(self, name, batch, work):
        return 7.0 * work.parts

    def update(self, batch, work):
        return 5.0 * work.parts

    def rest(self, batch, work):
        return 0.5


def case_of(cfg, *overrides: str) -> ResolvedRun:
    run = compose([*SMALL, "training.packing=none", *overrides])
    run = replace(run, model=replace(run.model, architecture=cfg))
    return resolve_run(run, *find_model(run.model), {"fsdp": 1, "tp": 1}, "cpu")


@pytest.mark.parametrize("slots, chunk", [(3, 2)])
def test_the_scheduler_decides_without_a_model_as_it_does_with_one(cfg, params, slots, chunk):
    """The real rollout is asked for completions of given lengths; the simulated one gets the same lengths."""
    set_mesh(1, 1)
    rollout = RolloutConfig(num_slots=slots, chunk=chunk)
    # no token ends a completion, so its limit does
    generate = make_generate(cfg, GenerationConfig(PROMPT, NEW), (cfg.vocab_size,), 0, rollout=rollout)
    prompts = ragged_prompts(5)
    wanted = np.random.default_rng(3).integers(1, NEW + 1, (5, 4))
    done = generate(params, prompts, jax.random.key(0), 4, limits=wanted.reshape(-1).tolist())
    found = simulated(
        case_of(cfg, f"rollout.num_slots={slots}", f"rollout.chunk={chunk}"),
        np.array([len(prompt) for prompt in prompts]),
        wanted,
        Costs(),
    )
    assert found.decode_steps == done.metrics["rollout/decode_steps"]
    assert found.prefill_tokens == done.metrics["rollout/prefill_tokens"]
    assert found.slot_use == pytest.approx(done.metrics["rollout/slot_use"])
    assert found.seconds["decode"] == 100 * found.decode_steps


def test_a_step_is_the_sum_of_its_phases_and_a_run_of_its_steps(cfg):
    case = case_of(cfg, "algorithm.kl_coef=0.04", "training.max_steps=36", "training.gradient_accumulation_steps=2")
    found = forecast(case, Lengths(1.0, 1.0), Costs(), price_per_hour=20.0)
    chunk = min(case.run.rollout.chunk, NEW)
    steps = chunk * math.ceil(NEW / chunk)
    assert found.seconds == {
        "prefill": 1,
        "decode": 100 * steps,
        "refill": pytest.approx(10 + 20 * 0.001),
        "scoring": 14,
        "update": 10,
        "rest": 0.5,
    }
    assert found.step_seconds == 35.52 + 100 * steps
    assert found.tokens == 20 * (PROMPT + NEW)
    assert found.tokens_per_second == found.tokens / found.step_seconds
    assert found.hours == pytest.approx(36 * found.step_seconds / 3600)
    assert found.price == pytest.approx(20 * found.hours)


def test_a_rollout_for_several_updates_is_divided_among_them(cfg):
    """A rollout of 10 prompts serves 4 updates of 5: each has a quarter of it, and of the scores of both halves."""
    words = ["algorithm.kl_coef=0.04", "training.gradient_accumulation_steps=2"]
    whole = forecast(case_of(cfg, *words, "training.prompts_per_step=10"), Lengths(1.0, 1.0), Costs())
    shared = [*words, "algorithm.mini_batches=2", "algorithm.updates_per_rollout=4"]
    found = forecast(case_of(cfg, *shared), Lengths(1.0, 1.0), Costs())
    assert found.decode_steps == whole.decode_steps > 0
    for name in ("prefill", "decode", "refill"):
        assert found.seconds[name] == pytest.approx(whole.seconds[name] / 4), name
    # 7 s for each of 2 micro-batches of each of 2 halves
    assert found.seconds["scoring"] == pytest.approx(7 * 2 * 2 / 4)
    assert found.seconds["update"] == 10


def test_meshes_are_ranked_by_their_predicted_time(monkeypatch):
    """Whatever the bound says: here the one that it puts last is predicted to be the fastest."""
    settings = PlanConfig(target="h100x8", mesh="all", analytic=True)
    plans = command.make_plans(compose(["model=gemma3_1b"]), settings, [])
    by_bound = [plan.resolved.mesh_shape for plan in plans.plans]
    assert len(by_bound) > 2 and all(plan.fits for plan in plans.plans)

    def reversed_order(resolved, *_) -> Forecast:
        seconds = {"update": 1.0 + len(by_bound) - by_bound.index(resolved.mesh_shape)}
        return Forecast(seconds, 1, 1, 1, 1.0, 1, 1, "", "")

    monkeypatch.setattr(command, "forecast", reversed_order)
    monkeypatch.setattr(command, "choices", lambda *_: [])
    found = command.predicted(plans, settings)
    assert [plan.resolved.mesh_shape for plan in found.plans] == by_bound[::-1]


def test_micro_batches_are_those_that_packing_fills(cfg):
    """Rows of 20 tokens, a row a micro-batch; 20 sequences of 4 + 1 tokens fill 5 of them, not the 20 there could be."""
    width = PROMPT + NEW
    case = case_of(cfg, "training.packing=sequences", f"training.micro_batch_tokens={width + width % 2}")
    per_row = case.rows.width // 5
    work = row_work(case, batch_of(case, np.full(5, 4), np.ones((5, 4), int)))
    assert work.parts == math.ceil(20 / per_row) < case.rows.num_parts
    assert (work.tokens, work.rows, work.width) == (100, 1, case.rows.width)


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 0.9])
def test_assumed_lengths_have_the_mean_that_is_asked_for(share):
    drawn = lengths.assumed(np.random.default_rng(0), (200_000,), 1000, share)
    assert drawn.min() >= 1 and drawn.max() <= 1000
    assert drawn.mean() == pytest.approx(1000 * share, rel=0.01, abs=1)
    assert (lengths.assumed(np.random.default_rng(0), (9,), 1000, 1.0) == 1000).all()


def recorded_run(folder):
    """The files of a run of 4 steps, as far as a forecast reads them."""
    (folder / "samples").mkdir(parents=True)
    rows = [{"tokens": [1] * n, "completion": "x"} for n in (2, 4, 9)]
    (folder / "samples" / "step_000004.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [
        {"step": i, "time/rollout": 2.0, "time/update": 3.0, "time/step": 6.0, "rollout/prefill_tokens": 50}
        for i in range(4)
    ]
    metrics[0] |= {"time/update": 90.0, "time/step": 99.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics) + "{broken\n")
    (folder / "plan.json").write_text(json.dumps({"plans": [{"batch": "5 prompts x 4 generations = 20 sequences"}]}))
    return str(folder)


def test_lengths_are_read_from_a_run_and_cut_to_the_longest(tmp_path):
    found = lengths.recorded_lengths(recorded_run(tmp_path / "run"))
    assert found.completions == (2, 4, 9) and found.mean_prompt == 10
    prompts, completions = found.draw(3, 50, (8, 6))
    assert prompts.tolist() == [8, 8, 8]
    assert set(completions.reshape(-1).tolist()) == {2, 4, 6}
    with pytest.raises(ConfigError, match=r"lengths_of=.*no samples with tokens"):
        lengths.recorded_lengths(str(tmp_path))


def test_a_rollout_of_several_updates_has_the_prompts_of_all(tmp_path):
    """20 prompts were read for 50 tokens, though an update has 5 of them."""
    folder = recorded_run(tmp_path / "run")
    plan = {"batch": "5 prompts x 4 generations = 20 sequences", "prompts_of_rollout": 20}
    (tmp_path / "run" / "plan.json").write_text(json.dumps({"plans": [plan]}))
    assert lengths.recorded_lengths(folder).mean_prompt == 2.5
    words = ["target=h100", "algorithm.mini_batches=2", "algorithm.updates_per_rollout=2"]
    run = compose([*SMALL, *words[1:], "training.prompts_per_step=6"])
    plans = command.make_plans(run, PlanConfig(target="h100", analytic=True), words)
    assert as_dict(plans)["plans"][0]["prompts_of_rollout"] == 12


@pytest.mark.parametrize("text", ["", "[]", '{"plans": []}', '{"plans": [3]}', '{"plans": 7}'])
def test_a_plan_that_is_none_has_no_prompts(text, tmp_path):
    folder = recorded_run(tmp_path / "run")
    (tmp_path / "run" / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match="verify=.*plan.json no number of prompts"):
        lengths.recorded_lengths(folder, "verify")


def test_predicted_stands_against_measured_phase_by_phase(tmp_path):
    """The first steps compile and do not count; what no phase has is the rest."""
    took = compare_run.measured(recorded_run(tmp_path / "run"))
    seconds = {"prefill": 0.5, "decode": 1.0, "refill": 0.5, "update": 2.4, "rest": 0.6}
    found = Forecast(seconds, 100, 8, 60, 0.5, 1, 10, "by decree", "assumed")
    rows = {row.name: row for row in compare_run.predicted_against(found, took)}
    assert rows["rollout"] == PredictedRow("rollout", 2.0, 2.0)
    assert rows["update"].off == pytest.approx(-0.2)
    assert (rows["rest"].measured, rows["step"].measured) == (1.0, 6.0)
    assert rows["step"].off == pytest.approx(5 / 6 - 1)
    assert rows["prefill tokens"].off == pytest.approx(0.2)
    assert rows["decode steps"].measured is None
    with pytest.raises(ConfigError, match=r"verify=.*metrics\.jsonl"):
        compare_run.measured(str(tmp_path))
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(ConfigError, match="the run has 2 steps; .* at least 3"):
        compare_run.measured(str(tmp_path / "run"))


def test_a_phase_that_only_some_steps_have_counts_with_its_share(tmp_path):
    """Of the last four steps two sample, for 2 s each: 1 s a step."""
    rows = [{"time/step": 5.0} | ({"time/rollout": 2.0} if i % 2 else {}) for i in range(6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert compare_run.measured(str(tmp_path)) == {"time/step": 5.0, "time/rollout": 1.0}


def test_a_run_with_other_settings_is_not_compared(tmp_path):
    folder = tmp_path / "run"
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text("- training.remat=block\n- seed=3\n- project_name=x\n")
    command.check_same_overrides(str(folder), [f"verify={folder}", "training.remat=block"])
    words = [f"verify={folder}", "training.remat=block", "training.max_steps=9", "price_per_hour=2", "seed=1"]
    command.check_same_overrides(str(folder), words)
    with pytest.raises(ConfigError, match=r"other settings: tunix-lite plan price_per_hour=2 training\.remat=block$"):
        command.check_same_overrides(str(folder), ["price_per_hour=2"])
    # what the run did not have is not taken for a part of it
    with pytest.raises(ConfigError, match=r"other settings: tunix-lite plan training\.remat=block$"):
        command.check_same_overrides(str(folder), ["training.remat=block", "training.packing=none"])
    with pytest.raises(ConfigError, match=r"other settings: tunix-lite plan training\.remat=block$"):
        command.check_same_overrides(str(folder), ["training.remat=none"])


def test_compiled_kernels_count_and_the_rest_is_an_estimate(cfg):
    """A kernel that reads 3.35 GB on an H100 takes a millisecond and its launch; the update is not compiled."""
    hardware = find_target("h100").hardware
    case = case_of(cfg, "training.packing=sequences")
    kernel = Kernel("fusion", "fusion", 2, int(hardware.memory_bandwidth / 1000), 0)
    programs = {"scoring": Compiled("scoring", 0, 0, 0, 0, 0, kernels=(kernel,))}
    estimated = HardwareCosts(case, hardware)
    costs = CompiledCosts(estimated, programs)
    batch = batch_of(case, np.full(5, 4), np.ones((5, 4), int))
    work = replace(row_work(case, batch), parts=3)
    once = 2 * (0.001 + hardware.launch_seconds)
    assert costs.scoring("scoring", batch, work) == pytest.approx(3 * once)
    assert costs.update(batch, work) == estimated.update(batch, work)
    assert "compiled programs (scoring) on h100" in costs.source


def test_a_setting_is_scaled_by_what_is_known_of_the_other():
    """Phases that are estimated at 2 and 4 s and known to take 3 and 2: another one's are 1.5 and 0.5 times as long."""
    one = Forecast({"update": 2.0, "decode": 4.0}, 1, 1, 1, 1.0, 1, 1, "", "")
    known = replace(one, seconds={"update": 3.0, "decode": 2.0})
    other = replace(one, seconds={"update": 10.0, "decode": 10.0, "rest": 1.0})
    found = scaled_by(other, one, replace(known, source="timed"))
    assert found.source.endswith("scaled by: timed")
    assert found.seconds == {"update": 15.0, "decode": 5.0, "rest": 1.0}


def test_a_plan_prints_a_forecast_its_price_and_faster_settings(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tunix-lite"])
    settings = PlanConfig(target="h100x8", analytic=True, out=str(tmp_path), price_per_hour=24.0)
    command.plan(compose(["model=gemma3_1b", "training.max_steps=100"]), settings)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("predicted: a step takes ") for line in lines) == 1
    assert "an estimate by FLOPs and bytes, at 50% of the peak" in "\n".join(lines)
    said = json.loads((tmp_path / "plan.json").read_text())
    found = said["plans"][0]["forecast"]
    assert found["price"] == pytest.approx(24 * found["hours"]) and found["num_steps"] == 100
    # a forecast takes longer than the bound, and the choices come in order
    assert found["seconds"]["update"] > said["plans"][0]["phases"][-1]["bound"]["seconds"]
    took = [choice["step_seconds"] for choice in said["choices"]]
    assert took == sorted(took) and any(not choice["overrides"] for choice in said["choices"])


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_planned(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "make_plans", None)
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "plan"):
        with pytest.raises(ConfigError, match="out=.*file is no folder that can be written"):
            command.plan(compose(SMALL), PlanConfig(target="h100", out=str(out)))


def test_a_plan_that_does_not_fit_ends_with_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tunix-lite"])
    settings = PlanConfig(target="v5e-1", analytic=True, out=str(tmp_path))
    with pytest.raises(RunFailed, match=r"^nothing fits v5e-1: the least is [\d.]+ of 15\.75 GiB a device$"):
        command.plan(compose(["model=gemma3_12b"]), settings)
    advised = json.loads((tmp_path / "plan.json").read_text())["advice"]
    # what it proposes by an estimate leaves room
    if "would fit" in advised:
        peak = float(advised.partition("with ")[2].partition(" of")[0])
        assert peak <= (1 - ESTIMATE_MARGIN) * 15.75


def test_programs_are_timed_where_they_are(cfg):
    set_mesh(1, 1)
    case = case_of(cfg, "rollout.num_slots=4")
    costs = timed.TimedCosts(case)
    assert timed.why_not_timed(case) == ""
    assert costs.refill(4, PROMPT + NEW) > 0
    # what has been timed is not timed again
    assert costs.refill(4, PROMPT + NEW) == costs.known[("refill", 4, PROMPT + NEW)]
    assert timed.why_not_timed(replace(case, cfg=replace(cfg, embed_dim=4096, mlp_dim=65536))).startswith("a step has")


def test_the_agreement_of_two_orders_is_kendalls():
    """By hand: of six pairs five agree and one does not; scipy's value of the same."""
    spec = importlib.util.spec_from_file_location("foresight", SCRIPT)
    foresight = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(foresight)
    assert foresight.kendall_tau([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(4 / 6)
    assert foresight.kendall_tau([1, 2, 3], [3, 2, 1]) == -1
    assert len(foresight.SETTINGS) == 20 and len({tuple(one) for one in foresight.SETTINGS}) == 20
    for overrides in foresight.SETTINGS:
        compose([*foresight.BASE, *overrides])


def test_sending_is_counted_in_every_phase_over_the_links_that_it_crosses(cfg):
    """fsdp=2, tp=2 on hardware where only links take time, a second a byte: half of a buffer is sent that is gathered
    over two devices, and all of one that is summed."""
    run = compose([*SMALL, "training.packing=none", "training.remat=none", "training.prompts_per_step=4"])
    run = replace(run, model=replace(run.model, architecture=cfg))
    case = resolve_run(run, *find_model(run.model), {"fsdp": 2, "tp": 2}, "cuda")
    free = {"peak_flops": 1e30, "memory_bandwidth": 1e30}
    within = replace(find_target("h100x8").hardware, link_bandwidth=1.0, node_bandwidth=1e30, **free)
    weights, gradients = speed.weight_bytes(case), speed.reduced_gradient_bytes(case)
    # a stream of float32 after attention and one after the feed-forward of each layer
    token = 2 * cfg.num_layers * cfg.embed_dim * 4

    def sent(seconds: float) -> float:
        return seconds * SHARE_OF_BANDWIDTH

    costs = HardwareCosts(case, within)
    assert sent(costs.begin(4, 20, 0)) == pytest.approx(weights / 2, rel=1e-3)
    # six tokens over fsdp are three a device
    assert sent(costs.prefill(2, 3)) == pytest.approx(3 * token, rel=1e-3)
    assert sent(costs.decode(4, 20, 8, 0)) == pytest.approx(8 * 2 * token, rel=1e-3)
    sharded = HardwareCosts(replace(case, sampling_weights="sharded"), within)
    assert sent(sharded.begin(4, 20, 0)) == pytest.approx(0, abs=1)
    assert sent(sharded.decode(4, 20, 8, 0)) == pytest.approx(8 * (2 * token + weights / 2), rel=1e-3)

    batch = batch_of(case, np.full(4, 4), np.ones((4, 4), int))
    work = replace(row_work(case, batch), parts=3)
    tokens = 3 * work.rows * work.width / 2
    assert sent(costs.scoring("scoring", batch, work)) == pytest.approx(3 * weights / 2 + tokens * token, rel=1e-3)
    # forward and backward; the gradients of each micro-batch are scattered
    both_ways = 3 * (2 * weights + gradients) / 2 + 2 * tokens * token
    assert sent(costs.update(batch, work)) == pytest.approx(both_ways, rel=1e-3)

    # With two devices a node, tp stays within it and fsdp does not.
    between = replace(within, host_devices=2, link_bandwidth=1e30, node_bandwidth=1.0)
    costs = HardwareCosts(case, between)
    assert sent(costs.begin(4, 20, 0)) == pytest.approx(weights / 2, rel=1e-3)
    assert sent(costs.decode(4, 20, 8, 0)) == pytest.approx(0, abs=1)
    groups = [
        CollectiveTotal("all-gather", "fsdp", 3, 10_000, 5_000, True),
        CollectiveTotal("all-reduce", "tp", 1, 9, 9, True),
    ]
    kernel = Kernel("all-gather", "collective", 1, 0, 0, sent_bytes=5009)
    programs = {"update": Compiled("update", 0, 0, 0, 0, 0, collectives=tuple(groups), kernels=(kernel,))}
    assert CompiledCosts(costs, programs).update(batch, replace(work, parts=1)) == pytest.approx(5000, rel=1e-3)
