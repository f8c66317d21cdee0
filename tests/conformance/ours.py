"""Our algorithms on the fixtures: `batch_of` with stand-ins for policy and task, then `loss`.

Imports jax and the algorithms. Arrays are float32, as in a run; what is compared is compared within
TOLERANCE of the float64 reference.
"""

import functools
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from collecting import as_rows, collect

from conformance.fixtures import FIXTURES, Fixture
from conformance.formulas import OTHER_LOGITS, value_and_gradient
from conformance.rows import LONGEST, Variant
from tunix_lite.algorithms.algorithm import Algorithm, Policy, TeacherComparison
from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.types import Batch, Graded, Rollout, RowBatch, TokenScores
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models.divergence import Kind, head_divergence
from tunix_lite.models.vocabulary import head_spec
from tunix_lite.parallel.mesh import make_mesh
from tunix_lite.settings.config import build

# relative; float32 has 24 bits, and an exponential of 18 keeps 19 of them
TOLERANCE = 1e-4
# beside it, of values that cancel to nothing
SMALL = 1e-6
# stands where no token is: it must never matter
NOTHING = 1e30


def algorithm_of(settings: Mapping[str, Any], fixture: Fixture) -> Algorithm:
    """The algorithm of these settings for groups as large as the fixture's. Raises ConfigError."""

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        return fixture.max_length if value == LONGEST else value

    values = filled(dict(settings))
    if not values["_target_"].endswith("SFT"):
        values = {"num_generations": fixture.rewards.shape[1]} | values
    return build(Any, values)


def collected(algorithm: Algorithm, fixture: Fixture, sampled: str = "old") -> Batch:
    """What `batch_of` makes of the fixture's completions; a prompt of one token is before each.

    sampled: which of the fixture's log-probabilities the sampler gave, `old` or `sampler`.
    """
    mask = _with_prompt(fixture.mask, False)
    tokens = np.ones(mask.shape, np.int32)
    token_mask = _with_prompt(fixture.mask, True)
    finish = np.ones(len(mask), np.int8)

    def logprobs(name: str) -> np.ndarray:
        values = _with_prompt(getattr(fixture, f"{name}_logprobs"), NOTHING)
        return np.where(mask, values, NOTHING).astype(np.float32)

    rollout = Rollout(tokens, token_mask, mask, logprobs("sampler"), finish, logprobs(sampled), metrics={})
    # What the rewards gave.
    rewards = fixture.rewards.reshape(-1)
    texts = [""] * len(mask)
    first, second = fixture.components.reshape(2, -1)
    graded = Graded(
        texts,
        texts,
        rewards,
        rewards > 0.5,
        texts,
        {},
        np.isnan(rewards),
        each={"first": first, "second": second},
        weights={"first": 1.0, "second": 1.0},
    )

    # What else is asked of a policy, answered from the fixture. Preferences are scored under the
    # weights of now, a sampler is checked against the trainer when it sampled.
    today = np.where(mask, _with_prompt(fixture.logprobs, 0), 0).astype(np.float32)
    is_preference = not hasattr(algorithm, "advantages")
    rescored = today if is_preference else np.where(mask, logprobs("old"), 0)
    policy = Policy(
        generate=lambda *_, **__: rollout,
        scores=None,
        scorers={name: lambda batch: logprobs("ref") for name in ("reference", "teacher")},
        rescore=lambda params, batch: rescored,
    )
    # And what of a task.
    grader = SimpleNamespace(submit=None, results=lambda rollout: graded)
    counted = _with_prompt(fixture.counted, False)
    task = SimpleNamespace(
        long_prompts="error",
        prompts=lambda examples: None,
        partner=lambda *_: None,
        grader=lambda examples, G: grader,
        demonstrations=lambda examples: (tokens, token_mask, counted),
        segments=lambda examples: None,
    )
    examples = [{} for _ in fixture.rewards]
    batch, _, _ = collect(algorithm, policy, task, None, examples, jax.random.key(0))
    return batch


def _with_prompt(x_BT: np.ndarray, value: Any) -> np.ndarray:
    """[B, T] -> [B, 1 + T], a column before it."""
    return np.concatenate([np.full((len(x_BT), 1), value), x_BT], axis=1)


def in_rows(
    algorithm: Algorithm, batch: Batch, fixture: Fixture, layout: RowLayout, num_micro_batches: int = 1
) -> tuple[float, np.ndarray]:
    """The loss of a batch and its gradient by the log-probabilities [B, T], laid out in rows on the
    current mesh, micro-batch by micro-batch."""
    from tunix_lite.learner.micro_batches import cut

    # every value goes where its token goes
    rows, packed = layout.lay_out(batch)
    logprobs = np.nan_to_num(_with_prompt(fixture.logprobs, 0)).astype(np.float32)
    here = packed.place(logprobs)

    @jax.jit
    def of_rows(here: jax.Array, rows: RowBatch) -> tuple[jax.Array, jax.Array]:
        def loss(here: jax.Array) -> jax.Array:
            streams = rows.streams | {"here": here}
            parts = cut(rows.replace(max_micro_batches=num_micro_batches, streams=streams))
            total = 0.0
            for i in range(num_micro_batches):
                row = jax.tree.map(lambda x, i=i: x[i], parts)
                part = row.streams["here"]
                scores = TokenScores(jnp.where(row.loss_weight != 0, part, 0), 0 * part)
                total += algorithm.loss(scores, row)[0]
            return total

        return jax.value_and_grad(loss)(here)

    value, gradient = of_rows(jnp.asarray(here), rows)
    return float(value), packed.back(np.asarray(gradient))[:, 1:]


