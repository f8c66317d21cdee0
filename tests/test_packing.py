import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunix_lite.basics.errors import ConfigError
from tunix_lite.basics.types import Batch
from tunix_lite.learner.packing import RowShape, packed, rows_needed_at_most, shared_rows_at_most, unpacked
from tunix_lite.planning.lengths import Lengths
from tunix_lite.planning.packing_choice import _computed_flops, with_packing
from tunix_lite.runs.fingerprint import check_same_run
from tunix_lite.runs.setup import _fingerprint_of, find_parts, with_packing_as_before
from tunix_lite.settings.compose import compose
from tunix_lite.settings.resolved_run import find_model, resolve_run


def batch_of(*sequences, left=0, right=0):
    """Sequences (lead, rest, which of the rest count) -> tokens, token mask and counts; leads end in one column."""
    prompts, rests = left + max(len(lead) for lead, *_ in sequences), right + max(len(rest) for _, rest, _ in sequences)
    tokens = np.full((len(sequences), prompts + rests), 99)
    mask, counts = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, bool)
    for b, (lead, rest, counted) in enumerate(sequences):
        here = slice(prompts - len(lead), prompts + len(rest))
        tokens[b, here], mask[b, here] = [*lead, *rest], True
        counts[b, prompts : prompts + len(rest)] = counted
    return tokens, mask, counts


def pack(batch, lane=8, lanes=1, lead=0, rows_per_micro_batch=1, num_micro_batches=4, shards=1):
    return packed(Batch(*batch), RowShape(lane, lanes, lead), rows_per_micro_batch, num_micro_batches, shards)


def test_two_sequences_stand_in_one_row_without_their_padding():
    batch = batch_of(([5, 6], [7, 8], [1, 1]), ([3], [4], [1]), left=1, right=1)  # columns: 1 + 2 + 2 + 1
    layout = pack(batch, num_micro_batches=2)
    nothing = [0] * 8
    np.testing.assert_array_equal(layout.source, [[1, 2, 3, 4, 8, 9, -1, -1], [-1] * 8])
    np.testing.assert_array_equal(layout.segment_ids, [[1, 1, 1, 1, 2, 2, 0, 0], nothing])
    np.testing.assert_array_equal(layout.positions, [[0, 1, 2, 3, 0, 1, 0, 0], nothing])
    np.testing.assert_array_equal(layout.scored, [[2, 3, 5, *[0] * 5], nothing])
    np.testing.assert_array_equal(layout.previous, [[1, 2, 4, *[0] * 5], nothing])
    np.testing.assert_array_equal(layout.is_scored, [[1, 1, 1, *[0] * 5], nothing])
    np.testing.assert_array_equal(layout.place(batch[0]), [[5, 6, 7, 8, 3, 4, 0, 0], nothing])
    assert layout.completion_ids is None and layout.shape == (2, 6) and layout.num_micro_batches == 1


def test_completions_of_one_prompt_stand_in_lanes_after_it():
    sequences = ([5, 6], [7, 8], [1, 1]), ([5, 6], [9], [1]), ([5, 6], [1, 2], [1, 1]), ([6], [4], [1])
    batch = batch_of(*sequences, left=1, right=1)  # columns: 1 + 2 + 2 + 1
    layout = pack(batch, lane=3, lanes=2, lead=4, num_micro_batches=1)
    # the longest first: 7 8 to the first lane, 1 2 to the second, 9 to what is left of the first; then 4
    np.testing.assert_array_equal(layout.place(batch[0]), [[5, 6, 6, 0, 7, 8, 9, 1, 2, 4]])
    np.testing.assert_array_equal(layout.source, [[1, 2, 20, -1, 3, 4, 9, 15, 16, 21]])
    np.testing.assert_array_equal(layout.segment_ids, [[1, 1, 2, 0, 1, 1, 1, 1, 1, 2]])
    np.testing.assert_array_equal(layout.completion_ids, [[0, 0, 0, 0, 1, 1, 2, 3, 3, 1]])
    np.testing.assert_array_equal(layout.positions, [[0, 1, 0, 0, 2, 3, 2, 2, 3, 1]])
    np.testing.assert_array_equal(layout.scored, [[4, 5, 6, 7, 8, 9]])
    np.testing.assert_array_equal(layout.previous, [[1, 4, 1, 1, 7, 2]])
    assert layout.is_scored.all()


