"""The primitives of a training loop: gradients, updates, samples, checkpoints of clients beside one base."""

import json
import runpy
import sys
from functools import partial

import jax
import numpy as np
import pytest
from test_docs import ROOT

import tunix_lite
from tunix_lite.basics.types import RowBatch, TokenScores
from tunix_lite.learner.policy import token_logprobs
from tunix_lite.models.lora import acting_params
from tunix_lite.training_clients.data import Datum, parts_of_data
from tunix_lite.training_clients.losses import SETTINGS, token_loss

TINY = [
    *("model=random", "model.architecture.num_layers=1", "model.architecture.embed_dim=16"),
    *("model.architecture.num_heads=2", "model.architecture.head_dim=8", "model.architecture.mlp_dim=16"),
    *("model.architecture.max_positions=64", "model.lora.base=fp32"),
]
ONE = "model.mesh_shape=[[1,1],[fsdp,tp]]"
DATA = [
    Datum([5, 6, 7], [6, 7, 1], weights=[0, 1, 2]),
    Datum(list(range(12)), list(range(1, 13)), advantages=[0.5] * 12, logprobs=[-6.0] * 12),
    Datum([9], [400]),
]


@pytest.fixture(scope="module")
def trainer():
    with tunix_lite.Trainer(*TINY, ONE, "rollout.num_slots=4", "rollout.chunk=4") as trainer:
        yield trainer


@pytest.fixture
def client(trainer):
    client = trainer.adapter(rank=2, seed=3)
    yield client
    client.close()


def flat(tree) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


# ---- losses


def formula(name: str, p, q, A, w, low=0.8, high=1.2, beta=0.05):
    """The loss and its derivative by p, in float64."""
    r = np.exp(p - q)
    inside = (r > low) & (r < high)
    clipped = np.clip(r, low, high)
    value, slope = {
        "cross_entropy": (p, np.ones_like(p)),
        "importance_sampling": (r * A, r * A),
        "ppo": (np.minimum(r * A, clipped * A), np.where((r * A <= clipped * A) | inside, r * A, 0)),
        "cispo": (clipped * A * p, clipped * A),
        "dro": (p * A - beta / 2 * (p - q) ** 2, A - beta * (p - q)),
    }[name]
    return -(w * value).sum(), -w * slope


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("settings", [{}, {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0, "beta": 0.3}])
def test_each_token_loss_is_its_formula(name, settings):
    rng = np.random.default_rng(0)
    p, q, A, w = rng.normal(-1, 1, (4, 2, 5))
    known = {k: v for k, v in settings.items() if k in SETTINGS[name]}
    short = {"clip_low_threshold": "low", "clip_high_threshold": "high"}
    mask = np.array([[True] * 5, [True] * 3 + [False] * 2])
    value, slope = formula(name, p, q, A, w * mask, **{short.get(k, k): v for k, v in known.items()})
    streams = {"weights": w, "logprobs": q, "advantages": A}
    batch = RowBatch(tokens=None, token_mask=mask, loss_weight=mask, streams=jax.tree.map(np.float32, streams))

    def loss(logprobs):
        return token_loss(name, known).loss(TokenScores(logprobs, logprobs), batch)[0]

    found, grad = jax.value_and_grad(loss)(p.astype(np.float32))
    assert found == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(grad, slope, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "cross_entropy"])
@pytest.mark.parametrize("filler", [-120.0, -np.inf])
def test_a_token_without_weight_may_have_any_log_probability(name, filler):
    """Tokens of a prompt, say; p = q = -1, A = 2, w = 1 at the other token."""
    streams = {"weights": [[0.0, 1.0]], "logprobs": [[filler, -1.0]], "advantages": [[2.0, 2.0]]}
    mask = np.ones((1, 2), bool)
    batch = RowBatch(None, mask, mask, streams={k: np.array(v, np.float32) for k, v in streams.items()})

    def loss(logprobs):
        return token_loss(name, {}).loss(TokenScores(logprobs, logprobs), batch)[0]

    value, slope = jax.value_and_grad(loss)(np.full((1, 2), -1.0, np.float32))
    at_one = {"importance_sampling": -2.0, "ppo": -2.0, "cispo": 2.0, "dro": 2.0}
    assert value == pytest.approx(at_one[name])
    np.testing.assert_allclose(slope, [[0, -2]], rtol=1e-6)


def test_rows_have_few_shapes_and_lose_no_token():
    rng = np.random.default_rng(0)
    data = [Datum([7] * n, [8] * n) for n in rng.integers(1, 200, 300)]
    with jax.set_mesh(jax.sharding.get_mesh()):
        parts = list(parts_of_data(data, 1, 200))
    assert sorted(i for indices, _ in parts for i in indices) == list(range(300))
    shapes = {rows.tokens.shape for _, rows in parts}
    assert {width for _, width in shapes} == {16, 32, 64, 128, 200} and len(shapes) <= 10
    assert sum(int(rows.token_mask.sum()) for _, rows in parts) == sum(len(datum.tokens) for datum in data)


