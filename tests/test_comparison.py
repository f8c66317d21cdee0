"""Distillation by the gradient of a divergence: one number and one gradient in every layout, micro-batch and mesh.

What is right comes from the formulas of test_exactness.py, sequence by sequence, in float64: both models, all tokens.
"""

import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import set_mesh

from tunix_lite.algorithms.distill import Distill
from tunix_lite.basics.types import Batch, realigned
from tunix_lite.learner.comparison import Teacher, hidden_states, with_divergence, with_hidden_states
from tunix_lite.learner.policy import make_policy, on_every_device
from tunix_lite.models import decoder
from tunix_lite.models.source import TeacherConfig
from tunix_lite.parallel.compiling import compiled_once
from tunix_lite.planning.hardware import find_machine
from tunix_lite.planning.plan import assemble_plan
from tunix_lite.settings.compose import compose
from tunix_lite.settings.resolved_run import find_model, resolve_run

sys.path.append(str(Path(__file__).parent / "eight_devices"))  # the formulas, and an update that is divided somehow
import exactness_worker
from exactness_worker import CAPPED, MODELS, Way, random_arrays
from test_exactness import difference, expected, log_probabilities

THEIRS = replace(CAPPED, embed_dim=24, mlp_dim=16)  # another size, and its logits are capped
TEACHER = TeacherConfig("bundled")
REVERSE = Distill(TEACHER, divergence="reverse", teacher_coef=2.0)
MIXED = Distill(TEACHER, divergence="jensen_shannon", mix=0.25)


def teacher_arrays():
    return random_arrays(decoder.weights(THEIRS), 5)


def summands(algorithm: Distill, ours, theirs):
    """The divergence of each token, of log-probabilities [T, V], as the papers write it."""
    p, q = jnp.exp(ours), jnp.exp(theirs)
    if algorithm.divergence == "reverse":
        return (p * (ours - theirs)).sum(-1)
    b = algorithm.mix
    m = jnp.log(b * q + (1 - b) * p)
    return (b * q * (theirs - m) + (1 - b) * p * (ours - m)).sum(-1)


@cache
def of_the_formulas(algorithm: Distill):
    """(batch, loss, gradients) in float64; the advantages of rewards are 0."""
    batch = expected("plain").batch
    batch = Batch(
        batch.tokens, batch.token_mask, batch.loss_weight, np.zeros_like(batch.loss_weight), batch.old_logprobs
    )
    with jax.enable_x64(True), jax.set_mesh(set_mesh(1, 1)):
        trained, _ = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), MODELS["plain"].arrays())
        teacher = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), teacher_arrays())

        @jax.jit
        def of_sequence(trained, tokens, weight):
            def loss(trained):
                ours = log_probabilities(trained, tokens, MODELS["plain"].cfg, 1.0)
                theirs = log_probabilities(teacher, tokens, THEIRS, 1.0)
                return algorithm.teacher_coef * (weight * summands(algorithm, ours, theirs)).sum()

            return jax.value_and_grad(loss)(trained)

        found = []
        width = batch.tokens.shape[1]
        for b, mask in enumerate(np.asarray(batch.token_mask)):
            # what follows a token does not reach it, so all sequences share one compiled shape
            after = (0, width - mask.sum())
            weight = np.pad(np.float64(batch.loss_weight[b][mask][1:]), after)
            found.append(of_sequence(trained, np.pad(batch.tokens[b][mask], after), weight))
    losses, grads = zip(*found, strict=True)
    return batch, float(sum(losses)), jax.tree.map(lambda *xs: np.sum([np.asarray(x) for x in xs], axis=0), *grads)


