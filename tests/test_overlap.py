"""Rollouts that overlap with learning: what goes on over an update, what an update takes, what is remembered."""

import itertools
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import overlap_worker
import pytest
from conftest import EOS, NEW, PROMPT, ragged_prompts, random_params, set_mesh
from test_conversations import Numbers as Answers

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.sequences import sequence_sum
from tunix_lite.algorithms.weighting import per_sequence
from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.types import Conversation, Rollout, RowBatch, SampledTurn, TokenScores, TrainState, TurnReply
from tunix_lite.learner.policy import token_logprobs
from tunix_lite.models import decoder
from tunix_lite.models.lora import LoraConfig, acting_params, adapter_weights
from tunix_lite.models.weights import init_params
from tunix_lite.parallel.mesh import make_mesh, put, split_devices
from tunix_lite.rollout import engine
from tunix_lite.rollout.generate import make_generate, make_sampler
from tunix_lite.rollout.partial import OpenCompletion, PartialSampler, rollout_of
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.runs.in_flight import InFlight, RolloutInFlight, in_flight_from
from tunix_lite.runs.overlap import OneStepOffPolicy, PartialRollouts, groups_to_take
from tunix_lite.runs.separate_sampling import SeparateSampling, shardings_on
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.processes import SharedError
from tunix_lite.tracking.checkpoint import Checkpoints

WIDE = pytest.mark.wide


@pytest.fixture(scope="module")
def cfg(cfg):
    """Two layers, local and global."""
    return replace(cfg, num_layers=2)


GROUPS = 4
GENERATIONS = 2
KEY = jax.random.key(3)


def of_cfg(make, cfg, slots=4, chunk=4, **changes):
    generation = GenerationConfig(PROMPT, NEW, **changes)
    return make(cfg, generation, EOS, 0, rollout=RolloutConfig(num_slots=slots, chunk=chunk))


def begun(step=0):
    return [OpenCompletion(step, p, g) for p in range(GROUPS) for g in range(GENERATIONS)]


def asked(steps=(0,)):
    return {(step, p): prompt for step in steps for p, prompt in enumerate(ragged_prompts(GROUPS))}


def after_chunks(count):
    """Enough is there once so many chunks were read; `is_enough` is asked once before the first one."""
    asked_before = iter([*[False] * count, *[True] * 99])
    return lambda ended: next(asked_before)


def carried_on(sampler, params, completions, chunks):
    """What two rollouts with the same weights come to, the first of which ends after some chunks."""
    usual = (GROUPS, GENERATIONS)
    first, metrics = sampler.go_on(params, completions, asked(), KEY, 0, after_chunks(chunks), usual)
    assert sum(one.is_under_way for one in first) >= 2
    assert metrics["rollout/carried"] == 0
    return first, *sampler.go_on(params, first, asked(), KEY, 1, lambda ended: ended.all(), usual)


