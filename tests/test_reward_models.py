"""Reward models: their number at the token that transformers reads, their training, and a run that learns from one."""

import json
import shlex
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collecting import collect
from conftest import random_params, set_mesh
from test_train import lines

from tunix_lite.algorithms.reward_model import RewardModelTraining
from tunix_lite.api import load
from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.types import left_padded
from tunix_lite.commands.evaluate import EvaluateTaskConfig, _check_models, evaluate_model
from tunix_lite.inference.export import export
from tunix_lite.inference.language_model import GREEDY
from tunix_lite.learner.packing import RowShape
from tunix_lite.learner.policy import make_policy
from tunix_lite.learner.rows import RowLayout
from tunix_lite.learner.update import TrainStep
from tunix_lite.models import attention, decoder, hf, source
from tunix_lite.models.families import config_json, keys_of_output, read_config
from tunix_lite.models.scalar_head import scalar_scores
from tunix_lite.models.source import BUNDLED, ModelConfig
from tunix_lite.models.tokenizer import read_until
from tunix_lite.parallel.mesh import as_text, part_of_mesh
from tunix_lite.planning.estimate import MemoryEstimate
from tunix_lite.planning.hardware import find_machine
from tunix_lite.planning.plan import assemble_plan
from tunix_lite.rewards.model import RewardModel
from tunix_lite.runs.setup import find_parts
from tunix_lite.settings.compose import compose
from tunix_lite.settings.resolved_parts import policy_of
from tunix_lite.settings.resolved_run import find_model, resolve_run
from tunix_lite.tasks.messages import Message
from tunix_lite.tasks.prompt_text import PromptTemplate, PromptText
from tunix_lite.tasks.reward_models import RewardScorer
from tunix_lite.tasks.task import Task
from tunix_lite.train import train

ONE = "model.mesh_shape=[[1,1],[fsdp,tp]]"
TINY = ["model=random", "model.architecture.num_layers=1", "model.architecture.embed_dim=32",
        "model.architecture.mlp_dim=32", ONE, "tracking.tensorboard=false",
        "training.save_interval_steps=0", "rewards.workers=0"]  # fmt: skip
PAIRS = [
    {"prompt": f"What is {a} + {b}?", "chosen": f"{a + b}", "rejected": f"It is {a + b + 1}", "gap": 0.25 * a}
    for a in range(1, 4)
    for b in range(2, 6)
]


# ---- the head and the loss


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_the_number_of_a_token_is_a_sum_of_products(bias):
    rng = np.random.default_rng(1)
    hidden, score = rng.normal(size=(2, 3, 8)), rng.normal(size=8)
    params = {"score": jnp.asarray(score)} | ({"score_bias": jnp.array([bias])} if bias else {})
    found = scalar_scores(params, jnp.asarray(hidden, jnp.float32))
    np.testing.assert_allclose(found, hidden @ score + bias, atol=1e-5)
    assert scalar_scores(params, jnp.asarray(hidden, jnp.bfloat16)).dtype == jnp.float32


PACKED = pytest.param(RowLayout("sequences", 2, None, RowShape(20), 3), marks=pytest.mark.wide)


