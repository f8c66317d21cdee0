"""Held-out loss equals one computed by hand in float64; which checkpoint is best; and when a run stops early."""

import contextlib
import json
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest
from conftest import rows_of
from model_checks import write_with_tokenizer

from tunix_lite.api import load
from tunix_lite.basics.best import Best, is_lower_better
from tunix_lite.basics.errors import ConfigError, RunFailed
from tunix_lite.models import attention, decoder
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.families import GEMMA3
from tunix_lite.rewards.similarity import RougeL
from tunix_lite.runs.held_out_loss import held_out_loss
from tunix_lite.runs.learner import build_learner
from tunix_lite.runs.setup import prepare
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.task import Task
from tunix_lite.tracking.checkpoint import Checkpoints
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.train import train

TINY = ["model=random", "model.architecture.num_layers=2", "model.architecture.vocab_size=512"]
ONE = "model.mesh_shape=[[1,1],[fsdp,tp]]"
# 10 rows, four at a time: the last part holds two
SFT = [*TINY, "algorithm=sft", "training.prompts_per_step=4", "generation.max_new_tokens=48", "rewards.workers=0",
       "evaluation.num_examples=0", "evaluation.loss_examples=10", "evaluation.interval_steps=1",
       "optimizer.learning_rate=1e-2", "optimizer.schedule=constant", "optimizer.warmup_steps=0",
       "tracking.tensorboard=false"]  # fmt: skip
SMALL = Architecture(512, 1, 16, 2, 1, 8, 24, pattern=("global",), window=None, query_scale=8)
# of steps 1 to 6
SCORES = [1.0, 3.0, 2.0, 2.5, 9.0, 1.0]
RANKED = ["training.best_metric=mine/score", "training.best_is=highest", "training.keep_best_checkpoints=1",
          "training.keep_checkpoints=1", "training.save_interval_steps=0",
          "+tracking.observers.mine=test_held_out_loss.scored"]  # fmt: skip


def scored(done) -> dict:
    return {"mine/score": SCORES[done.step - 1]}


def logits_of(params, cfg, tokens, mask) -> np.ndarray:
    """[B, T - 1, V] float64: those that predict tokens[:, 1:]."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

        @jax.jit
        def logits(params, mask):
            hidden = decoder.forward(params, cfg, tokens, attention.one_sequence_per_row(mask), np.float64)[0]
            return decoder.logits(params, cfg, hidden)

        return np.asarray(logits(params, mask))[:, :-1]


def logprobs_of(logits, tokens) -> np.ndarray:
    logits = logits - logits.max(axis=-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return np.take_along_axis(logprobs, np.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]


def task_of(run, tokenizer, learned=("completion",)) -> Task:
    lengths = run.generation
    return Task(run.task, tokenizer, lengths.max_prompt_length, lengths.max_new_tokens, learned=learned)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that ends itself after step 4: the score of step 2 is not reached twice in a row."""
    folder = tmp_path_factory.mktemp("stopped")
    train(compose([*SFT, *RANKED, ONE, "training.max_steps=6", "training.early_stopping_patience=2"]), folder)
    return folder