@pytest.mark.parametrize(
    "mesh, widths",
    [((1, 1), engine.APPEND_WIDTHS), ((1, 1), (2, 4, 8)), pytest.param((2, 2), engine.APPEND_WIDTHS, marks=WIDE)],
    ids=["whole", "in pieces", "divided"],
)
def test_a_completion_that_goes_on_draws_what_it_would_have_drawn(cfg, mesh, widths, monkeypatch):
    """The weights do not change here, so the update in between must change nothing."""
    monkeypatch.setattr(engine, "APPEND_WIDTHS", widths)
    set_mesh(*mesh)
    params = random_params(cfg)
    generate = of_cfg(make_generate, cfg)
    whole = generate(params, ragged_prompts(GROUPS), jax.random.fold_in(KEY, 0), GENERATIONS)
    first, after, metrics = carried_on(PartialSampler(of_cfg(make_sampler, cfg)), params, begun(), chunks=3)
    found = rollout_of(after, ragged_prompts(GROUPS), GenerationConfig(PROMPT, NEW), 0, {})
    for name in ("tokens", "finish"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
    np.testing.assert_allclose(found.logprobs, whole.logprobs, atol=1e-5)

    # what was drawn before the update has version 0, what was drawn after it version 1
    for one, then in zip(after, first):
        drawn = len(then.tokens)
        assert one.versions == (0,) * drawn + (1,) * (len(one.tokens) - drawn)
    carried = [one for one in first if one.is_under_way]
    assert metrics["rollout/carried"] == len(carried)
    assert metrics["rollout/reread_tokens"] == sum(len(one.tokens) for one in carried)


# ---- which groups an update takes


def test_an_update_takes_the_oldest_groups_and_waits_for_those_that_would_become_too_old():
    # two an update, none older than one rollout: the two of rollout 3 must be in what rollout 4 takes
    began = [3, 4, 3, 4]
    assert groups_to_take(began, [True, True, False, True], 2, now=4, staleness=1) is None
    assert groups_to_take(began, [True, True, True, False], 2, now=4, staleness=1) == [0, 2]
    # with two rollouts' time none has to be waited for
    assert groups_to_take(began, [True, True, False, True], 2, now=4, staleness=2) == [0, 1]
    assert groups_to_take(began, [True, False, False, False], 2, now=4, staleness=2) is None


@pytest.mark.parametrize("staleness", range(4))
def test_no_group_becomes_too_old_whatever_ends_first(staleness):
    """As long as P * (staleness + 1) are in flight at most; what has not begun has no age."""
    rng = np.random.default_rng(staleness)
    count = 3
    began: list[int | None] = []
    for now in range(60):
        began += [None] * (count * (staleness + 1) - len(began))
        oldest = [now if one is None else one for one in began]
        assert max(now - one for one in oldest) <= staleness
        # groups end one by one, in any order, until there are enough
        is_whole = np.zeros(len(began), bool)
        for ends in rng.permutation(len(began)):
            is_whole[ends] = True
            if (taken := groups_to_take(oldest, is_whole, count, now, staleness)) is not None:
                break
        assert len(taken) == count and is_whole[taken].all()
        # of the others, some have begun meanwhile
        began = [now if one is None and rng.random() < 0.5 else one for i, one in enumerate(began) if i not in taken]


# ---- a run's rollouts, with other weights in each


class Grades(overlap_worker.Grades):
    """A grader that compares what it got with what is to be graded: each completion, or its last turn, once."""

    def __init__(self):
        self.rows = {}

    def submit(self, row, tokens):
        assert row not in self.rows, "a completion is graded once"
        self.rows[row] = list(tokens)

    def results(self, rollout):
        for row, mask in enumerate(rollout.completion_mask):
            if rollout.conversations is not None:
                mask = rollout.turn_ids[row] == len(rollout.conversations[row].turns)
            assert self.rows[row] == rollout.tokens[row][mask].tolist()
        return super().results(rollout)


class Numbers(overlap_worker.Numbers):
    """The same with a grader; every step has prompts of its own."""

    def prompts(self, examples):
        return [ragged_prompts(9, seed=example["n"])[example["n"] % 9] for example in examples]

    def grader(self, examples, num_generations=1):
        return Grades()


def session_of(overlap, staleness):
    rollout = RolloutConfig(num_slots=4, chunk=4, overlap=overlap, max_staleness=staleness)
    return overlap_worker.session_of(rollout, Numbers(), GenerationConfig(PROMPT, NEW))


def carry_of(cfg, staleness, start=None, sampler=None):
    session = session_of("carry", staleness)
    sampler = sampler or PartialSampler(of_cfg(make_sampler, cfg))
    return PartialRollouts(session, sampler, start or InFlight([], 0))


@cache
def generate_of(cfg):
    return of_cfg(make_generate, cfg)


def one_step_of(cfg, staleness, start=None, sampler=None, apart=None):
    session = session_of("one_step", staleness)
    return OneStepOffPolicy(session, generate_of(cfg), start or InFlight([], 0), apart)


def without_clock(arrays: dict) -> dict:
    return {name: value for name, value in arrays.items() if name != "seconds"}


def drawn(overlap, step, cfg, params=None, updated=None):
    """(rollout, numbers of its examples) of a step, in which the weights are those of seed `step`, or these, of which
    the update takes `updated`."""
    params = random_params(cfg, seed=step) if params is None else params
    examples, groups = overlap.draw(step, params)
    # the update takes the weights away
    jax.tree.map(lambda x: x.delete(), params if updated is None else updated)
    beside = overlap.beside_update()
    assert (beside.get("time/rollout_beside_update", 0) > 0) == isinstance(overlap, OneStepOffPolicy)
    assert overlap.beside_update() == {}
    return groups.rollout, [example["n"] for example in examples]


def same(ours, theirs):
    for name in ("tokens", "completion_mask", "logprobs", "full_logprobs", "versions", "finish"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    clock = ("time/", "perf/")
    for name in ours.metrics:
        assert name.startswith(clock) or ours.metrics[name] == theirs.metrics[name], name


KINDS = {"carry": (carry_of, 2), "one_step": (one_step_of, 1)}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_of_the_version_that_they_name_and_a_resumed_run_draws_the_same(cfg, kind):
    make, staleness = KINDS[kind]
    sampler = PartialSampler(of_cfg(make_sampler, cfg))
    overlap = make(cfg, staleness, sampler=sampler)
    found = []
    kept = {}
    for step in range(5):
        found.append(drawn(overlap, step, cfg))
        kept[step + 1] = overlap.at(step + 1)

    # Each log-probability is what the weights of its version give the token.
    score = jax.jit(partial(token_logprobs, cfg=cfg))
    seen = set()
    for step, (rollout, _) in enumerate(found):
        for version in range(step + 1):
            here = rollout.versions == version
            seen |= {step - version} if here.any() else set()
            scored = score(random_params(cfg, seed=version), rollout.tokens, rollout.token_mask)
            np.testing.assert_allclose(np.asarray(scored)[here], rollout.logprobs[here], atol=1e-4)
        np.testing.assert_array_equal(rollout.versions >= 0, rollout.completion_mask)
        assert rollout.metrics["rollout/staleness_max"] <= staleness
    assert 0 < max(seen) <= staleness
    if kind == "carry":
        assert any(len({*row[row >= 0]}) > 1 for rollout, _ in found for row in rollout.versions)

    # No example is learned from twice, and none is forgotten.
    learned = [n for _, examples in found for n in examples]
    assert len({*learned}) == len(learned) == 15
    assert {*range(9)} <= {*learned}

    # From what a checkpoint holds the run goes on as if it had not stopped.
    resumed = make(cfg, staleness, in_flight_from(kept[2]), sampler)
    for step in range(2, 4):
        rollout, examples = drawn(resumed, step, cfg)
        assert examples == found[step][1]
        same(rollout, found[step][0])
        np.testing.assert_equal(without_clock(resumed.at(step + 1)), without_clock(kept[step + 1]))
    # A save while the next rollout is under way is of the state before it.
    np.testing.assert_equal(without_clock(resumed.at(3)), without_clock(kept[3]))


def test_without_staleness_carry_is_bit_equal_to_a_rollout_by_itself(cfg):
    generate = of_cfg(make_generate, cfg)
    overlap = carry_of(cfg, staleness=0)
    for step in range(2):
        rollout, examples = drawn(overlap, step, cfg)
        prompts = Numbers().prompts([{"n": n} for n in examples])
        key = jax.random.fold_in(jax.random.key(5), step)
        whole = generate(random_params(cfg, seed=step), prompts, key, GENERATIONS)
        assert rollout.metrics.keys() == whole.metrics.keys()
        same(rollout.replace(versions=None), whole)


# ---- conversations


class Talks(Numbers):
    """The same with an environment, which answers `delay` polls after a turn."""

    delay = 0

    def partner(self, examples, num_generations=1):
        return Answers(delay=self.delay, max_turns=3, max_turn_tokens=5)


def one_step_of_talks(cfg, start=None, delay=0):
    session = session_of("one_step", 1)
    session.task = Talks(delay=delay)
    return OneStepOffPolicy(session, generate_of(cfg), start or InFlight([], 0))


def test_conversations_are_sampled_a_step_ahead_and_a_resumed_run_has_the_same(cfg):
    generate = of_cfg(make_generate, cfg)
    overlap = one_step_of_talks(cfg)
    found = []
    kept = {}
    for step in range(4):
        found.append(drawn(overlap, step, cfg))
        kept[step + 1] = overlap.at(step + 1)

    # Each is the rollout of the weights that it names by itself. The first update learns from its own.
    for step, (rollout, examples) in enumerate(found):
        version = max(step - 1, 0)
        prompts = Talks().prompts([{"n": n} for n in examples])
        key = jax.random.fold_in(jax.random.key(5), step)
        params = random_params(cfg, seed=version)
        whole = generate(params, prompts, key, GENERATIONS, partner=Talks().partner([]))
        np.testing.assert_array_equal(rollout.versions, np.where(rollout.completion_mask, version, -1))
        same(rollout.replace(metrics={}), whole.replace(versions=rollout.versions, metrics={}))
        np.testing.assert_array_equal(rollout.turn_ids, whole.turn_ids)
        assert list(rollout.conversations) == list(whole.conversations)
        assert max(len(one.turns) for one in rollout.conversations) > 1

    # A resumed run has the same, also where answers come later.
    resumed = one_step_of_talks(cfg, in_flight_from(kept[2]), delay=2)
    np.testing.assert_equal(resumed.at(2), kept[2])
    for step in range(2, 4):
        rollout, examples = drawn(resumed, step, cfg)
        assert examples == found[step][1]
        same(rollout, found[step][0])
        assert list(rollout.conversations) == list(found[step][0].conversations)
    np.testing.assert_equal(without_clock(resumed.at(4)), without_clock(kept[4]))


def test_an_environment_that_fails_beside_an_update_fails_the_step_that_needs_it(cfg):
    class Fails(Answers):
        def replies(self, wait, patience=0.0):
            raise SharedError("the environment is gone")

    overlap = one_step_of_talks(cfg)
    drawn(overlap, 0, cfg)
    overlap._session.task.partner = lambda *_: Fails(max_turns=3, max_turn_tokens=5)
    params = random_params(cfg)
    _, groups = overlap.draw(1, params)
    assert groups.rollout.completion_mask.any()
    # The update is made, and the state after it can be saved: nothing is in flight.
    assert overlap.beside_update() == {}
    assert in_flight_from(overlap.at(2)).completions == []
    with pytest.raises(SharedError, match="the environment is gone"):
        overlap.draw(2, params)


def test_conversations_of_a_checkpoint_are_those_that_were_kept_and_damage_is_named():
    reply = TurnReply([9, 4], False, 0.1, "higher ✓", "3", seconds=0.25, info={"won": True, "calls": 2})
    first = [SampledTurn(3, 5, reply), SampledTurn(7, 8, TurnReply(done=True, reward=1 / 3))]
    conversations = np.empty(2, object)
    conversations[:] = [Conversation(first, "done"), Conversation([SampledTurn(3, 4, TurnReply())], "turns", "guess")]
    rng = np.random.default_rng(0)
    shape = (2, 9)
    rollout = Rollout(
        tokens=rng.integers(0, 30, shape, np.int32),
        token_mask=np.ones(shape, bool),
        completion_mask=rng.random(shape) < 0.5,
        logprobs=rng.random(shape, np.float32),
        full_logprobs=rng.random(shape, np.float32),
        finish=np.array([1, 0], np.int8),
        seconds=rng.random((2, 2), np.float32),
        versions=np.full(shape, 6, np.int32),
        turn_ids=np.ones(shape, np.int16),
        conversations=conversations,
    )
    arrays = RolloutInFlight(7, 6, rollout).as_arrays()
    assert all(value.dtype != object for value in arrays.values())
    found = in_flight_from(arrays)
    assert (found.step, found.version) == (7, 6) and list(found.rollout.conversations) == list(conversations)
    assert found.last_turns == [rollout.tokens[0, 7:8].tolist(), rollout.tokens[1, 3:4].tolist()]
    np.testing.assert_equal(found.as_arrays(), arrays)

    deep = {"conversations": np.frombuffer(b"[" * 100_000, np.uint8)}
    with pytest.raises(ValueError, match="`conversations` is nested too deep"):
        in_flight_from(arrays | deep)
    with pytest.raises(ValueError, match="it has"):
        in_flight_from({name: value for name, value in arrays.items() if name != "turn_ids"})


# ---- devices of their own for sampling

AXES = ("fsdp", "tp")


@pytest.mark.parametrize("learning, own", [((1, 1), (1, 1)), pytest.param((2, 1), (1, 2), marks=WIDE)], ids=str)
@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=WIDE)], ids=["full", "lora"])
def test_sampling_with_devices_of_its_own_draws_the_same(cfg, learning, own, rank):
    set_mesh(*learning)
    model = SimpleNamespace(cfg=cfg, lora=LoraConfig(rank=rank) if rank else None)
    mesh = make_mesh((own, AXES), jax.devices()[2:])
    generate = of_cfg(make_generate, cfg)
    apart = SeparateSampling(mesh, generate, shardings_on(mesh, model), has_frozen=bool(rank))
    base = random_params(cfg, seed=9)
    found = []
    for overlap in (one_step_of(cfg, 1, apart=apart), one_step_of(cfg, 1)):
        rows = []
        for step in range(3):
            if rank:
                adapters = random_adapters(cfg, model.lora, step)
                params = acting_params(base, adapters, model.lora)
            else:
                adapters = params = random_params(cfg, seed=step)
            rows.append(drawn(overlap, step, cfg, params, adapters))
        found.append(rows)
    for (ours, examples), (theirs, others) in zip(*found):
        assert examples == others
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.versions, theirs.versions)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)

    # What never changes is copied once.
    params = acting_params(base, random_adapters(cfg, model.lora, 5), model.lora) if rank else base
    first, second = (jax.tree.leaves(apart.copied(params)) for _ in range(2))
    assert all(leaf.sharding.device_set == {*mesh.devices.flat} for leaf in first)
    assert all((x is y) == bool(rank) for x, y in zip(first, second))