@pytest.mark.parametrize("layout", [RowLayout("none", 6), PACKED])
def test_loss_and_gradient_are_those_of_float64(cfg, layout):
    """With one sequence in a micro-batch, so that no micro-batch holds a whole pair, and packed. Training below has the
    loss without a margin: log 2 at first."""
    cfg = replace(cfg, output="score", num_layers=1, pattern=("global",))
    params = random_params(cfg, seed=3)
    rng = np.random.default_rng(2)
    width = 9
    pairs = [[rng.integers(4, 32, n).tolist() for n in lengths] for lengths in ((9, 4), (3, 7), (6, 2))]
    task = SimpleNamespace(
        conversations=lambda examples, name: left_padded([p[name == "rejected"] for p in pairs], width, 0)
    )
    examples = [{"gap": 0.5}, {"gap": 0.0}, {"gap": 2}]
    algorithm = RewardModelTraining(margin="gap", centering=0.3)
    policy = make_policy(cfg, None, temperature=1.0, rows=layout)
    batch, _, _ = collect(algorithm, policy, task, params, examples, None)
    step = TrainStep(policy, algorithm, optax.sgd(1.0))
    shardings = jax.tree.map(lambda x: x.sharding, params)
    rows, _ = layout.lay_out(batch)
    grads, metrics = jax.jit(lambda p: step.gradients(p, None, jnp.int32(0), rows, shardings))(params)

    with jax.enable_x64(True):
        margins = np.array([e["gap"] for e in examples], np.float64)
        tokens, mask = left_padded([row for pair in pairs for row in pair], width, 0)

        def loss(params):
            meta = attention.one_sequence_per_row(mask)
            hidden = decoder.forward(params, cfg, tokens, meta, np.float64)[0][:, -1]
            reward = hidden @ params["score"]
            chosen, rejected = reward[0::2], reward[1::2]
            each = -jax.nn.log_sigmoid(chosen - rejected - margins) + 0.3 * (chosen + rejected) ** 2
            return each.mean(), (chosen - rejected).mean()

        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        (value, gap), exact = jax.jit(jax.value_and_grad(loss, has_aux=True))(wide)
    assert float(metrics["train/loss"]) == pytest.approx(float(value), rel=1e-5)
    assert float(metrics["train/margin"]) == pytest.approx(float(gap), abs=1e-5)
    assert "train/entropy" not in metrics
    for path, grad in hf.flatten(grads).items():
        expected = np.asarray(hf.flatten(exact)[path])
        size = max(np.abs(expected).max(), 1e-30)
        np.testing.assert_allclose(np.asarray(grad) / size, expected / size, atol=2e-5, err_msg=path)


def test_a_margin_that_is_no_number_is_refused():
    algorithm = RewardModelTraining(margin="gap")
    pad = left_padded([[1, 2]], 2, 0)
    task = SimpleNamespace(conversations=lambda examples, name: pad)
    policy = SimpleNamespace(rescore=lambda params, batch: np.zeros((2, 2)))
    with pytest.raises(ValueError, match="algorithm.margin=gap: a pair has 'much' there"):
        collect(algorithm, policy, task, None, [{"gap": "much"}], None)
    with pytest.raises(ValueError, match="centering=-1 must not be negative"):
        RewardModelTraining(centering=-1)


def test_a_column_of_margins_that_is_not_there_is_said_when_rows_are_read(pairs):
    words = [*TINY, *TRAIN, f"task.train={pairs}"]
    find_parts(compose([*words, "algorithm.margin=gap"]))
    with pytest.raises(ConfigError, match=rf"task: {pairs}, line 1: algorithm.margin=gaps: a pair has None there"):
        find_parts(compose([*words, "algorithm.margin=gaps"]))


# ---- which tokens, and which of them is read


@pytest.mark.parametrize(
    ("ids", "pad", "read"),
    [
        ([5, 6, 7], None, [5, 6, 7]),
        ([5, 6, 7, 0, 0], 0, [5, 6, 7]),
        ([5, 0, 7], 0, [5, 0, 7]),  # a pad token within the text is a token
        ([5, 6, 7, 7], 7, [5, 6]),  # pad is the end of a turn, too
        ([0, 0], 0, [0]),  # transformers reads the first one
    ],
)
def test_the_last_token_that_is_no_padding_is_read(ids, pad, read):
    assert read_until(ids, pad) == read


def test_a_conversation_has_the_tokens_of_its_text(tokenizer):
    """The whole text of the template at once, without a prompt for a next turn, and letters of data stay letters."""
    messages = [{"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": "3"}]
    text = tokenizer.chat(messages, add_generation_prompt=False)
    assert tokenizer.conversation(messages) == tokenizer.encode(text)
    (end, *_) = (name for name, one in tokenizer.special.items() if one == tokenizer.special["eos_token"])
    spelled = tokenizer.special[end]
    written = PromptText(PromptTemplate("{q}"), "text", tokenizer).conversation(
        {"q": "1 + 2"}, [Message("assistant", f"3{spelled}4")]
    )
    ends = tokenizer.backend.token_to_id(spelled)
    assert written.count(ends) == tokenizer.encode(text).count(ends)