def test_the_loss_of_held_out_rows_is_that_of_the_checkpoint_in_float64(stopped):
    run = compose([*SFT, ONE])
    rows = rows_of(stopped)
    for step in (2, 4):
        model = load(stopped, step=step, mesh_shape=((1, 1), ("fsdp", "tp")))
        tokens, mask, counts = task_of(run, model.tokenizer).demonstrations(
            [run.task.source.held_out[i] for i in range(10)]
        )
        logits = logits_of(model.params, model.cfg, tokens, mask)
        counted = np.asarray(counts)[:, 1:]
        loss = -logprobs_of(logits, tokens)[counted].mean()
        row = rows[step]
        assert row["step"] == step and abs(row["eval/loss"] - loss) < 1e-5
        assert row["eval/perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)
        right = logits.argmax(axis=-1)[counted] == np.asarray(tokens)[:, 1:][counted]
        assert row["eval/token_accuracy"] == pytest.approx(right.mean(), abs=1e-6) and right.any() and not right.all()
    assert rows[4]["eval/loss"] < rows[0]["eval/loss"] - 0.1, "it learns"


def test_a_run_ends_when_nothing_was_better_for_so_long_and_says_so(stopped):
    assert [row["step"] for row in rows_of(stopped)] == [0, 1, 2, 3, 4]
    status = json.loads((stopped / "status.json").read_text())
    said = "early stopping: the best mine/score is 3 at step 2, and nothing was better in 2 measurements after it"
    assert status["status"] == "completed" and status["early_stopping"].startswith(said)
    assert said in (stopped / "train.log").read_text()
    losses = [row["eval/loss"] for row in rows_of(stopped)]
    assert status["eval"] == {"first": {"loss": losses[0]}, "last": {"loss": losses[4]}}
    assert f"held-out loss {losses[0]:.4f} → {losses[4]:.4f}" in (stopped / "train.log").read_text()


def test_the_best_checkpoint_is_kept_and_has_a_name(stopped):
    assert Checkpoints(stopped / "checkpoints").steps() == [2, 4], "the best and the newest"
    assert load(stopped, step="best", mesh_shape=((1, 1), ("fsdp", "tp"))).step == 2
    with pytest.raises(ConfigError, match="step=worst; it is a number, or best"):
        load(stopped, step="worst", mesh_shape=((1, 1), ("fsdp", "tp")))


def test_a_run_that_goes_on_knows_its_best_and_how_long_nothing_was_better(stopped, tmp_path):
    settings = [*SFT, *RANKED, ONE, "training.early_stopping_patience=2"]
    train(compose([*settings, "training.max_steps=3"]), tmp_path)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [2, 3]
    train(compose([*settings, "training.max_steps=6"]), tmp_path)
    ours, theirs = ([{k: v for k, v in row.items() if "time/" not in k and "perf/" not in k and "memory/" not in k}
                     for row in rows_of(folder)] for folder in (tmp_path, stopped))  # fmt: skip
    assert ours == theirs, "as without the stop"
    assert Checkpoints(tmp_path / "checkpoints").steps() == [2, 4]

    # the same command again makes no step; with more patience it goes on, and step 5 is a new best
    train(compose([*settings, "training.max_steps=6"]), tmp_path)
    assert rows_of(tmp_path)[-1]["step"] == 4
    train(compose([*settings, "training.max_steps=6", "training.early_stopping_patience=3"]), tmp_path)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [5, 6]
    assert load(tmp_path, step="best", mesh_shape=((1, 1), ("fsdp", "tp"))).step == 5
    assert "early_stopping" not in json.loads((tmp_path / "status.json").read_text())


def begun(settings: list[str], folder):
    """The learner of a run that has not made a step, its task and its state."""
    parts = prepare(compose(settings), RunDir(folder))
    jax.set_mesh(parts.mesh)
    stopping = SimpleNamespace(
        check_between_chunks=lambda: None, uninterruptible=lambda *_, **__: contextlib.nullcontext()
    )
    session = SimpleNamespace(
        run=parts.resolved.run, parts=parts, run_dir=RunDir(folder), console=MagicMock(), stopping=stopping
    )
    return build_learner(session), parts.task, session.state


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("model.mesh_shape=[[4,1],[fsdp,tp]]", "training.packing=sequences"), marks=pytest.mark.wide),
        ("model.mesh_shape=[[2,2],[fsdp,tp]]", "training.packing=none", "training.micro_batch_size=1"),
        (ONE, "training.packing=sequences", "training.prompts_per_step=3"),
    ],
)
def test_mesh_micro_batches_and_packing_do_not_change_it(settings, stopped, tmp_path):
    learner, task, state = begun([*SFT, *settings], tmp_path)
    found = held_out_loss(learner, task, state)
    row = rows_of(stopped)[0]
    assert found.keys() == {name for name in row if name.startswith("eval/")}
    for name, value in found.items():
        assert value == pytest.approx(row[name], rel=2e-6), name