# ---- gradients and updates


def test_log_probabilities_are_those_of_the_policy(trainer, client):
    client.forward_backward(DATA)
    client.optim_step(learning_rate=0.1)
    found = client.forward(DATA)
    sequences = [[*datum.tokens, datum.targets[-1]] for datum in DATA]
    tokens = np.array([ids + [0] * (13 - len(ids)) for ids in sequences], np.int32)
    mask = np.arange(13) < np.array([[len(ids)] for ids in sequences])
    with trainer.on_mesh():
        params = acting_params(client.frozen, client.params, client.lora)
        wanted = jax.jit(partial(token_logprobs, cfg=trainer.cfg))(params, tokens, mask)
    for logprobs, want in zip(found.logprobs, wanted):
        np.testing.assert_allclose(logprobs, want[1 : len(logprobs) + 1], atol=2e-5)
    weights = [datum.weights or [1] * len(datum.tokens) for datum in DATA]
    total = -sum(w * p for ws, ps in zip(weights, found.logprobs) for w, p in zip(ws, ps))
    assert found.loss == pytest.approx(total, rel=1e-6)
    sequence = [*DATA[1].tokens, 12]
    assert client.logprobs([sequence, [5]]) == [[None, *found.logprobs[1]], [None]]


def test_gradients_add_up_over_calls_and_an_update_is_adamw(client):
    client.forward_backward(DATA)
    together = flat(client._grads)
    client._grads = None
    for datum in DATA:
        client.forward_backward([datum])
    np.testing.assert_allclose(flat(client._grads), together, atol=1e-5)

    # two updates of float64: clipping, Adam, then decoupled decay of matrices
    p, m, v = flat(client.params), 0.0, 0.0
    for t in (1, 2):
        client.forward_backward(DATA) if t == 2 else None
        g = flat(client._grads)
        norm = np.sqrt((g**2).sum())
        found = client.optim_step(0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=1.0)
        g = g / norm
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        p = p - 0.01 * (m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-6) + 0.1 * p)
        assert norm > 1 and found["train/grad_norm"] == pytest.approx(norm, rel=1e-5) and not found["train/skipped"]
        np.testing.assert_allclose(flat(client.params), p, atol=2e-6)
    assert client.step == 2


def test_adapters_share_the_base_and_nothing_else(trainer, client):
    other = trainer.adapter(rank=2, seed=4)
    assert client.frozen is other.frozen
    before, same = flat(other.params), flat(client.params)
    snapshot = client.snapshot()
    client.forward_backward(DATA)
    with pytest.raises(ValueError, match="there are no gradients: call forward_backward before optim_step"):
        other.optim_step()
    with pytest.raises(ValueError, match="learning_rate=nan"):
        client.optim_step(learning_rate=NAN)
    client.optim_step(learning_rate=0.1)
    np.testing.assert_array_equal(flat(other.params), before)
    assert np.abs(flat(client.params) - same).max() > 0.05
    np.testing.assert_array_equal(flat(snapshot.params), same)
    other.close()
    with pytest.raises(ValueError, match="this client was closed"):
        other.forward(DATA)


# ---- samples


def test_samples_are_those_of_the_weights_now(trainer, client):
    settings = {"max_tokens": 6, "seed": 5, "temperature": 1.0}
    first = client.sample([[5, 6], [7]], 2, settings)
    assert [(one.prompt, one.generation) for one in first] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert client.sample([[5, 6], [7]], 2, settings) == first
    assert [one.tokens for one in client.sample([[7]], 2, settings)] == [one.tokens for one in first[2:]]
    for one in first:
        prompt = [[5, 6], [7]][one.prompt]
        scored = client.logprobs([prompt + one.tokens])[0][len(prompt) :]
        np.testing.assert_allclose(one.logprobs, scored, atol=2e-5)

    snapshot = client.snapshot()
    client.forward_backward([Datum([5, 6, 7], [6, 7, 9])])
    client.optim_step(learning_rate=0.5)
    now = client.sample([[5, 6]], 1, settings)[0]
    np.testing.assert_allclose(now.logprobs, client.logprobs([[5, 6, *now.tokens]])[0][2:], atol=2e-5)
    assert now.logprobs != first[0].logprobs
    assert snapshot.sample([[5, 6], [7]], 2, settings) == first


# ---- checkpoints