# ---- a folder of transformers


def a_folder(path, cfg, family, pad_id: int | None, template: str | None = "{{ messages[-1].content }}", **more):
    """A reward model with drawn weights and the bundled tokenizer; its params."""
    params = random_params(cfg, seed=8, scale=0.2)
    path.mkdir(exist_ok=True)
    hf.save_params(params, cfg, family, path, "F32")
    config = config_json(cfg, family, pad_token_id=pad_id, **more) | keys_of_output(cfg, family)
    (path / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / file, path / file)
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return params


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One of the bundled architecture, cut to one layer, with another template than the policy's."""
    set_mesh(1, 1)
    path = tmp_path_factory.mktemp("reward") / "model"
    cfg, family = read_config(BUNDLED)
    a_folder(path, replace(cfg, num_layers=1, pattern=("global",), window=None, output="score"), family, 0,
             "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", mean=0.5, std=2.0)  # fmt: skip
    return path


def scorer_of(path, num_rows: int = 3, **settings) -> RewardScorer:
    model = source.with_score(source.download(source.locate(ModelConfig(weights=str(path)))))
    params = source.load_base(model, 0, "fp32")
    policy = make_policy(model.cfg, None, 1.0, reference=params, rows=RowLayout("none", 1, 1, num_rows=num_rows))
    text = PromptText(PromptTemplate("{question}"), "text", model.tokenizer)
    settings = RewardModel(str(path), storage="fp32", **settings)
    return RewardScorer.of(settings, text, model, policy.scorers["reference"], num_rows)


EXAMPLES = [{"question": "1 + 2"}, {"question": "12 + 7 - 3"}, {"question": "4"}, {"question": "8 - 5 + 20 + 11"}]
COMPLETIONS = ["3", "12 + 7 = 19\n19 - 3 = 16\nThe answer is 16.", "", "The answer is 34."]


def test_a_reward_model_reads_its_own_template_in_batches(folder):
    scorer = scorer_of(folder)
    one, length = scorer.row(EXAMPLES[0], "3")
    assert length == len(one) and one == scorer.text.tokenizer.encode("user: 1 + 2\nassistant: 3\n")
    found = [outcome.value for outcome in scorer(EXAMPLES, COMPLETIONS)]
    alone = [scorer([e], [c])[0].value for e, c in zip(EXAMPLES, COMPLETIONS)]
    np.testing.assert_allclose(found, alone, atol=1e-6)
    assert len(set(np.round(found, 4))) == 4
    normal = scorer_of(folder, normalize=True)(EXAMPLES, COMPLETIONS)
    np.testing.assert_allclose([one.value for one in normal], (np.array(found) - 0.5) / 2, atol=1e-6)


def test_a_folder_that_is_no_reward_model_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="has no score.weight, so it is no reward model"):
        source.with_score(source.locate(ModelConfig()))
    words = ["model.weights=" + str(folder), *TINY[5:], ONE]
    with pytest.raises(ConfigError, match="is a reward model, which samples no tokens"):
        find_parts(compose(words))
    words = ["+task.rewards.rm={_target_: tunix_lite.rewards.model.RewardModel, weights: " + str(tmp_path) + "}"]
    with pytest.raises(ConfigError, match=r"task.rewards.rm.weights: .* has no config.json"):
        find_parts(compose([*TINY, *words]))
    plain = source.locate(ModelConfig())
    with pytest.raises(ValueError, match="normalize=true: config.json has mean=None and std=None"):
        RewardScorer.of(RewardModel("x", normalize=True), None, plain, None, 1)
    assert find_parts(compose([*TINY, reward(folder)])).resolved.as_scorer("reward_rm").lengths == (511, 1)
    with pytest.raises(ConfigError, match="was made for 512 tokens, and max_length is 4096; write max_length: 512"):
        find_parts(compose([*TINY, reward(folder, max_length=4096)]))
    with pytest.raises(ConfigError, match=r"rewards.rm is a reward model, which reads single turns"):
        compose(["task=guessing", *words])