def test_the_loss_of_held_out_pairs_is_dpos(tmp_path):
    """Seven pairs, two at a time, under weights that have left the reference: by hand in float64."""
    pairs = [{"prompt": f"{n} + 1", "chosen": f"It is {n + 1}.", "rejected": "no" * (n + 1)} for n in range(7)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, pairs)))
    settings = [*TINY, ONE, "algorithm=dpo", "task=preferences", f"task.train={file}", f"task.held_out={file}",
                "algorithm.beta=0.5", "training.prompts_per_step=2", "training.packing=none",
                "evaluation.num_examples=0", "evaluation.loss_examples=7"]  # fmt: skip
    learner, task, state = begun(settings, tmp_path)
    before = jax.tree.map(np.asarray, state.params)
    rng = np.random.default_rng(0)
    moved = jax.tree.map(lambda x: x + (0.02 * rng.normal(size=x.shape)).astype(x.dtype), state.params)
    found = held_out_loss(learner, task, state.replace(params=moved))

    def total(params, name):
        tokens, mask, counts = task.demonstrations(pairs, name)
        logprobs = logprobs_of(logits_of(params, learner.resolved.cfg, tokens, mask), tokens)
        return np.where(np.asarray(counts)[:, 1:], logprobs, 0).sum(axis=1)

    margins = (total(moved, "chosen") - total(before, "chosen")) - (
        total(moved, "rejected") - total(before, "rejected")
    )
    assert found["eval/loss"] == pytest.approx(np.log1p(np.exp(-0.5 * margins)).mean(), rel=1e-4)
    assert found["eval/margin"] == pytest.approx(margins.mean(), rel=1e-3, abs=1e-4)
    assert found["eval/pair_accuracy"] == pytest.approx((margins > 0).mean(), abs=1e-6)
    assert "eval/perplexity" not in found, "it is no loss in nats a token"


@pytest.mark.parametrize("divergence", ["token", pytest.param("reverse", marks=pytest.mark.wide)])
def test_the_held_out_loss_of_distillation_is_the_same_in_any_number_of_parts(divergence, tmp_path):
    """And of a teacher that is the policy itself it is 0."""
    folder = write_with_tokenizer(tmp_path / "model", SMALL, GEMMA3)
    settings = [ONE, "algorithm=distill", "algorithm.num_generations=2", f"algorithm.divergence={divergence}",
                f"model.weights={folder}", f"algorithm.teacher.weights={folder}",
                "generation.max_new_tokens=8", "evaluation.num_examples=0", "evaluation.loss_examples=3"]  # fmt: skip

    def moved(params):
        rng = np.random.default_rng(0)
        return jax.tree.map(lambda x: x * (1 + 0.1 * rng.normal(size=x.shape)).astype(x.dtype), params)

    found = []
    for prompts in (3, 2):
        learner, task, state = begun([*settings, f"training.prompts_per_step={prompts}"], tmp_path)
        task = replace(task, pool=None)
        same = held_out_loss(learner, task, state)
        assert abs(same["eval/loss"]) < 2e-3, "the teacher is kept in bfloat16"
        state = state.replace(params=moved(state.params))
        found.append(held_out_loss(learner, task, state))
    assert found[0].keys() == found[1].keys() and found[0]["eval/loss"] > 0.01
    for name, value in found[0].items():
        assert value == pytest.approx(found[1][name], rel=1e-4, abs=1e-6), name