def test_short_prompts_stand_in_a_narrower_prefix():
    # of 8 columns for prompts 5/8 are 5, and the next even number is 6
    shape = RowShape(3, 2, 8, narrows=True)
    assert [each.width for each in shape.prefixes] == [14, 12]
    short = batch_of(([5, 6], [7, 8], [1, 1]), ([5, 6], [9], [1]), ([3, 4, 5, 6], [1], [1]), left=4, right=1)
    layout = packed(Batch(*short), shape, 1, 1, 1)
    np.testing.assert_array_equal(layout.place(short[0]), [[5, 6, 3, 4, 5, 6, 7, 8, 9, 1, 0, 0]])
    np.testing.assert_array_equal(layout.scored, [[6, 7, 8, 9, 0, 0]])
    np.testing.assert_array_equal(layout.most_scored, [4])
    assert layout.row_shape == RowShape(3, 2, 6, narrows=True)
    # a prompt of 7 needs all columns; so do two of 4, which would take a second row
    for prompts in ([[5] * 7], [[5] * 4, [6] * 4]):
        wide = batch_of(*((prompt, [7], [1]) for prompt in prompts), left=1, right=2)
        assert packed(Batch(*wide), shape, 1, 2, 1).row_shape == shape


def test_a_group_with_more_than_the_lanes_hold_is_divided_with_its_prompt_in_each_part():
    batch = batch_of(([5, 6], [7], [1]), ([5, 6], [1, 2, 3], [1, 1, 1]), ([5, 6], [8, 9], [1, 1]))
    layout = pack(batch, lane=3, lead=2, num_micro_batches=2)  # 1 2 3 fills a lane, 7 and 8 9 another, as in the batch
    np.testing.assert_array_equal(layout.place(batch[0]), [[5, 6, 1, 2, 3], [5, 6, 7, 8, 9]])
    np.testing.assert_array_equal(layout.segment_ids, [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(layout.completion_ids, [[0, 0, 1, 1, 1], [0, 0, 1, 2, 2]])
    np.testing.assert_array_equal(layout.positions, [[0, 1, 2, 3, 4], [0, 1, 2, 2, 3]])
    np.testing.assert_array_equal(layout.scored, [[2, 3, 4], [2, 3, 4]])
    np.testing.assert_array_equal(layout.previous, [[1, 2, 3], [1, 1, 3]])
    assert layout.num_micro_batches == 2


def test_what_cannot_be_laid_out_is_said():
    fits = batch_of(([5], [1, 2, 3], [1, 1, 1]), ([6], [1, 2], [1, 1]))
    with pytest.raises(ValueError, match="sequence 0 takes 4 tokens of 4 for itself; a row has room for 3 in a lane"):
        pack(fits, lane=3)
    with pytest.raises(ValueError, match="sequence 0 takes 3 tokens of 4 .* 2 in a lane after 1 that are shared"):
        pack(fits, lane=2, lanes=4, lead=1)
    for room in ({"lane": 4}, {"lane": 3, "lead": 1}):
        with pytest.raises(ValueError, match="takes 2 rows of 4 tokens.*only 1"):
            pack(fits, **room, num_micro_batches=1)
    gap = np.array([[1, 0, 1, 1]], bool)
    with pytest.raises(ValueError, match="sequence 0 has padding between"):
        pack((np.zeros((1, 4), int), gap, gap & [0, 0, 0, 1]))


@pytest.mark.parametrize("mask, column", [([1, 1, 1], 0), ([0, 1, 1], 1), ([1, 1, 0], 2)])
def test_a_token_that_nothing_predicts_may_not_count(mask, column):
    counts = np.zeros((2, 3), bool)
    counts[1, column] = True
    mask = np.array([[1, 1, 1], mask], bool)
    for lay_out in (lambda: unpacked(Batch(mask, mask, counts)), lambda: pack((np.zeros((2, 3), int), mask, counts))):
        with pytest.raises(ValueError, match=f"sequence 1 counts column {column}"):
            lay_out()


@st.composite
def batches(draw):
    """Ragged batches whose neighbours often have the same prompt, with tokens of a few kinds so that parts look alike;
    and the columns of completions."""
    tokens = st.integers(1, 2)
    prompts = draw(st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=2))
    sequences = []
    for _ in range(draw(st.integers(1, 9))):
        rest = draw(st.lists(tokens, min_size=1, max_size=6))
        counts = draw(st.lists(st.booleans(), min_size=len(rest), max_size=len(rest)))
        sequences.append((draw(st.sampled_from(prompts)), rest, counts))
    right = draw(st.integers(0, 2))
    lane = right + max(len(rest) for _, rest, _ in sequences)
    return batch_of(*sequences, left=draw(st.integers(0, 2)), right=right), lane


@st.composite
def layouts(draw, kinds=("unpacked", "apart", "shared")):
    """A batch and a layout with as many rows as `rows_needed_at_most` asks for, or the layout without packing."""
    (tokens, mask, counts), lane = draw(batches())
    longest = int(mask.sum(axis=1).max())
    shards, rows_per_micro_batch = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(kinds))
    if kind == "unpacked":
        return (tokens, mask, counts), unpacked(Batch(tokens, mask, counts)), 1, 1
    room = {"lane": longest + draw(st.integers(0, 20))}
    if kind == "shared":
        room = {"lane": lane, "lanes": draw(st.integers(1, 4)), "lead": draw(st.integers(4, 9))}
    most = len(tokens) if kind == "shared" else rows_needed_at_most(len(tokens), longest, room["lane"])
    num_micro_batches = -(-most // (shards * rows_per_micro_batch))
    sizes = {"rows_per_micro_batch": rows_per_micro_batch, "num_micro_batches": num_micro_batches, "shards": shards}
    return (tokens, mask, counts), pack((tokens, mask, counts), **room, **sizes), shards, rows_per_micro_batch


def visible(layout, row, query):
    """Columns that a token sees, in order of their positions, by an explicit loop."""
    segments, positions = layout.segment_ids[row], layout.positions[row]
    branches = np.ones_like(segments) if layout.completion_ids is None else layout.completion_ids[row]
    seen = [
        key
        for key in range(len(segments))
        if segments[key] == segments[query] and segments[query] > 0 and branches[key] in (0, branches[query])
        if positions[key] <= positions[query]
    ]
    return sorted(seen, key=lambda key: positions[key])


@settings(deadline=None, max_examples=200)
@given(layouts())
def test_every_counted_token_stands_once_and_sees_its_own_sequence_up_to_itself(made):
    (tokens, mask, counts), layout, *_ = made
    rows, source = layout.place(tokens), layout.source
    seen = []
    scored, previous = layout.scored, layout.previous
    if scored is None:  # the last columns
        scored = np.broadcast_to(np.arange(tokens.shape[1]), rows.shape)[:, -layout.is_scored.shape[1] :]
        previous = scored - 1
    for row, nth in np.argwhere(layout.is_scored):
        column, before = scored[row, nth], previous[row, nth]
        b, t = divmod(source[row, column], tokens.shape[1])
        seen.append((b, t))
        sequence = tokens[b, : t + 1][mask[b, : t + 1]]
        columns = visible(layout, row, column)
        np.testing.assert_array_equal(rows[row, columns], sequence)
        np.testing.assert_array_equal(layout.positions[row, columns], np.arange(len(sequence)))
        # what predicts it is the last it sees; that one sees all before it, or the start of its own branch
        assert before == columns[-2] and visible(layout, row, before) == columns[:-1]
    assert sorted(seen) == [tuple(place) for place in np.argwhere(counts)]
    assert (np.diff(scored, axis=1)[layout.is_scored[:, 1:]] > 0).all()  # in order
    if layout.scored is not None:
        assert not scored[~layout.is_scored].any() and not previous[~layout.is_scored].any()
    # what is placed comes back at the tokens that count
    x_BT = np.arange(tokens.size, dtype=np.float32).reshape(tokens.shape) + 1
    np.testing.assert_array_equal(layout.back(layout.place(x_BT)), np.where(counts, x_BT, 0))


@settings(deadline=None, max_examples=100)
@given(layouts(kinds=("apart", "shared")))
def test_used_rows_are_dealt_evenly_and_stand_first(made):
    _, layout, shards, rows_per_micro_batch = made
    taken = layout.segment_ids > 0
    np.testing.assert_array_equal(taken, layout.source >= 0)
    used = taken.any(axis=1).reshape(shards, -1)
    assert (np.diff(used.astype(int), axis=1) <= 0).all()
    counts = used.sum(axis=1)
    assert counts.max() - counts.min() <= 1
    assert layout.num_micro_batches == max(1, -(-counts.max() // rows_per_micro_batch))


@settings(deadline=None, max_examples=100)
@given(batches(), st.integers(1, 3))
def test_a_lane_sees_itself_and_the_lead_in_which_a_shared_prompt_stands_once(batch, lanes):
    """Attention multiplies a lane with the lead and itself, and nothing else."""
    (tokens, mask, counts), width = batch
    layout = pack((tokens, mask, counts), lane=width, lanes=lanes, lead=6, num_micro_batches=9)
    for row, nth in np.argwhere(layout.is_scored):
        column = layout.scored[row, nth]
        lane = (column - 6) // width
        assert all(key < 6 or (key - 6) // width == lane for key in visible(layout, row, column))
    # in one row with room for all
    layout = pack((tokens, mask, counts), lane=width, lanes=9, lead=40, num_micro_batches=1)
    first = tokens.shape[1] - width
    texts = [tuple(tokens[b, :first][mask[b, :first]]) for b in np.flatnonzero(counts.any(1))]
    leads = [text for text, before in zip(texts, [None, *texts]) if text != before]
    assert layout.segment_ids.max(initial=0) == len(leads)
    assert ((layout.completion_ids == 0) & (layout.segment_ids > 0)).sum() == sum(map(len, leads))


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_groups_take_no_more_rows_than_foreseen(data):
    """Whatever counts, and though prompts begin with each other."""
    groups, size, lanes = (data.draw(st.integers(1, most)) for most in (4, 6, 6))
    sequences = []
    for _ in range(groups):
        prompt = [5, 6, 7, 8][: data.draw(st.integers(1, 4))]
        for _ in range(size):
            rest = [1] * data.draw(st.integers(1, 6))
            counts = data.draw(st.lists(st.booleans(), min_size=len(rest), max_size=len(rest)))
            sequences.append((prompt, rest, counts))
    lane = max(len(rest) for _, rest, _ in sequences)
    most = shared_rows_at_most(groups, size, lanes)
    pack(
        batch_of(*sequences), lane=lane, lanes=lanes, lead=4, num_micro_batches=most
    )  # or it would say that rows run out


def test_shared_rows_at_most_is_a_group_in_rows_of_its_own():
    assert [shared_rows_at_most(8, 8, lanes) for lanes in (1, 2, 3, 8, 9)] == [64, 32, 24, 8, 8]


# ---- training.packing=auto


WORDS = ["training.prompts_per_step=2", "algorithm.num_generations=4", "generation.max_prompt_length=8"]
WORDS += ["generation.max_new_tokens=8"]
# longer than any may be, so all have the longest length
FULL = Lengths(completions=(10**6,), mean_prompt=1e6)


def resolved(run, fsdp: int = 1):
    cfg, lora = find_model(run.model)
    return resolve_run(run, cfg, lora, {"fsdp": fsdp, "tp": 1}, "cpu")


def chosen(*words: str, lengths: Lengths | None = None):
    return with_packing(compose([*WORDS, "training.packing=auto", *words]), resolved, lengths)


def flops(cfg, tokens: int, scored: int, pairs: int) -> float:
    """2 a weight and token, and 4 a pair of query and key and element of the heads."""
    attention = 2 * cfg.embed_dim * cfg.head_dim * (cfg.num_heads + cfg.num_kv_heads)
    weights = cfg.num_layers * (attention + 3 * cfg.embed_dim * cfg.mlp_dim)
    heads = 4 * cfg.num_layers * cfg.num_heads * cfg.head_dim
    return 2 * weights * tokens + 2 * cfg.vocab_size * cfg.embed_dim * scored + heads * pairs


def test_what_rows_compute_is_counted_with_their_padding():
    run = compose(WORDS)
    plain = resolved(run.packed_as("none"))
    # 8 sequences of 8 + 8 tokens
    expected = flops(plain.cfg, 8 * 16, 8 * 8, 8 * 16**2)
    assert _computed_flops(plain, FULL) == pytest.approx(expected)
    assert _computed_flops(plain, Lengths()) == pytest.approx(expected), "padding is computed"
    shared = resolved(run.packed_as("prefix"))
    # 2 prompts of 8 tokens, each with 4 lanes of 8 that see the prompt and themselves
    lanes = 8**2 + 4 * 8 * (8 + 8)
    assert shared.rows.shape.num_lanes == 4
    assert _computed_flops(shared, FULL) == pytest.approx(flops(shared.cfg, 2 * 40, 2 * 32, 2 * lanes))


def test_the_one_that_computes_least_is_chosen_and_the_gain_is_said():
    best = chosen(lengths=FULL)
    assert best.rows.packing == "prefix" and best.run.training.packing == "prefix"
    share = _computed_flops(best, FULL) / _computed_flops(resolved(best.run.packed_as("none")), FULL)
    assert f"prefix {share:.0%}" in best.packing_reason and share < 0.7
    # prompts of half their longest leave padding in prefixes, which rows of several sequences do not have
    words = ["generation.max_prompt_length=32", "generation.max_new_tokens=64", "training.prompts_per_step=16"]
    assert chosen(*words, "algorithm.num_generations=8").rows.packing == "sequences"
    # a pair shares a short prompt, and all have the longest completion: nothing is gained
    words = ["algorithm.num_generations=2", "generation.max_prompt_length=2", "generation.max_new_tokens=64"]
    plain = chosen(*words, lengths=FULL)
    assert plain.rows.packing == "none" and "FLOPs against none: " in plain.packing_reason


def resumed(folder, training: dict, *words: str):
    """The parts of a run that goes on from a folder whose fingerprint has these settings of training."""
    (folder / "fingerprint.json").write_text(json.dumps({"model": {}, "training": training}))
    run = compose(words)
    return with_packing_as_before(run, replace(find_parts(run), resume_from=folder / "checkpoints"))


def test_a_run_that_resumes_keeps_the_packing_that_it_began_with(tmp_path):
    assert compose([]).training.packing == "auto", "the default"
    for packing in ("none", "sequences", "prefix"):
        parts = resumed(tmp_path, {"packing": packing})
        assert parts.rows.packing == parts.resolved.run.training.packing == packing
        assert parts.resolved.packing_reason == f"auto: {packing}, as in the run that goes on"
    assert resumed(tmp_path, {}, "training.packing=prefix").rows.packing == "prefix", "another by name"
    with pytest.raises(ConfigError, match="has packing=prefix, which these settings do not allow .*micro_batch_size"):
        resumed(tmp_path, {"packing": "prefix"}, "training.micro_batch_size=2")
    with pytest.raises(ConfigError, match="packing='most' is not none, sequences, prefix"):
        resumed(tmp_path, {"packing": "most"})


def test_the_fingerprint_keeps_the_packing_and_does_not_compare_it():
    parts = find_parts(compose([]))
    ours = _fingerprint_of(parts)
    assert ours["training"]["packing"] == "prefix"
    theirs = ours | {"training": ours["training"] | {"packing": "none"}}
    assert check_same_run(ours, theirs, "there", force=False) == ""