@pytest.mark.parametrize("lie", [{"num_labels": 2}, {"id2label": {"0": "bad", "1": "good"}}])
def test_labels_that_the_head_does_not_have_are_refused(folder, tmp_path, lie):
    """With the file and the key."""
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | lie))
    (key,) = lie
    with pytest.raises(ValueError, match=rf"{file}: {key}=.*, and the model of a reward has 1 label; score.weight is "):
        source.download(source.locate(ModelConfig(weights=str(tmp_path / "model"))))


# ---- in a run


def reward(folder, **more) -> str:
    settings = "".join(f", {name}: {value}" for name, value in more.items())
    return f"+task.rewards.rm={{_target_: tunix_lite.rewards.model.RewardModel, weights: {folder}{settings}}}"


@pytest.mark.parametrize("place", [{}, pytest.param({"mesh_shape": "[[1,1],[fsdp,tp]]"}, marks=pytest.mark.wide)])
def test_a_run_learns_from_a_reward_model(folder, tmp_path, place):
    """Its rewards are those of the scorer, on the completions that the samples file has; also where the reward model
    has one of the two devices of the run. Conversations that were cut are counted, and the samples say which."""
    words = [reward(folder, storage="fp32", max_length=20, **place), "training.max_steps=1",
             "training.prompts_per_step=2", "generation.max_new_tokens=8", "evaluation.num_examples=2",
             "evaluation.num_samples=0", "tracking.samples_interval_steps=1", "algorithm.num_generations=2",
             f"model.mesh_shape=[[{1 + len(place)},1],[fsdp,tp]]"]  # fmt: skip
    train(compose([*TINY, *words]), tmp_path / "run")
    samples = [json.loads(line) for file in (tmp_path / "run" / "samples").glob("step*1.jsonl")
               for line in file.read_text().splitlines()]  # fmt: skip
    examples = [{"question": one["prompt"].removeprefix("What is ").removesuffix("?")} for one in samples]
    set_mesh(1, 1)
    scorer = scorer_of(folder, max_length=20)
    scorer = replace(scorer, text=replace(scorer.text, template=PromptTemplate("What is {question}?")))
    expected = scorer(examples, [one["completion"] for one in samples])
    np.testing.assert_allclose([one["rewards"]["rm"] for one in samples], [one.value for one in expected], atol=1e-5)
    (row,) = [row for row in lines(tmp_path / "run") if "reward/rm" in row]
    assert row["time/reward_rm"] > 0 and row["reward/rm"] == pytest.approx(np.mean([o.value for o in expected]))
    assert "reward_rm" in (tmp_path / "run" / "plan.json").read_text()
    texts = [f"user: {one['prompt']}\nassistant: {one['completion']}\n" for one in samples]
    is_cut = [len(scorer.text.tokenizer.encode(text)) > 20 for text in texts]
    assert row["rewards/cut"] == sum(is_cut) > 0
    assert [one["failed"].get("reward 'rm'", "").startswith("cut: ") for one in samples] == is_cut


@pytest.mark.parametrize(
    "own",
    [
        ((1, 2), ("fsdp", "tp")),
        *(pytest.param(one, marks=pytest.mark.wide) for one in (None, ((1, 1), ("fsdp", "tp")))),
    ],
)
def test_numbers_do_not_depend_on_the_devices(folder, own):
    """On 2 x 2 devices, on the first one of them, and on the first two, by tp: those of a single device."""
    text = "" if own is None else as_text(own)
    run = compose([*TINY[:4], reward(folder, storage="fp32", **({"mesh_shape": text} if own else {}))])
    run = replace(run, training=replace(run.training, packing="none"))
    alone = [one.value for one in scorer_of(folder)(EXAMPLES, COMPLETIONS)]
    set_mesh(2, 2)
    resolved = resolve_run(run, *find_model(run.model), {"fsdp": 2, "tp": 2}, "cpu")
    model = source.with_score(source.download(source.locate(ModelConfig(weights=str(folder)))))
    theirs = resolved.as_scorer("reward_rm")
    with part_of_mesh(theirs.mesh_shape):
        params = source.load_base(model, 0, "fp32")
    assert len(params["embed"].devices()) == (4 if own is None else np.prod(own[0]))
    policy = policy_of(resolved, frozen_models={"reward_rm": params})
    words = PromptText(PromptTemplate("{question}"), "text", model.tokenizer)
    settings = run.scoring_models["reward_rm"].reward
    scorer = RewardScorer.of(settings, words, model, policy.scorers["reward_rm"], theirs.batch.sequences)
    found = [one.value for one in scorer(EXAMPLES, COMPLETIONS)]
    np.testing.assert_allclose(found, alone, atol=1e-5)