def random_adapters(cfg, lora, seed):
    key = jax.random.key(seed)
    return jax.tree.map(
        lambda x: jax.random.normal(jax.random.fold_in(key, x.size), x.shape),
        init_params(adapter_weights(decoder.weights(cfg), lora), key),
    )


def test_the_devices_that_sample_come_after_those_that_learn():
    devices = [SimpleNamespace(process_index=0, platform="cpu", id=i) for i in range(4)]

    def ids(learning, own):
        return [[device.id for device in part] for part in split_devices((learning, AXES), (own, AXES), devices)]

    assert ids((-1, 1), (1, 1)) == [[0, 1, 2], [3]]
    assert ids((-1, 2), (2, 1)) == [[0, 1], [2, 3]]
    assert ids((1, 1), (1, 2)) == [[0], [1, 2]]
    with pytest.raises(ValueError, match=r"takes 2, model.mesh_shape=\[\[4,1\],.* takes 4, and jax sees 4; .*count=6"):
        ids((4, 1), (2, 1))
    with pytest.raises(ValueError, match=r"takes a multiple of 2, and jax sees 4"):
        ids((-1, 2), (1, 1))
    with pytest.raises(ValueError, match="takes 4, model"):
        ids((-1, 1), (4, 1))
    devices[3].process_index = 1
    with pytest.raises(ValueError, match="over several processes"):
        ids((-1, 1), (1, 1))