def comparing(algorithm: Distill, policy, rows, batch):
    """The policy with a teacher on the current mesh, and the batch that has gone through `compare`."""
    teacher = Teacher(algorithm.comparison, THEIRS.final_softcap, THEIRS.embed_dim, MODELS["plain"].cfg.vocab_size)
    params = exactness_worker.placed(teacher_arrays(), decoder.weights(THEIRS), np.float32)
    theirs = make_policy(THEIRS, None, 1.0, rows=rows)
    table = decoder.output_table(params, THEIRS)
    program = compiled_once(on_every_device(partial(theirs.scores, head=hidden_states), rows).lower)
    scorer = partial(replace(theirs.rescore, compiled=program), params)
    policy = replace(policy, scores=with_divergence(policy.scores, teacher))
    return policy, with_hidden_states(scorer, table, batch)


WAYS = [
    pytest.param(REVERSE, Way(1, 1, 1, "none"), marks=pytest.mark.wide),
    pytest.param(REVERSE, Way(2, 2, 2, "prefix"), marks=pytest.mark.wide),
    (MIXED, Way(2, 2, 4, "sequences")),
    pytest.param(MIXED, Way(1, 1, 4, "prefix"), marks=pytest.mark.wide),
    pytest.param(REVERSE, Way(4, 1, 4, "sequences", sync_every=2), marks=pytest.mark.wide),
    pytest.param(MIXED, Way(4, 1, 2, "none"), marks=pytest.mark.wide),
]


@pytest.mark.parametrize(("algorithm", "way"), WAYS, ids=lambda x: x.divergence if isinstance(x, Distill) else str(x))
def test_a_divergence_is_the_same_in_every_layout(algorithm, way):
    batch, loss, grads = of_the_formulas(algorithm)
    devices = jax.devices()[: way.fsdp * way.tp]
    prepare = partial(comparing, algorithm)
    found = exactness_worker.update(MODELS["plain"], way, batch, devices, algorithm, prepare)
    np.testing.assert_allclose(found.metrics["train/loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(found.metrics["train/teacher_divergence"], loss / algorithm.teacher_coef, rtol=1e-5)
    assert difference(found.grads, grads) < 1e-5


def test_values_go_to_the_same_tokens_after_other_prompts():
    """By hand: two completion tokens after one token of a prompt, and after two."""
    read = Batch(np.zeros((1, 4), int), np.ones((1, 4), bool), np.array([[0, 0.5, 0.5, 0]]))
    batch = Batch(np.zeros((1, 4), int), np.ones((1, 4), bool), np.array([[0, 0, 1.0, 1.0]]))
    np.testing.assert_array_equal(realigned(np.array([[9, 1, 2, 9]]), read, batch), [[0, 0, 1, 2]])
    vectors = np.arange(8).reshape(1, 4, 2)
    np.testing.assert_array_equal(realigned(vectors, read, batch), [[[0, 0], [0, 0], [2, 3], [4, 5]]])
    with pytest.raises(ValueError, match="reads other completions"):
        realigned(vectors, read, replace(batch, loss_weight=np.array([[0, 0, 1.0, 0]])))


def test_a_plan_counts_what_is_kept_of_the_teacher():
    """By hand: 16 sequences of 80 columns on two shards, 96 float32 of each hidden state."""
    added = {}
    distilled = ["algorithm=distill", "training.prompts_per_step=4", "training.packing=none"]
    for name, more in {
        "token": [],
        "all": ["algorithm.divergence=reverse"],
    }.items():
        run = compose([*distilled, *more, "evaluation.num_examples=0"])
        resolved = resolve_run(run, *find_model(run.model), {"fsdp": 2, "tp": 1}, "cpu")
        phases = assemble_plan(find_machine("h100x2"), resolved, {}).phases
        added[name] = {phase.name: phase.adds for phase in phases}
    columns = 8 * 80
    kept = columns * 4 * 96
    assert added["all"]["update"]["batch"] - added["token"]["update"]["batch"] == kept
    # its own rows while they are made, and all rows on every device
    assert added["all"]["teacher"]["kept"] == 3 * kept
    assert added["all"]["update"]["activations"] > added["token"]["update"]["activations"]
