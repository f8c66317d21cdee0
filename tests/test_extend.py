"""Tokens that nobody sampled join a slot: as if the whole sequence had been read at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ragged_prompts, random_params, set_mesh

from tunix_lite.models import attention, decoder, layer_by_layer
from tunix_lite.rollout.engine import APPEND_WIDTHS, append_calls, empty_queue
from tunix_lite.rollout.programs import Programs, SamplerSpec
from tunix_lite.rollout.settings import GenerationConfig

WIDTH = 10
WIDE = pytest.mark.wide


def spec_of(cfg, **changes):
    return SamplerSpec(
        cfg, GenerationConfig(WIDTH, 60), end_ids=(999,), pad_id=0, dtype=jnp.float32, chunk=4, holds=True, **changes
    )


class OnDevices:
    """Four slots with four prompts, driven program by program."""

    def __init__(self, cfg, params, **changes):
        self.programs = Programs(spec_of(cfg, **changes))
        self.weights = layer_by_layer.per_layer_params(params, cfg, jnp.float32)
        self.tokens = ragged_prompts(4, width=WIDTH)
        padded = np.zeros((4, WIDTH), np.int32)
        for row, prompt in enumerate(self.tokens):
            padded[row, : len(prompt)] = prompt
        lengths = np.array([len(prompt) for prompt in self.tokens], np.int32)
        cache = self.programs.make_prompt_cache(4)
        cache = self.programs.prefill(cache, self.weights, padded, lengths, np.int32(0))
        queue = empty_queue(64, False)
        for column in (queue.rows, queue.prompts, queue.generations):
            column[:4] = np.arange(4)
        queue.key_data[:] = np.asarray(jax.random.key_data(jax.random.key(0)))
        queue.limits[:] = 60
        stopped = np.full(4, -1, np.int32)
        self.slots = self.programs.admit(self.programs.make_slots(4), cache, queue, np.int32(4), stopped)

    def decode(self):
        self.slots, drawn = self.programs.decode(self.slots, self.weights, np.float32(1))
        for slot, new in enumerate(np.asarray(drawn.tokens).T):
            self.tokens[slot] += [int(token) for token in new if token >= 0]

    def append(self, new):
        for call in append_calls({slot: (tokens, 60) for slot, tokens in new.items()}, 4):
            self.slots = self.programs.append(self.slots, self.weights, *call)
        for slot, tokens in new.items():
            self.tokens[slot] += tokens


def whole_hidden(cfg, params, tokens):
    padded = np.zeros((1, 128), np.int32)
    padded[0, : len(tokens)] = tokens
    meta = attention.one_sequence_per_row(np.arange(128)[None] < len(tokens))
    return jax.jit(decoder.forward, static_argnums=1)(params, cfg, padded, meta)[0, len(tokens) - 1]


@pytest.mark.parametrize("mesh", [(1, 1), pytest.param((2, 1), marks=WIDE), pytest.param((2, 2), marks=WIDE)], ids=str)
def test_a_slot_with_appended_tokens_is_where_reading_the_whole_sequence_ends(cfg, mesh):
    """The window of local layers is 5: what is appended is shorter and longer than the ring."""
    set_mesh(*mesh)
    params = random_params(cfg)
    at = OnDevices(cfg, params)
    at.decode()
    before = [list(tokens) for tokens in at.tokens]
    at.append({0: [7, 8, 9], 2: list(range(4, 27))})
    assert at.tokens[1] == before[1], "a slot that nothing is appended to stays as it is"
    for _ in range(2):
        hidden = np.asarray(at.slots.hidden)
        for slot in range(4):
            want = whole_hidden(cfg, params, at.tokens[slot])
            np.testing.assert_allclose(hidden[slot], want, atol=2e-5)
        at.decode()
        at.append({1: [5], 3: list(range(4, 21)), 0: [6, 6]})


def test_an_int8_cache_knows_what_was_appended(cfg, params):
    at = OnDevices(cfg, params, int8=True)
    at.append({1: [30, 31]})
    want = whole_hidden(cfg, params, at.tokens[1])
    np.testing.assert_allclose(np.asarray(at.slots.hidden)[1], want, atol=0.15)


def test_widths_follow_from_the_length_of_what_is_appended_alone():
    widest = APPEND_WIDTHS[-1]
    calls = append_calls({2: ([1] * (widest + 20), 9), 5: ([2] * 3, 7)}, num_slots=32, fsdp=1)
    assert [tokens.shape for _, tokens, _, _ in calls] == [(8, 16), (8, widest), (8, 64)]
    # the slot of the long one decodes only once its last piece is there
    assert [limits[0] for *_, limits in calls] == [7, 0, 9]
    assert calls[0][0].tolist() == [5] + [32] * 7
    # nine answers of one width are two calls of one shape
    nine = append_calls({slot: ([1], 9) for slot in range(9)}, num_slots=32, fsdp=1)
    assert [rows.tolist() for rows, *_ in nine] == [[*range(8)], [8] + [32] * 7]
    # slots that fsdp divides are not gathered
    assert append_calls({2: ([1], 9)}, num_slots=32, fsdp=2)[0][0].tolist() == list(range(32))


def test_long_tokens_are_cut_so_that_little_of_them_is_padding():
    long = list(range(256 + 130))
    calls = append_calls({3: (long, 12), 1: ([7, 8], 9), 2: (long[:200], 5)}, num_slots=32, fsdp=1)
    read = [(slot, count, limit) for rows, _, *of in calls for slot, count, limit in zip(rows, *of) if count]
    assert read == [(1, 2, 9), (2, 200, 5), (3, 256, 0), (3, 64, 0), (3, 64, 0), (3, 2, 12)]
    of_3 = [
        tokens[list(rows).index(3)][: counts[list(rows).index(3)]] for rows, tokens, counts, _ in calls if 3 in rows
    ]
    assert np.concatenate(of_3).tolist() == long