def test_completions_are_compared_with_demonstrations_where_sft_learns_from_them(tmp_path):
    settings = [*SFT, ONE, "training.max_steps=1", "evaluation.num_examples=3", "evaluation.num_samples=0",
                "tracking.samples_interval_steps=1"]  # fmt: skip
    train(compose(settings), tmp_path)
    for row in rows_of(tmp_path):
        file = tmp_path / "samples" / f"evaluation_{row['step']:06d}.jsonl"
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        texts = [(one["completion"], one["example"]["completion"]) for one in samples]
        assert row["eval/exact_match"] == np.mean([a.strip() == b.strip() for a, b in texts])
        rouge = [RougeL()(text, {"answer": reference}) for text, reference in texts]
        assert row["eval/rouge_l"] == np.mean(rouge)


# ---- settings


def test_the_best_is_the_first_of_equals_and_no_number_is_never_one():
    best = Best("eval/loss", is_lower_better=True)
    assert [best.take(step, x) for step, x in enumerate((np.nan, 2.0, 2.0, 1.5, np.inf, 1.75))] == [
        False, True, False, True, False, False,
    ]  # fmt: skip
    assert (best.step, best.values[3], best.since) == (3, 1.5, 2)
    assert not best.ended_by(None) and not best.ended_by(3) and "1.5 at step 3" in best.ended_by(2)
    assert "nothing was better in 1 measurement after it" in replace(best, since=1).ended_by(1)
    # measured once more, as after a start from its checkpoint, the best is no new one
    assert not best.take(3, 1.5) and best.since == 3
    highest = Best("eval/accuracy", is_lower_better=False)
    assert [highest.take(step, x) for step, x in enumerate((-1.0, -2.0, 0.0))] == [True, False, True]


@pytest.mark.parametrize(
    ("metric", "is_lower"),
    [("eval/loss", True), ("train/loss", True), ("eval/perplexity", True), ("eval/teacher_kl", True),
     ("mine/score", False), ("eval/accuracy", False), ("eval/avg_at_4", False), ("eval/token_accuracy", False), ("reward/short", False)],
)  # fmt: skip
def test_the_name_of_a_metric_says_what_is_better(metric, is_lower):
    assert is_lower_better(metric) is is_lower and is_lower_better(metric, "highest") is False


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["training.best_metric=time/step"], "training: best_metric=.* is no metric of learning"),
        (["training.best_is=up"], "it is auto, highest or lowest"),
        (["evaluation.loss_examples=8"], "the loss of GRPO says nothing of held-out rows"),
        (["training.early_stopping_patience=0"], "must be at least 1, or null to go on"),
        (["training.keep_best_checkpoints=1", "evaluation.num_examples=0"],
         "best_metric=eval/accuracy is not measured, as evaluation.num_examples is 0 here"),
        (["training.keep_best_checkpoints=1", "training.best_metric=eval/loss"],
         "best_metric=eval/loss is not measured, as evaluation.loss_examples is 0 here"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        compose(settings)


def test_a_held_out_row_without_a_demonstration_is_named_before_the_start(tmp_path):
    train_file = tmp_path / "train.jsonl"
    held_out = tmp_path / "held_out.jsonl"
    train_file.write_text("\n".join(json.dumps({"prompt": f"{n}", "completion": "a"}) for n in range(20)))
    held_out.write_text('{"prompt": "1"}\n')
    settings = [*TINY, ONE, "algorithm=sft", "task=jsonl", f"task.train={train_file}", f"task.held_out={held_out}"]
    with pytest.raises(ConfigError, match="needs a `completion`.* evaluation.loss_examples=0 measures no loss"):
        prepare(compose(settings), RunDir(tmp_path / "run"))


def test_a_metric_that_no_evaluation_has_ends_the_run_before_its_first_step(tmp_path):
    settings = [*SFT, ONE, "training.max_steps=1", "training.keep_best_checkpoints=1", "training.best_is=lowest"]
    with pytest.raises(RunFailed, match="best_metric=eval/margin is not measured; there is eval/loss, "):
        train(compose([*settings, "training.best_metric=eval/margin"]), tmp_path)
    assert [row["step"] for row in rows_of(tmp_path)] == [0]