def test_an_evaluation_asks_the_reward_model(folder, tmp_path):
    """Its mean reward is that of the greedy completions. A folder that is not there is said before a model is loaded."""
    words = ["generation.max_new_tokens=8", "task.rewards.correct.weight=0", "rewards.workers=0"]
    run = compose([*words, reward(folder, storage="fp32"), ONE])
    model = load(compose([*TINY[:4], ONE]))
    options = EvaluateTaskConfig(num_examples=3)
    found = evaluate_model(model, run, options)["reward"].value
    examples = [run.task.source.held_out[i] for i in range(3)]
    asked = [f"What is {one['question']}?" for one in examples]
    completions = [one.text for one in model.generate(asked, replace(GREEDY, max_new_tokens=8))]
    scorer = scorer_of(folder)
    scorer = replace(scorer, text=replace(scorer.text, template=PromptTemplate("What is {question}?")))
    expected = [one.value for one in scorer(examples, completions)]
    assert found == pytest.approx(np.mean(expected), abs=1e-4)
    run = compose([*words, reward(tmp_path / "no")])
    with pytest.raises(ConfigError, match=r"task.rewards.rm.weights: "):
        _check_models(run, options)


@pytest.mark.parametrize("storage", ["fp32", "int8"])
def test_a_plan_counts_the_reward_model(folder, storage):
    run = compose([*TINY, reward(folder, storage=storage, max_length=64), "training.packing=none"])
    resolved = resolve_run(run, *find_model(run.model), {"fsdp": 2, "tp": 1}, "cpu")
    found = MemoryEstimate(resolved).resident()["reward_rm"]
    table = decoder.weights(read_config(folder)[0])
    whole = sum(4 * np.prod(w.shape) for w in jax.tree.leaves(table, is_leaf=lambda w: hasattr(w, "init")))
    norms = 4 * sum(np.prod(w.shape) for w in hf.flatten(table).values() if w.axes[-1] == "norm")
    if storage == "fp32":
        assert found == pytest.approx((whole - norms) / 2 + norms)
    assert found < {"fp32": 1, "int8": 0.55}[storage] * whole
    phases = [phase.name for phase in assemble_plan(find_machine("h100x2"), resolved, {}).phases]
    assert phases == ["rollout", "reward_rm", "update"]


def test_only_a_run_loads_a_reward_model(folder, tokenizer):
    task = Task(compose([*TINY, reward(folder)]).task, tokenizer, 32, 8)
    rollout = SimpleNamespace(tokens=np.array([[5, 6]]), completion_mask=np.array([[False, True]]))
    with pytest.raises(ValueError, match="rewards.rm is a reward model, which a run and `tunix-lite evaluate` load"):
        task.grader([{"question": "1 + 2", "answer": "3"}]).results(rollout)


# ---- training one


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return file


TRAIN = ["algorithm=reward_model", "task=preferences", "training.prompts_per_step=4", "task.held_out_every=3",
         "generation.max_prompt_length=24", "generation.max_new_tokens=12", "evaluation.interval_steps=0",
         "optimizer.learning_rate=1e-2", "optimizer.warmup_steps=0", "optimizer.schedule=constant"]  # fmt: skip