# ---- settings and files

CARRY = ["rollout.overlap=carry"]


@pytest.mark.parametrize(
    "settings, message",
    [
        (["rollout.overlap=later"], "it is none, carry or one_step"),
        ([*CARRY, "algorithm=sft"], "nothing is sampled"),
        ([*CARRY, "algorithm=rloo"], "algorithm.ratio=no_ratio is right only for tokens of the current"),
        ([*CARRY, "algorithm.agreeing_groups=replace", "algorithm.max_rounds=2"], "set algorithm.agreeing_groups=drop"),
        ([*CARRY, "algorithm.updates_per_rollout=4"], "set rollout.max_staleness=4"),
        ([*CARRY, "task=guessing"], "a conversation is not carried over an update"),
        ([*CARRY, "rollout.mesh_shape=[[1,1],[fsdp,tp]]"], "is for rollout.overlap=one_step"),
        (["rollout.overlap=one_step", "rollout.mesh_shape=[[-1,1],[fsdp,tp]]"], "write the number of devices"),
        (["rollout.overlap=one_step", "rollout.mesh_shape=[[0,1],[fsdp,tp]]"], "'rollout.mesh_shape=[[4,1],[fsdp"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_in_one_line(settings, message):
    with pytest.raises(ConfigError, match="rollout") as error:
        compose(settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_checkpoint_keeps_what_is_in_flight_and_damage_is_named(tmp_path):
    begun_and_not = [
        OpenCompletion(2, 0, 0, (5, 1), (-0.1, -1.5), (-0.25, -1.5), (1, 2), "eos"),
        OpenCompletion(2, 0, 1, (7,), (-0.3,), (-0.3,), (2,)),
        OpenCompletion(3, 0, 0),
    ]
    arrays = InFlight(begun_and_not, 4).as_arrays()
    state = TrainState(put(np.int32(3)), {"w": put(np.ones(4, np.float32), "embed")}, ())
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(state, in_flight=arrays)
    checkpoints.close()
    found = InFlight.from_arrays(Checkpoints(tmp_path / "checkpoints").in_flight(3))
    assert found.next_step == 4
    np.testing.assert_equal(found.as_arrays(), arrays)
    assert [one.reason for one in found.completions] == ["eos", None, None]
    assert [one.is_under_way for one in found.completions] == [False, True, False]

    with pytest.raises(ValueError, match="it has"):
        InFlight.from_arrays({"steps": np.array([1])})
    with pytest.raises(ValueError, match="the completions in flight are damaged"):
        in_flight_from(arrays | {"reasons": np.array([99, 1, 2], np.int32)})
    (tmp_path / "checkpoints/3/in_flight.npz").write_bytes(b"PK no zip")
    with pytest.raises(ValueError, match="in_flight.npz"):
        Checkpoints(tmp_path / "checkpoints").in_flight(3)


def product_ratio(log_ratio_RW, batch):
    """A completion has one ratio, the product of its tokens' ratios: the importance weight."""
    return sequence_sum(log_ratio_RW, batch)


def test_the_expected_gradient_with_the_correction_is_that_of_the_policy_now():
    """All completions over {end, a, b} of up to three tokens, by a table of logits for each prefix. The first token was
    drawn two updates ago, the second one ago, the third now; a third of the completions began one update later."""
    rng = np.random.default_rng(0)
    prefixes = [p for n in range(3) for p in itertools.product((1, 2), repeat=n)]
    tables = rng.normal(size=(3, len(prefixes), 3))
    log_tables = tables - np.log(np.exp(tables).sum(axis=-1, keepdims=True))
    short = [(*p, 0) for p in prefixes]
    completions = short + [(*p, t) for p in prefixes if len(p) == 2 for t in (1, 2)]
    values = rng.normal(size=len(completions))

    def places(y):
        return [prefixes.index(y[:t]) for t in range(len(y))]

    for versions, share in (((0, 1, 2), 2 / 3), ((1, 2, 2), 1 / 3)):
        old = [[log_tables[v, s, t] for v, s, t in zip(versions, places(y), y)] for y in completions]
        drawn_with = np.array([np.exp(sum(row)) for row in old])
        np.testing.assert_allclose(drawn_with.sum(), 1)

        # By hand: sum over completions of p(y) A(y) d log p(y), with the policy now.
        wanted = np.zeros(log_tables[2].shape)
        for y, value in zip(completions, values):
            chance = np.exp(sum(log_tables[2, s, t] for s, t in zip(places(y), y)))
            for s, t in zip(places(y), y):
                wanted[s] += chance * value * (np.eye(3)[t] - np.exp(log_tables[2, s]))

        # By our loss: each completion once, weighted by how often it is drawn.
        mask = np.array([[t < len(y) for t in range(3)] for y in completions])
        padded = np.array([(*y, 0, 0)[:3] for y in completions])
        where = np.array([(*places(y), 0, 0)[:3] for y in completions])
        # what per_sequence gives, in float64
        weights = mask / mask.sum(axis=1, keepdims=True) * drawn_with[:, None]
        algorithm = GRPO(ratio=product_ratio, clip_low=None, clip_high=None, weighting=per_sequence)
        with jax.enable_x64(True):
            batch = RowBatch(
                tokens=jnp.asarray(padded),
                token_mask=jnp.asarray(mask),
                loss_weight=jnp.asarray(share * weights),
                advantages=jnp.asarray(np.broadcast_to(values[:, None], mask.shape)),
                old_logprobs=jnp.asarray([(*row, 0.0, 0.0)[:3] for row in old]),
            )

            def loss(table, batch=batch, where=where, padded=padded, algorithm=algorithm):
                logprobs = jax.nn.log_softmax(table)[where, padded]
                return algorithm.loss(TokenScores(logprobs, jnp.zeros_like(logprobs)), batch)[0]

            found = jax.grad(loss)(jnp.asarray(tables[2]))
        np.testing.assert_allclose(-np.asarray(found), share * wanted, atol=1e-12)