def differs(variant: Variant) -> dict[str, str]:
    """By fixture, how the numbers of our settings differ from the variant's; "" if they do not."""
    fixtures = {f.name: f for f in FIXTURES.values() if f.is_binary or not variant.binary}
    try:
        settings = json.dumps(variant.ours, sort_keys=True)
        found = _unpacked(settings, variant.sampled, tuple(fixtures))
    except (ConfigError, ValueError) as error:
        return dict.fromkeys(fixtures, str(error))
    return {
        name: difference(fixture, found[name], value_and_gradient(variant.loss, fixture), variant.gradient_only)
        for name, fixture in fixtures.items()
    }


@functools.cache
def _unpacked(settings: str, sampled: str, names: tuple[str, ...]) -> dict[str, tuple[float, np.ndarray]]:
    """Loss and gradient of settings, as JSON, on fixtures, where the rows are the sequences; all
    fixtures at once, padded to one shape, and nothing is compiled."""
    made = list(FIXTURES.values())
    widest = max(f.mask.shape[0] for f in made)
    longest = max(f.mask.shape[1] for f in made) + 1

    def padded(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)
        return np.pad(x, [(0, widest - x.shape[0]), (0, longest - x.shape[1])])

    rows = []
    for fixture in made:
        chosen = fixture if fixture.name in names else FIXTURES["binary"]
        batch = collected(algorithm_of(json.loads(settings), chosen), chosen, sampled)
        here = np.nan_to_num(_with_prompt(chosen.logprobs, 0)).astype(np.float32)
        ref = _with_prompt(chosen.array("ref_logprobs"), 0).astype(np.float32)
        row = jax.tree.map(padded, as_rows(batch))
        rows.append((padded(here), padded(ref), row))
    stacked = jax.tree.map(lambda *arrays: jnp.asarray(np.stack(arrays)), *rows)
    # groups of another size are another algorithm, with the same loss
    algorithm = algorithm_of(json.loads(settings), made[0])

    def losses(here: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = _scores(algorithm, here, stacked[1])
        each = jax.vmap(lambda one, row: algorithm.loss(one, row)[0])(scores, stacked[2])
        # no fixture depends on another's log-probabilities
        return jnp.sum(each), each

    # all fixtures in one pass
    with jax.set_mesh(make_mesh(((1, 1), ("fsdp", "tp")), jax.devices()[:1])):
        gradients, values = jax.grad(losses, has_aux=True)(stacked[0])
    # without the padding
    found = {}
    for fixture, value, gradient in zip(made, np.asarray(values), np.asarray(gradients)):
        B, T = fixture.mask.shape
        if fixture.name in names:
            found[fixture.name] = float(value), gradient[:B, 1 : 1 + T]
    return found


def _scores(algorithm: Algorithm, here: jax.Array, ref: jax.Array) -> TokenScores:
    """What a policy gives of log-probabilities [F, B, T], and of those of a teacher.

    What depends on a whole distribution is that of four tokens, formulas.OTHER_LOGITS.
    """
    others = [jnp.full_like(here, x) for x in OTHER_LOGITS]
    logs = jax.nn.log_softmax(jnp.stack([here, *others], axis=-1))
    entropy = -jnp.sum(jnp.exp(logs) * logs, axis=-1)
    comparison = getattr(algorithm, "comparison", None)
    if comparison is None:
        return TokenScores(here, entropy)
    apart = _divergence(comparison, *(x.reshape(-1, x.shape[-1]) for x in (here, ref)))
    return TokenScores(here, entropy, divergence=apart.reshape(here.shape))


def _divergence(comparison: TeacherComparison, here: jax.Array, ref: jax.Array) -> jax.Array:
    """[B, T], by the program of a run: hidden states (lp, 1) and a table give the four logits."""
    table = jnp.array([[1.0, 0.0], *([0.0, x] for x in OTHER_LOGITS)])
    spec = head_spec(len(table), None, 1.0)
    kind = Kind(comparison.divergence, comparison.mix)

    @jax.jit
    def apart(here: jax.Array, ref: jax.Array) -> jax.Array:
        ours, theirs = (jnp.stack([x, jnp.ones_like(x)], axis=-1) for x in (here, ref))
        return head_divergence(kind, spec, ours, table, spec, theirs, table)

    return apart(here, ref)


def difference(
    fixture: Fixture, ours: tuple[float, np.ndarray], theirs: tuple[float, np.ndarray], gradient_only: bool = False
) -> str:
    """In words, "" where value and gradient are equal within TOLERANCE."""
    # a ratio of 1e8 times what cancels to nothing leaves its rounding
    ratio = np.exp(np.abs(fixture.array("logprobs") - fixture.array("old_logprobs")))
    allowed = TOLERANCE * np.abs(theirs[1]) + SMALL * ratio
    away = np.abs(ours[1] - theirs[1])
    if not (away <= allowed).all():
        return f"the gradient differs by up to {np.nanmax(away):.1e}"
    # a value is a sum of terms that may cancel; its gradient shows how large they are
    scale = SMALL + TOLERANCE * (abs(theirs[0]) + np.abs(theirs[1]).sum())
    if not gradient_only and not abs(ours[0] - theirs[0]) <= scale:
        return f"the value differs: {ours[0]:g} against {theirs[0]:g}"
    return ""