@pytest.mark.parametrize(
    "lora", [[], pytest.param(["model.lora.rank=2", "model.lora.base=fp32"], marks=pytest.mark.wide)]
)
def test_a_trained_reward_model_is_one_of_transformers(pairs, tmp_path, lora):
    """The first loss is log 2, exactly: the head begins at zero. What is exported gives what the run measured."""
    words = [*TINY, *TRAIN, f"task.train={pairs}", "training.max_steps=6", *lora]
    train(compose(words), tmp_path / "run")
    rows = lines(tmp_path / "run")
    steps = [row for row in rows if "train/loss" in row]
    assert steps[0]["train/loss"] == pytest.approx(np.log(2), rel=1e-6) and steps[0]["train/margin"] == 0
    assert steps[-1]["train/loss"] < 0.6
    model = load(tmp_path / "run", mesh_shape=((1, 1), ("fsdp", "tp")))
    with pytest.raises(ValueError, match="it gives a text a number, and no tokens"):
        model.generate("1 + 2")
    model = replace(model, source=replace(model.source, family=read_config(BUNDLED)[1]))
    with pytest.raises(ConfigError, match="kind=gguf has no place for the head of a reward model; give kind="):
        export(model, tmp_path / "no", kind="gguf")
    written = export(model, tmp_path / "model", dtype="fp32", kind="merged" if lora else "full")
    config = json.loads((written.folder / "config.json").read_text())
    assert config["architectures"] == ["Gemma3TextForSequenceClassification"] and len(config["id2label"]) == 1
    assert config["pad_token_id"] == model.tokenizer.pad_id
    # the line that uses it is one that a run takes
    (word,) = shlex.split(written.serve)[2:]
    assert compose([*TINY, word]).scoring_models["reward_rm"].settings.weights == str(written.folder)

    # the held-out rows, by the folder
    held_out = PAIRS[2::3]
    scorer = scorer_of(written.folder)
    scorer = replace(scorer, text=replace(scorer.text, template=PromptTemplate("{prompt}")))
    chosen, rejected = (
        np.array([one.value for one in scorer(held_out, [pair[name] for pair in held_out])])
        for name in ("chosen", "rejected")
    )
    measured = [row for row in rows if "eval/margin" in row][-1]
    assert measured["eval/margin"] == pytest.approx(np.mean(chosen - rejected), abs=1e-4)
    assert measured["eval/pair_accuracy"] == pytest.approx(np.mean(chosen > rejected))


def test_training_goes_on_from_a_reward_model_and_from_a_checkpoint(folder, pairs, tmp_path):
    """Its head is what is trained on; and a run that stops and goes on is one that never stopped."""
    words = [*TRAIN, *TINY[5:], ONE, f"model.weights={folder}", f"task.train={pairs}"]
    words += ["generation.max_new_tokens=20"]  # with what this template writes before an answer
    whole = train(compose([*words, "training.max_steps=2"]), tmp_path / "whole")
    assert lines(tmp_path / "whole")[0]["eval/margin"] != 0
    train(compose([*words, "training.max_steps=1"]), tmp_path / "run")
    again = train(compose([*words, "training.max_steps=2"]), tmp_path / "run")
    for path, x in hf.flatten(whole.params).items():
        np.testing.assert_array_equal(x, hf.flatten(again.params)[path], err_msg=path)


def test_a_conversation_that_is_too_long_is_refused_with_its_length(pairs, tokenizer):
    run = compose([*TINY, *TRAIN, f"task.train={pairs}"])
    task = Task(run.task, tokenizer, 8, 4, learned=("chosen", "rejected"))
    example = task.config.source.train[0]
    ids = task.text.conversation(example, [Message("assistant", example["chosen"])])
    with pytest.raises(ValueError, match=f"the conversation with `chosen` has {len(ids)} tokens, more than .*=12; "):
        task.conversations([example], "chosen")
    cut = Task(run.task, tokenizer, 8, 4, "truncate", learned=("chosen", "rejected"))
    np.testing.assert_array_equal(cut.conversations([example], "chosen")[0][0], ids[-12:])


def test_prompts_are_not_shared(pairs):
    with pytest.raises(ConfigError, match="reads whole conversations and shares no prompts; set training.packing=seq"):
        compose([*TINY, *TRAIN, f"task.train={pairs}", "training.packing=prefix"])
