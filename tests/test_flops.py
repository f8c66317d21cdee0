"""FLOPs and bytes, against numbers that can be counted by hand."""

import math

import numpy as np
import pytest

from tunix_lite.models import decoder
from tunix_lite.models.architecture import Architecture
from tunix_lite.planning.flops import (
    _head_params,
    _matmul_params,
    attention_flops,
    decode_bytes,
    roofline,
    update_flops,
)
from tunix_lite.planning.hardware import HARDWARE

H100 = HARDWARE["h100"]

GEMMA3_1B = Architecture(262144, 26, 1152, num_heads=4, num_kv_heads=1, head_dim=256, mlp_dim=6912, window=512)


def test_gemma3_1b_multiplies_with_its_published_params_less_the_norms():
    q_and_o, k_and_v, gate_up_down = 2 * 1152 * 4 * 256, 2 * 1152 * 256, 3 * 1152 * 6912
    norms = 26 * (4 * 1152 + 2 * 256) + 1152
    assert _matmul_params(GEMMA3_1B) == 26 * (q_and_o + k_and_v + gate_up_down) == 697_761_792
    assert _head_params(GEMMA3_1B) == 262144 * 1152 == 301_989_888
    assert _matmul_params(GEMMA3_1B) + _head_params(GEMMA3_1B) + norms == 999_885_952  # as the hub counts them


def test_matmul_params_are_those_that_the_table_declares_as_multiplied(cfg):
    declared = sum(math.prod(w.shape) for w in decoder.layer_weights(cfg).values() if w.inputs)
    assert _matmul_params(cfg) == cfg.num_layers * declared


def pairs(length: int, window: int) -> int:
    """Who sees whom, counted one by one."""
    return sum(s <= t and t - s < window for t in range(length) for s in range(length))


@pytest.mark.parametrize("lengths", [[6], [0, 3, 5, 12, 12]])
def test_attention_is_the_pairs_of_tokens_that_see_each_other(cfg, lengths):
    assert (cfg.kinds, cfg.window, cfg.num_heads, cfg.head_dim) == (("local", "global", "local"), 5, 4, 8)
    counted = sum(2 * pairs(length, 5) + pairs(length, length + 1) for length in lengths)
    assert attention_flops(cfg, lengths) == 4 * 4 * 8 * counted
    assert attention_flops(cfg, np.array(lengths, np.int32)) == 4 * 4 * 8 * counted


def test_full_training_is_six_flops_a_weight_and_token_and_adapters_leave_out_gradients_of_frozen_weights():
    P, V = 697_761_792, 301_989_888
    assert update_flops(GEMMA3_1B, 1000, 600, 5e9) == 6 * P * 1000 + 6 * V * 600 + 15e9
    adapters = 26 * 16 * ((1152 + 4 * 256) * 2)  # rank 16 on q and o
    counted = 4 * P * 1000 + 6 * adapters * 1000 + 4 * V * 600 + 15e9
    assert update_flops(GEMMA3_1B, 1000, 600, 5e9, lora_params=adapters) == counted


def test_a_decode_step_reads_weights_once_and_of_each_sequence_what_it_sees(cfg):
    weights = _matmul_params(cfg) + _head_params(cfg)
    kept = 2 * min(9, 5) + 9 + 2 * 3 + 3  # two local layers and a global one, sequences of 9 and 3 tokens
    assert decode_bytes(cfg, [9, 3]) == 2 * weights + 2 * kept * 2 * 2 * 8
    assert decode_bytes(cfg, [9, 3], weight_itemsize=0.5, cache_itemsize=1) == 0.5 * weights + kept * 2 * 2 * 8


@pytest.mark.parametrize(
    "work, seconds, bound",
    [
        ((989e12, 1e12, 1e9), 1.0, "compute"),
        ((1e12, 6.7e12, 1e9), 2.0, "memory"),
        ((1e12, 1e12, 1350e9), 3.0, "links"),
        ((0, 0, 0), 0.0, "compute"),
    ],
)
def test_the_slowest_of_three_sets_the_time(work, seconds, bound):
    assert roofline(*work, H100) == (pytest.approx(seconds), bound)
