import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunix_lite.packing import packed, rows_needed_at_most, unpacked


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


def pack(batch, width=8, rows_per_part=1, num_parts=4, shards=1, share=False, num_scored=None):
    return packed(*batch, width, rows_per_part, num_parts, shards, share, num_scored)


def test_two_sequences_stand_in_one_row_without_their_padding():
    batch = batch_of(([5, 6], [7, 8], [1, 1]), ([3], [4], [1]), left=1, right=1)  # columns: 1 + 2 + 2 + 1
    layout = pack(batch, num_parts=2)
    nothing = [0] * 8
    np.testing.assert_array_equal(layout.source, [[1, 2, 3, 4, 8, 9, -1, -1], [-1] * 8])
    np.testing.assert_array_equal(layout.segment_ids, [[1, 1, 1, 1, 2, 2, 0, 0], nothing])
    np.testing.assert_array_equal(layout.positions, [[0, 1, 2, 3, 0, 1, 0, 0], nothing])
    np.testing.assert_array_equal(layout.scored, [[2, 3, 5, 0], [0, 0, 0, 0]])  # quarters of 8 columns: 3 -> 4
    np.testing.assert_array_equal(layout.previous, [[1, 2, 4, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(layout.is_scored, [[1, 1, 1, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(layout.place(batch[0]), [[5, 6, 7, 8, 3, 4, 0, 0], nothing])
    assert layout.branches is None and layout.shape == (2, 6) and layout.num_parts == 1


def test_three_completions_of_one_prompt_follow_it_as_branches():
    batch = batch_of(([5, 6], [7, 8], [1, 1]), ([5, 6], [9], [1]), ([5, 6], [1, 2], [1, 1]), ([6], [4], [1]), left=1)
    layout = pack(batch, width=10, num_parts=1, share=True, num_scored=6)
    np.testing.assert_array_equal(layout.place(batch[0]), [[5, 6, 7, 8, 9, 1, 2, 6, 4, 0]])
    np.testing.assert_array_equal(layout.source, [[1, 2, 3, 4, 8, 13, 14, 17, 18, -1]])
    np.testing.assert_array_equal(layout.segment_ids, [[1, 1, 1, 1, 1, 1, 1, 2, 2, 0]])
    np.testing.assert_array_equal(layout.branches, [[0, 0, 1, 1, 2, 3, 3, 0, 1, 0]])
    np.testing.assert_array_equal(layout.positions, [[0, 1, 2, 3, 2, 2, 3, 0, 1, 0]])
    np.testing.assert_array_equal(layout.scored, [[2, 3, 4, 5, 6, 8]])
    np.testing.assert_array_equal(layout.previous, [[1, 2, 1, 1, 5, 7]])
    assert layout.is_scored.all()


def test_a_group_too_long_for_a_row_is_divided_with_its_prompt_in_each_part():
    batch = batch_of(([5, 6], [7], [1]), ([5, 6], [1, 2, 3], [1, 1, 1]), ([5, 6], [8, 9], [1, 1]))
    layout = pack(batch, width=6, num_parts=2, share=True)  # room for 4 after the prompt: 3 + 1, then 2
    np.testing.assert_array_equal(layout.place(batch[0]), [[5, 6, 7, 1, 2, 3], [5, 6, 8, 9, 0, 0]])
    np.testing.assert_array_equal(layout.source, [[0, 1, 2, 7, 8, 9], [10, 11, 12, 13, -1, -1]])
    np.testing.assert_array_equal(layout.segment_ids, [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(layout.branches, [[0, 0, 1, 2, 2, 2], [0, 0, 1, 1, 0, 0]])
    np.testing.assert_array_equal(layout.positions, [[0, 1, 2, 2, 3, 4], [0, 1, 2, 3, 0, 0]])
    np.testing.assert_array_equal(layout.scored, [[2, 3, 4, 5], [2, 3, 0, 0]])
    np.testing.assert_array_equal(layout.previous, [[1, 1, 3, 4], [1, 2, 0, 0]])
    assert layout.num_parts == 2


def test_only_what_a_counted_token_sees_is_kept():
    batch = batch_of(([5], [1, 2, 3, 4], [1, 0, 1, 0]), ([5], [8, 9], [0, 0]), ([5], [7], [1]))
    apart, shared = pack(batch, num_parts=1), pack(batch, num_parts=1, share=True)
    np.testing.assert_array_equal(apart.place(batch[0]), [[5, 1, 2, 3, 5, 7, 0, 0]])
    np.testing.assert_array_equal(apart.scored, [[1, 3, 5, 0]])
    np.testing.assert_array_equal(apart.previous, [[0, 2, 4, 0]])
    np.testing.assert_array_equal(shared.place(batch[0]), [[5, 1, 2, 3, 7, 0, 0, 0]])  # neighbours once 8 9 is gone
    np.testing.assert_array_equal(shared.previous, [[0, 2, 0, 0]])


def test_unpacked_leaves_every_sequence_where_it_stands():
    tokens, mask, counts = batch_of(([5, 6], [7, 8], [1, 0]), ([3], [4, 2], [1, 1]))
    layout = unpacked(mask, counts)
    np.testing.assert_array_equal(layout.source, [[0, 1, 2, 3], [4, 5, 6, 7]])
    np.testing.assert_array_equal(layout.segment_ids, [[1, 1, 1, 1], [0, 1, 1, 1]])
    np.testing.assert_array_equal(layout.positions, [[0, 1, 2, 3], [0, 0, 1, 2]])
    np.testing.assert_array_equal(layout.scored, [[2, 0], [2, 3]])
    np.testing.assert_array_equal(layout.previous, [[1, 0], [1, 2]])
    np.testing.assert_array_equal(layout.is_scored, [[1, 0], [1, 1]])
    np.testing.assert_array_equal(layout.place(tokens), tokens)


def test_fuller_rows_are_dealt_first_and_back_and_forth():
    lengths = [6, 7, 8, 9, 10]  # no two of them fit into one row
    batch = batch_of(*(([1], [1] * (n - 1), [1] * (n - 1)) for n in lengths))
    layout = pack(batch, width=10, rows_per_part=2, num_parts=3, shards=2)
    fills = (layout.segment_ids > 0).sum(axis=1).reshape(2, 3, 2)  # shards, parts, rows of a part
    # first rows: 10 and 9 to part 0, 8 to part 1 (only one shard has a third row); second rows, back: 7 and 6
    np.testing.assert_array_equal(fills, [[[10, 6], [8, 0], [0, 0]], [[9, 7], [0, 0], [0, 0]]])
    assert layout.num_parts == 2
    single = pack(batch, width=10, rows_per_part=1, num_parts=4, shards=2)  # 10 and 9, back: 8 and 7, on: 6
    np.testing.assert_array_equal((single.segment_ids > 0).sum(axis=1).reshape(2, 4), [[10, 7, 6, 0], [9, 8, 0, 0]])
    assert single.num_parts == 3


def test_a_batch_that_counts_nothing_makes_empty_rows():
    layout = pack(batch_of(([5], [7], [0]), ([5], [7], [0])), width=4, num_parts=2, share=True)
    assert layout.num_parts == 1 and not layout.segment_ids.any() and not layout.is_scored.any()
    np.testing.assert_array_equal(layout.back(np.ones((2, 4))), np.zeros((2, 2)))


def test_place_and_back_keep_the_type_of_what_they_move():
    tokens, mask, counts = batch_of(([5], [7, 8], [1, 1]))
    layout = pack((tokens, mask, counts), width=4, num_parts=1)
    np.testing.assert_array_equal(layout.place(tokens, fill=-7), [[5, 7, 8, -7]])
    for dtype in (bool, np.int32, np.float32):
        rows = layout.place(mask.astype(dtype))
        assert rows.dtype == dtype and layout.back(rows).dtype == dtype


def test_what_cannot_be_laid_out_is_said():
    fits = batch_of(([5], [1, 2, 3], [1, 1, 1]), ([6], [1, 2], [1, 1]))
    for share in (False, True):
        with pytest.raises(ValueError, match="sequence 0 takes 4 tokens.*width 3"):
            pack(fits, width=3, share=share)
        with pytest.raises(ValueError, match="takes 2 rows of width 4.*only 1"):
            pack(fits, width=4, num_parts=1, share=share)
        with pytest.raises(ValueError, match="row 0 counts 3 tokens.*num_scored=2"):
            pack(fits, width=4, share=share, num_scored=2)
    with pytest.raises(ValueError, match="row 0 counts 3 tokens.*num_scored=2"):
        unpacked(*fits[1:], num_scored=2)
    gap = np.array([[1, 0, 1, 1]], bool)
    with pytest.raises(ValueError, match="sequence 0 has padding between"):
        pack((np.zeros((1, 4), int), gap, gap & [0, 0, 0, 1]))


@pytest.mark.parametrize("mask, column", [([1, 1, 1], 0), ([0, 1, 1], 1), ([1, 1, 0], 2)])
def test_a_token_that_nothing_predicts_may_not_count(mask, column):
    counts = np.zeros((2, 3), bool)
    counts[1, column] = True
    mask = np.array([[1, 1, 1], mask], bool)
    for lay_out in (lambda: unpacked(mask, counts), lambda: pack((np.zeros((2, 3), int), mask, counts))):
        with pytest.raises(ValueError, match=f"sequence 1 counts column {column}"):
            lay_out()


@st.composite
def batches(draw):
    """Ragged batches whose neighbours often have the same prompt, with tokens of a few kinds so that parts look alike."""
    tokens = st.integers(1, 2)
    prompts = draw(st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=2))
    sequences = []
    for _ in range(draw(st.integers(1, 9))):
        rest = draw(st.lists(tokens, min_size=1, max_size=6))
        counts = draw(st.lists(st.booleans(), min_size=len(rest), max_size=len(rest)))
        sequences.append((draw(st.sampled_from(prompts)), rest, counts))
    return batch_of(*sequences, left=draw(st.integers(0, 2)), right=draw(st.integers(0, 2)))


@st.composite
def layouts(draw, kinds=("unpacked", "apart", "shared")):
    """A batch and a layout with as many rows as `rows_needed_at_most` asks for, or the layout without packing."""
    tokens, mask, counts = draw(batches())
    longest = int(mask.sum(axis=1).max())
    width, shards, rows_per_part = longest + draw(st.integers(0, 20)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_parts = -(-rows_needed_at_most(len(tokens), longest, width) // (shards * rows_per_part))
    kind = draw(st.sampled_from(kinds))
    if kind == "unpacked":
        return (tokens, mask, counts), unpacked(mask, counts), 1, 1
    sizes = {"width": width, "rows_per_part": rows_per_part, "num_parts": num_parts, "shards": shards}
    return (tokens, mask, counts), pack((tokens, mask, counts), **sizes, share=kind == "shared"), shards, rows_per_part


def visible(layout, row, query):
    """Columns that a token sees, by an explicit loop."""
    segments = layout.segment_ids[row]
    branches = np.ones_like(segments) if layout.branches is None else layout.branches[row]
    return [
        key
        for key in range(query + 1)
        if segments[key] == segments[query] and segments[query] > 0 and branches[key] in (0, branches[query])
    ]


@settings(deadline=None, max_examples=200)
@given(layouts())
def test_every_counted_token_stands_once_and_sees_its_own_sequence_up_to_itself(made):
    (tokens, mask, counts), layout, *_ = made
    rows, source = layout.place(tokens), layout.source
    seen = []
    for row, nth in np.argwhere(layout.is_scored):
        column, before = layout.scored[row, nth], layout.previous[row, nth]
        b, t = divmod(source[row, column], tokens.shape[1])
        seen.append((b, t))
        sequence = tokens[b, : t + 1][mask[b, : t + 1]]
        columns = visible(layout, row, column)
        np.testing.assert_array_equal(rows[row, columns], sequence)
        np.testing.assert_array_equal(layout.positions[row, columns], np.arange(len(sequence)))
        # what predicts it is the last it sees; that one sees all before it, or the start of its own branch
        assert before == columns[-2] and visible(layout, row, before) == columns[:-1]
    assert sorted(seen) == [tuple(place) for place in np.argwhere(counts)]
    assert (np.diff(layout.scored, axis=1)[layout.is_scored[:, 1:]] > 0).all()  # in order
    assert not layout.scored[~layout.is_scored].any() and not layout.previous[~layout.is_scored].any()


@settings(deadline=None, max_examples=100)
@given(layouts())
def test_what_is_placed_comes_back_at_the_tokens_that_count(made):
    (tokens, _, counts), layout, *_ = made
    x_BT = np.arange(tokens.size, dtype=np.float32).reshape(tokens.shape) + 1
    np.testing.assert_array_equal(layout.back(layout.place(x_BT)), np.where(counts, x_BT, 0))


@settings(deadline=None, max_examples=100)
@given(layouts(kinds=("apart", "shared")))
def test_rows_are_dealt_evenly_and_each_is_filled_from_its_start(made):
    _, layout, shards, rows_per_part = made
    taken = layout.segment_ids > 0
    np.testing.assert_array_equal(taken, layout.source >= 0)
    assert (np.diff(taken.astype(int), axis=1) <= 0).all()  # no holes in a row
    used = taken.any(axis=1).reshape(shards, -1)
    assert (np.diff(used.astype(int), axis=1) <= 0).all()  # used rows first
    counts = used.sum(axis=1)
    assert counts.max() - counts.min() <= 1
    assert layout.num_parts == max(1, -(-counts.max() // rows_per_part))
    fills = taken.sum(axis=1)[used.reshape(-1)]
    width = taken.shape[1]
    assert len(fills) < 2 or np.sort(fills)[:2].sum() > width  # two rows that would fit into one are one


@settings(deadline=None, max_examples=100)
@given(batches())
def test_a_shared_prompt_stands_once_wherever_the_group_fits(batch):
    tokens, mask, counts = batch
    layout = pack(batch, width=200, num_parts=1, share=True)
    texts = [tuple(tokens[b][mask[b]][: counts[b].argmax() - mask[b].argmax()]) for b in np.flatnonzero(counts.any(1))]
    leads = [len(here) for here, before in zip(texts, [None, *texts]) if here != before]
    assert layout.segment_ids.max() == len(leads)
    assert ((layout.branches == 0) & (layout.segment_ids > 0)).sum() == sum(leads)


@pytest.mark.parametrize(
    "num_sequences, longest, width, rows", [(3, 8, 8, 3), (1, 2, 8, 1), (8, 2, 8, 3), (7, 5, 8, 7)]
)
def test_rows_needed_at_most_is_what_half_full_rows_take(num_sequences, longest, width, rows):
    assert rows_needed_at_most(num_sequences, longest, width) == rows
