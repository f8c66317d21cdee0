"""training.packing=auto: what rows compute, by hand, and what is chosen."""

import json
from dataclasses import replace

import pytest

from tunix_lite.basics.errors import ConfigError
from tunix_lite.planning.lengths import Lengths
from tunix_lite.planning.packing_choice import _computed_flops, with_packing
from tunix_lite.runs.fingerprint import check_same_run
from tunix_lite.runs.setup import _fingerprint_of, find_parts, with_packing_as_before
from tunix_lite.settings.compose import compose
from tunix_lite.settings.resolved_run import find_model, resolve_run

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
