"""Preferences and distillation: scores under today's weights, DPO's gradient, and a frozen teacher."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collecting import collect
from conftest import random_params, rows_of
from model_checks import write_with_tokenizer
from test_docs import EXAMPLE, ROOT, commands
from test_held_out_loss import SMALL
from test_train import TINY, lines

from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.algorithms.distill import Distill, after_prompts
from tunix_lite.algorithms.dpo import DPO
from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.types import Batch, Graded, Rollout, TokenScores
from tunix_lite.learner.policy import make_policy, token_logprobs
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models import source
from tunix_lite.models.families import GEMMA3
from tunix_lite.models.source import TeacherConfig
from tunix_lite.planning.estimate import MemoryEstimate
from tunix_lite.planning.hardware import find_machine
from tunix_lite.planning.plan import assemble_plan
from tunix_lite.runs.fingerprint import fingerprint
from tunix_lite.runs.setup import check_resumed, find_parts
from tunix_lite.settings import compose as composing
from tunix_lite.settings.batch_size import plan_batch
from tunix_lite.settings.compose import compose
from tunix_lite.settings.resolved_parts import policy_of
from tunix_lite.settings.resolved_run import ResolvedRun, _FrozenModel, find_model, resolve_run
from tunix_lite.tasks.sources import FileRows
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.train import train


def test_a_batch_is_scored_under_the_weights_that_are_given(cfg, params, rollout):
    """`rescore` under two sets of weights equals the scores of whole sequences under each."""
    mask = np.asarray(rollout.completion_mask)
    batch = Batch(
        np.asarray(rollout.tokens), np.asarray(rollout.token_mask), (mask / mask.sum()).astype(np.float32), mask * 1e30
    )
    policy = make_policy(cfg, None, temperature=1.0, reference=params)
    whole_logprobs = jax.jit(partial(token_logprobs, cfg=cfg))
    for weights in (params, random_params(cfg, seed=5)):
        found = policy.rescore(weights, batch)
        whole = whole_logprobs(weights, batch.tokens, batch.token_mask)
        np.testing.assert_allclose(found, np.where(mask, whole, 0), atol=2e-5)
    np.testing.assert_array_equal(
        policy.scorers["reference"](batch), policy.rescore(jax.tree.map(jnp.copy, params), batch)
    )


# ---- preferences


PAIRS = [
    {"question": "1 + 2", "chosen": "3", "rejected": "1 + 2 is 4"},
    {"question": "2 + 2", "chosen": "The answer is 4.", "rejected": "5"},
    {"question": "3 + 4", "chosen": "7", "rejected": "12"},
    {"question": "9 - 4", "chosen": "5", "rejected": "The answer is 4."},
]
QUICK = [
    *("model.mesh_shape=[[1,1],[fsdp,tp]]", "training.prompts_per_step=4", "training.save_interval_steps=0"),
    *("evaluation.num_examples=0", "tracking.tensorboard=false"),
]


def test_pairs_are_learned_from_log_2_on(tmp_path):
    """At the start policy and reference are one: every margin is 0, and the loss log 2, exactly."""
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    overrides = ["algorithm=dpo", "training.max_steps=4", "optimizer.learning_rate=3e-3", "optimizer.schedule=linear"]
    run = compose([*TINY, *overrides, "training.micro_batch_size=2", *QUICK])
    run = replace(run, task=replace(run.task, source=FileRows(str(file), str(file))))
    train(run, tmp_path / "run")
    rows = lines(tmp_path / "run")
    first, last = rows[0], rows[-1]
    assert first["train/margin"] == 0 == first["train/pair_accuracy"]
    assert first["train/loss"] == first["train/dpo_loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert last["train/dpo_loss"] < 0.5 and last["train/pair_accuracy"] == pytest.approx(1)


# ---- a teacher


TEACHER = {"teacher": TeacherConfig("bundled", storage="fp32")}


@pytest.mark.wide
def test_the_page_on_teachers_to_the_letter(tmp_path, monkeypatch):
    """docs/extend/teacher.md: its class, its YAML and its first command, for one step; the better of two is taken."""
    monkeypatch.syspath_prepend(EXAMPLE)
    conf = tmp_path / "conf"
    shutil.copytree(composing.conf_dir(), conf)
    shutil.copy(EXAMPLE / "conf" / "algorithm" / "two_teachers.yaml", conf / "algorithm")
    monkeypatch.setattr(composing, "conf_dir", lambda: conf)
    command = commands(ROOT / "docs" / "extend" / "teacher.md")[0]
    run = compose([*command.split()[2:], "training.max_steps=1", *QUICK])
    train(run, tmp_path / "run")
    (row,) = lines(tmp_path / "run")
    assert row["time/first"] > 0 < row["time/second"]
    assert {"first", "second"} <= set(re.findall(r"\w+", (tmp_path / "run" / "plan.json").read_text()))


def test_the_example_of_two_teachers_takes_the_better_one_by_hand(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    from two_teachers import TwoTeachers

    mask = np.array([[False, True, True], [False, True, False]])
    old = np.where(mask, -2.0, 7.0)
    rollout = Rollout(np.ones((2, 3), int), np.ones((2, 3), bool), mask, old, np.ones(2), old)
    graded = Graded([], [], np.zeros(2), np.zeros(2, bool), [], {}, np.zeros(2, bool))
    task = SimpleNamespace(
        prompts=lambda examples: None,
        partner=lambda examples, G: None,
        grader=lambda examples, G: SimpleNamespace(submit=None, results=lambda rollout: graded),
    )
    likes = {"first": np.array([[0, -1, -3], [0, -5, 0]]), "second": np.array([[0, -2, -1.5], [0, -4, 0]])}
    scorers = {name: lambda batch, found=found: found for name, found in likes.items()}
    algorithm = TwoTeachers(TeacherConfig("bundled"), TeacherConfig("bundled"), num_generations=2)
    policy = Policy(lambda *_, **__: rollout, None, scorers)
    batch, _, _ = collect(algorithm, policy, task, None, [{}], None)
    np.testing.assert_array_equal(batch.advantages, [[0, 1, 0.5], [0, -2, 0]])
    # on policy: - (1 + 0.5 - 2) / 3
    loss, _ = algorithm.loss(TokenScores(jnp.asarray(old), None), batch)
    assert float(loss) == pytest.approx(0.5 / 3)


def test_the_teacher_scores_under_its_own_weights(cfg, params, rollout):
    """And is a model of its own size: one layer against three."""
    words = ["training.mixed_precision=fp32", "training.packing=none", "generation.max_new_tokens=12"]
    run = compose(["algorithm=distill", *words, *QUICK])
    other = replace(cfg, num_layers=1, mlp_dim=40)
    resolved = ResolvedRun(run, cfg, None, {"fsdp": 1, "tp": 1}, plan_batch(run, 1), RowLayout(), 4, "xla", "cpu")
    resolved = replace(resolved, frozen_models={"teacher": _FrozenModel(other, "fp32", "xla", resolved.mesh_shape)})
    weights = random_params(other, seed=9)
    policy = policy_of(resolved, frozen_models={"teacher": weights})
    mask = np.asarray(rollout.completion_mask)
    batch = Batch(np.asarray(rollout.tokens), np.asarray(rollout.token_mask), mask.astype(np.float32))
    whole = jax.jit(partial(token_logprobs, cfg=other))(weights, batch.tokens, batch.token_mask)
    np.testing.assert_allclose(policy.scorers["teacher"](batch), np.where(mask, whole, 0), atol=2e-5)


@pytest.mark.parametrize("storage", ["fp32", "int8"])
def test_a_plan_counts_the_teacher(storage):
    run = compose(["algorithm=distill", f"algorithm.teacher.storage={storage}", "training.packing=none", *QUICK])
    resolved = resolve_run(run, *find_model(run.model), {"fsdp": 2, "tp": 1}, "cpu")
    found = MemoryEstimate(resolved).resident()
    if storage == "fp32":
        # the bundled model twice, once as it trains
        assert found["teacher"] == found["parameters"]
    assert found["teacher"] < {"fp32": 1.01, "int8": 0.5}[storage] * found["parameters"]
    plan = assemble_plan(find_machine("h100x2"), resolved, {})
    assert [phase.name for phase in plan.phases] == ["rollout", "teacher", "update"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPO(pairs="file"), "pairs='file'; it is data or sampled"),
        (lambda: DPO(num_generations=4), "an example has 2 completions"),
        (lambda: Distill(), "algorithm.teacher.weights=FOLDER"),
        (lambda: Distill(**TEACHER, num_generations=1, reward_coef=0.5), "at least 2: rewards are compared"),
        (lambda: TeacherConfig("random"), "a teacher needs trained weights"),
    ],
)
def test_wrong_settings_of_pairs_and_teachers_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_teacher_that_changed_between_two_starts_is_noticed(tmp_path):
    """By the digest of its weights in fingerprint.json."""
    folder = tmp_path / "teacher"
    shutil.copytree(source.BUNDLED, folder)
    run = compose(["algorithm=distill", f"algorithm.teacher.weights={folder}", *QUICK])
    parts = find_parts(run)
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    parts.write_fingerprint(run_dir)
    assert check_resumed(parts, run_dir) == ""
    (weights,) = folder.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match="frozen_weights.teacher: .* here, .* there"):
        check_resumed(parts, run_dir)

    # a run without a teacher has the fingerprint that it always had
    plain = compose(QUICK)
    assert "frozen_weights" not in fingerprint(plain, parts.model, 4)


# ---- a teacher that reads the expected answer


DISTILLED = ["algorithm=distill", "algorithm.teacher.storage=fp32"]


def test_completions_stand_after_other_prompts_by_hand():
    tokens = np.array([[0, 5, 7, 8], [5, 6, 9, 0]])
    mask = np.array([[False, True, True, True], [True, True, True, False]])
    weight = np.array([[0, 0, 0.25, 0.25], [0, 0, 0.5, 0]])
    found = after_prompts(Batch(tokens, mask, weight), 2, [[1, 2, 3], [4]])
    np.testing.assert_array_equal(found.tokens, [[1, 2, 3, 7, 8], [0, 0, 4, 9, 0]])
    np.testing.assert_array_equal(found.token_mask, [[1, 1, 1, 1, 1], [0, 0, 1, 1, 0]])
    np.testing.assert_array_equal(found.loss_weight, [[0, 0, 0, 0.25, 0.25], [0, 0, 0, 0.5, 0]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm.teacher.prompt='{question} is {result}'"], "algorithm.teacher: .*result"),
        (["algorithm.teacher.prompt='{question} is {answer}'", "algorithm.teacher.max_prompt_length=5"], "more than 5"),
        (["algorithm.teacher.weights=/no/teacher"], "^algorithm.teacher.weights: /no/teacher is not a folder"),
        (["generation.top_k=512"], "generation: top_k=512 would change nothing: it leaves no token out of vocab"),
    ],
)
def test_a_wrong_demonstration_or_teacher_is_refused_before_anything_is_compiled(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        find_parts(compose([*DISTILLED, *settings, *QUICK]))
    assert "\n" not in str(error.value)


def test_the_teacher_reads_the_answer_of_each_example():
    parts = find_parts(compose([*DISTILLED, *QUICK]))
    examples = [{"question": "1 + 2", "answer": "3"}, {"question": "4 + 5", "answer": "9"}]
    found = parts.task.prompts_with(examples, "{question} is {answer}", 44)
    read = [parts.model.tokenizer.decode(tokens) for tokens in found]
    assert ["1 + 2 is 3" in read[0], "4 + 5 is 9" in read[1]] == [True, True]


def test_the_prompt_of_the_policy_as_demonstration_changes_nothing(tmp_path):
    """The same weights with the same message, in longer rows: nothing to learn."""
    folder = write_with_tokenizer(tmp_path / "model", SMALL, GEMMA3)
    weights = [f"model.weights={folder}", f"algorithm.teacher.weights={folder}"]
    asked = ["algorithm.teacher.prompt='What is {question}?'", "algorithm.teacher.max_prompt_length=44"]
    more = ["algorithm.divergence=reverse", "training.max_steps=1", "training.packing=prefix"]
    train(compose([*DISTILLED, *weights, *asked, *more, *QUICK]), tmp_path / "run")
    (row,) = rows_of(tmp_path / "run")
    assert abs(row["train/teacher_divergence"]) <= 1e-6
