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
    update_flops,
)

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
    sees = np.zeros((length, length), bool)
    for t in range(length):
        for s in range(length):
            sees[t, s] = s <= t and t - s < window
    return int(sees.sum())


@pytest.mark.parametrize("lengths", [[1], [4], [5], [6], [17], [0, 3, 5, 12, 12]])
def test_attention_is_the_pairs_of_tokens_that_see_each_other(cfg, lengths):
    assert (cfg.kinds, cfg.window, cfg.num_heads, cfg.head_dim) == (("local", "global", "local"), 5, 4, 8)
    counted = sum(2 * pairs(length, 5) + pairs(length, length + 1) for length in lengths)
    assert attention_flops(cfg, lengths) == 4 * 4 * 8 * counted
    assert attention_flops(cfg, np.array(lengths, np.int32)) == 4 * 4 * 8 * counted


def test_full_training_is_six_flops_a_weight_and_token():
    P, V = 697_761_792, 301_989_888
    assert update_flops(GEMMA3_1B, 1000, 600, 5e9) == 6 * P * 1000 + 6 * V * 600 + 15e9


def test_adapters_leave_out_the_gradients_of_frozen_weights():
    P, V = 697_761_792, 301_989_888
    adapters = 26 * 16 * ((1152 + 4 * 256) * 2)  # rank 16 on q and o
    counted = 4 * P * 1000 + 6 * adapters * 1000 + 4 * V * 600 + 15e9
    assert update_flops(GEMMA3_1B, 1000, 600, 5e9, lora_params=adapters) == counted
    assert counted < 0.7 * update_flops(GEMMA3_1B, 1000, 600, 5e9)