def test_a_loaded_client_goes_on_as_if_nothing_had_happened(trainer, client, tmp_path):
    client.forward_backward(DATA)
    client.optim_step(0.1)
    client.save(tmp_path / "all")
    client.save(tmp_path / "weights", optimizer=False)
    client.forward_backward(DATA)
    client.optim_step(0.1)

    other = trainer.adapter(rank=2, seed=9)
    assert other.load(tmp_path / "all") == 1
    other.forward_backward(DATA)
    other.optim_step(0.1)
    np.testing.assert_array_equal(flat(other.state), flat(client.state))

    for folder, how, words in [
        ("weights", {}, "was saved without its optimizer; load it with optimizer=False"),
        ("none", {}, "holds nothing that a client of a Trainer has saved"),
    ]:
        with pytest.raises(ValueError, match=words):
            other.load(tmp_path / folder, **how)
    with pytest.raises(ValueError, match="rank is 2 there and 3 here"):
        trainer.adapter(rank=3).load(tmp_path / "all")
    with pytest.raises(ValueError, match="holds step 1 already"):
        other.load(tmp_path / "weights", optimizer=False)
        other.save(tmp_path / "all")

    (tmp_path / "all" / "trainer.json").write_text(json.dumps({"rank": 2}))
    with pytest.raises(ValueError, match="trainer.json is damaged"):
        other.load(tmp_path / "all")


# ---- bad input

NAN = float("nan")


@pytest.mark.parametrize(
    ("datum", "loss", "settings", "words"),
    [
        (Datum([5, 6], [6]), "cross_entropy", {}, r"datum 1: targets has shape \[1\] for 2 tokens"),
        (Datum([5], [5], advantages=[NAN], logprobs=[0]), "ppo", {}, r"datum 1: advantages\[0\] is nan"),
        (Datum([5], [5], advantages=[1]), "ppo", {}, "datum 1: logprobs is missing; this loss needs it"),
        (Datum([5], [5]), "grpoo", {}, "loss='grpoo'; a Datum is for one of cross_entropy, importance_sampling, ppo"),
        (Datum([5], [5]), "ppo", {"clip": 1}, "settings: ppo has no 'clip'; it has clip_low_threshold"),
        (Datum([5], [5]), "ppo", {"clip_low_threshold": 2}, "these are bounds of a ratio"),
    ],
)
def test_bad_data_is_refused_before_anything_is_added(client, datum, loss, settings, words):
    good = Datum([5], [6], logprobs=[-1.0], advantages=[1.0])
    with pytest.raises(ValueError, match=words):
        client.forward_backward([good, datum], loss, settings)
    assert client._grads is None


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        ([], {}, "there are no prompts"),
        ([[5] * 64], {}, "prompt 0: 64 tokens; there is room for 1 to 63"),
        ([[512]], {}, r"prompt 0\[0\] is 512"),
        ([[5]], {"max_token": 3}, "settings: there is no 'max_token'"),
    ],
)
def test_bad_samples_are_refused(client, prompts, settings, words):
    with pytest.raises(ValueError, match=words):
        client.sample(prompts, 1, settings)


@pytest.mark.wide
def test_a_mesh_changes_no_number(trainer, client):
    with tunix_lite.Trainer(*TINY, "model.mesh_shape=[[2,2],[fsdp,tp]]", "model.architecture.num_kv_heads=1") as wide:
        other = wide.adapter(rank=2, seed=3)
        for loss in ("cross_entropy", "ppo"):
            data = DATA if loss == "cross_entropy" else DATA[1:2] * 3
            here, there = client.forward_backward(data, loss), other.forward_backward(data, loss)
            assert there.loss == pytest.approx(here.loss, rel=1e-5)
            client.optim_step(0.01), other.optim_step(0.01)
        np.testing.assert_allclose(flat(other.params), flat(client.params), atol=1e-4)
        settings = {"max_tokens": 6, "seed": 5}
        here, there = client.sample([[5, 6], [7]], 2, settings), other.sample([[5, 6], [7]], 2, settings)
        assert [one.tokens for one in there] == [one.tokens for one in here]


def test_the_example_of_grpo_runs_with_the_rate_of_the_settings(tmp_path, monkeypatch, capsys):
    """Its own settings say learning_rate=auto, and the trainer's have the number."""
    monkeypatch.chdir(tmp_path)
    sizes = ["algorithm.num_generations=2", "training.prompts_per_step=2", "training.max_steps=1"]
    lengths = ["generation.max_prompt_length=32", "generation.max_new_tokens=4"]
    monkeypatch.setattr(sys, "argv", ["trainer_grpo.py", *TINY, ONE, *sizes, *lengths])
    runpy.run_path(str(ROOT / "examples" / "trainer_grpo.py"))
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["step"] == 1 and (tmp_path / "outputs" / "trainer_grpo" / "1").is_dir()
