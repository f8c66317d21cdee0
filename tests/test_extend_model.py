"""docs/extend/model.md to the letter: its commands, its code and its tables, and Mistral against transformers."""

import json
import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_params, rows_of
from model_checks import check_sampled, groups, layout_of, losses, sampled, write_with_tokenizer
from test_docs import EXAMPLE, ROOT, blocks, commands

from tunix_lite.learner.policy import token_logprobs
from tunix_lite.models import decoder, hf, source, weights
from tunix_lite.models.architecture import repeated
from tunix_lite.models.families import KEYS, LLAMA, config_json, find_family, read_config
from tunix_lite.settings.compose import compose
from tunix_lite.settings.config import RunConfig
from tunix_lite.train import train

PAGE = ROOT / "docs" / "extend" / "model.md"
SIZE, SIZE_OF_A_FOLDER, WHATEVER_IS_THERE, NO_YAML, FAMILY_OF_A_FOLDER, SIZE_OF_THE_FAMILY, KIND = commands(PAGE)
QUICK = [
    "training.max_steps=1",
    "training.prompts_per_step=4",
    "training.save_interval_steps=0",
    "evaluation.num_examples=0",
    "tracking.tensorboard=false",
    "model.mesh_shape=[[1,1],[fsdp,tp]]",
]


@pytest.fixture(autouse=True)
def a_checkout(monkeypatch):
    """Commands are given where run_training.py is, and Python finds what is in docs/extend/example."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(EXAMPLE)


def run_of(command: str, *more: str, folder: Path | None = None) -> RunConfig:
    """The run that a command of the page describes; `folder` is where it says /path/to/..."""
    on_path, words = re.fullmatch(r"(PYTHONPATH=docs/extend/example )?python run_training\.py (.*)", command).groups()
    own = "mistral" in words or "head_scale" in words
    assert bool(on_path) == own, "only there Python needs the example's folder"
    words = shlex.split(re.sub(r"/path/to/a/\w+", str(folder), words))
    conf = words[1] if words[0] == "--config-dir" else None
    return compose([*(words[2:] if conf else words), *more], conf)


def table(head: str) -> list[list[str]]:
    """What stands in backticks in each row of the page's table that begins with this head."""
    rows = PAGE.read_text().split(f"\n| {head} |")[1].split("\n\n")[0].splitlines()[2:]
    return [re.findall(r"`([^`]*)`", row) for row in rows]


def architecture(option: str) -> decoder.Architecture:
    return compose([f"model={option}"], "docs/extend/example/conf").model.architecture


def check_found(run: RunConfig, cfg, family) -> None:
    """The run's model is the one that write_with_tokenizer wrote."""
    found = source.locate(run.model)
    assert (found.cfg, found.family) == (cfg, family)
    jax.tree.map(np.testing.assert_array_equal, source.load_weights(found)[1], random_params(cfg))


# ---- a size


def test_the_table_of_names_is_the_one_of_the_code():
    assert {field: key for field, key, *_ in table("`model.architecture`")} == KEYS


@pytest.mark.parametrize(
    "command", [SIZE, pytest.param(SIZE_OF_THE_FAMILY, marks=pytest.mark.wide)], ids=["llama", "mistral"]
)
def test_a_tiny_size_trains_from_random_weights(command, tmp_path):
    state = train(run_of(command, *QUICK), tmp_path)
    check_trained(state, tmp_path)
    shapes = {path: x.shape for path, x in hf.flatten(state.params).items()}
    assert shapes["embed"] == shapes["head"] == (512, 64) and shapes["layers/q"] == (2, 64, 4, 16)


@pytest.mark.parametrize("command", [SIZE_OF_A_FOLDER, WHATEVER_IS_THERE, NO_YAML])
def test_a_folder_of_that_size_is_taken(command, tmp_path):
    cfg = architecture("llama_tiny")
    check_found(run_of(command, folder=write_with_tokenizer(tmp_path, cfg, LLAMA)), cfg, LLAMA)


def test_a_folder_of_another_size_is_refused_in_the_words_of_the_page(tmp_path):
    cfg = replace(architecture("llama_tiny"), num_layers=3)
    write_with_tokenizer(tmp_path, cfg, LLAMA)
    (words,) = [body for language, _, body in blocks(PAGE) if language == "text"]
    with pytest.raises(ValueError) as error:
        source.locate(run_of(SIZE_OF_A_FOLDER, folder=tmp_path).model)
    assert str(error.value) == words.replace("\n", " ").replace("/path/to/a/llama", str(tmp_path))
    for command in (WHATEVER_IS_THERE, NO_YAML):
        check_found(run_of(command, folder=tmp_path), cfg, LLAMA)


def test_a_kind_of_layer_trains(tmp_path):
    run = run_of(KIND, *QUICK, "algorithm.num_generations=2", "generation.max_new_tokens=8")
    check_trained(train(run, tmp_path), tmp_path)
    (row,) = rows_of(tmp_path)
    assert 0 < row["train/sampler_gap"] < 1e-6, "sampling gives what training computes"
    shapes = {path: w.shape for path, w in weights.flatten(decoder.weights(MIXED)).items() if path.endswith("/q")}
    assert shapes == {"layers/HEAD_SCALE/q": (3, 16, 4, 8), "layers/local/q": (2, 16, 4, 8)}, "a stack for each kind"


def check_trained(state, folder: Path) -> None:
    """One step with a finite loss, and some gradient."""
    assert int(state.step) == 1
    (row,) = rows_of(folder)
    assert np.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0


# two periods of a made-up kind and one of the package, and a layer that is left over
NAME = "head_scale.HEAD_SCALE"
MIXED = decoder.Architecture(32, 5, 16, 4, 2, 8, 24, pattern=(NAME, "local"), window=5, query_scale=8)


def test_a_pattern_names_kinds_that_there_are():
    with pytest.raises(ValueError, match="its entries are local, global"):
        replace(MIXED, pattern=("nope",))
    with pytest.raises(ValueError, match="whose last names differ"):
        replace(MIXED, pattern=("a.NOPE", "b.NOPE"))
    with pytest.raises(ValueError, match="is not a LayerKind"):
        decoder.weights(replace(MIXED, pattern=("test_extend_model.NAME",)))


@pytest.mark.wide
def test_a_kind_of_ones_own_is_scanned_over_its_period_and_samples_what_it_scores():
    assert repeated("aab" * 2 + "a") == ("a", "a", "b") and repeated("aabab") == tuple("aabab")
    params = random_params(MIXED)
    one, other = (
        losses(params, groups(32), layout_of("none"), jnp.float32, MIXED, scan_layers=way) for way in (True, False)
    )
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), one, other)
    rollout = sampled(MIXED, params)
    check_sampled(rollout, jax.jit(partial(token_logprobs, cfg=MIXED))(params, rollout.tokens, rollout.token_mask))


# ---- a family


@pytest.mark.parametrize("window", [5, None])
def test_a_mistral_is_written_and_read_back(window, tmp_path):
    mistral = find_family("mistral.MISTRAL")
    cfg = replace(architecture("mistral_tiny"), pattern=("local" if window else "global",), window=window)
    write_with_tokenizer(tmp_path, cfg, mistral)
    check_found(run_of(FAMILY_OF_A_FOLDER, folder=tmp_path), cfg, mistral)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["sliding_window"] == window and "layer_types" not in written


def test_a_family_that_is_not_named_or_not_there_is_said(tmp_path):
    write_with_tokenizer(tmp_path, architecture("mistral_tiny"), find_family("mistral.MISTRAL"))
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"mistral"', '"mixtral"'))
    with pytest.raises(ValueError, match=r"model_type is 'mixtral'; supported is .*docs/extend/model says how to add"):
        source.locate(run_of(NO_YAML, folder=tmp_path).model)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=r"model\.family: 'mistral\.NONE' is neither one of .* nor importable"):
        source.locate(run_of(FAMILY_OF_A_FOLDER, "model.family=mistral.NONE", folder=tmp_path).model)
    with pytest.raises(ValueError, match=r"model\.family: mistral\.one_kind is not a Family"):
        source.locate(run_of(FAMILY_OF_A_FOLDER, "model.family=mistral.one_kind", folder=tmp_path).model)


@pytest.mark.parity
def test_what_a_config_leaves_out_is_what_transformers_takes():
    defaults = pytest.importorskip("transformers", reason="needs the parity extra").MistralConfig()
    theirs = defaults.to_dict() | defaults.rope_parameters
    absent = find_family("mistral.MISTRAL").absent
    assert absent == {key: theirs[key] for key in absent}


# ---- what is refused


@pytest.mark.parametrize("row", table("in config.json"), ids=lambda row: f"{row[1]}: {row[0]}")
def test_what_the_page_says_is_refused_is_refused(row, tmp_path):
    change, family = json.loads(row[0]), find_family(row[1])
    layers = {"pattern": ("global",), "window": None, "rope_theta_global": 1e4}
    if row[1] == "mistral.MISTRAL":
        layers |= {"pattern": ("local",), "window": 5}
    cfg = decoder.Architecture(32, 2, 16, 4, 2, 8, 24, query_scale=8, **layers | family.flags)
    values = config_json(cfg, family) | {"rope_theta": 1e4}
    del values["rope_parameters"]  # the older spelling, which the page uses
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_config(tmp_path, family) == (cfg, family)
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    (key,) = change
    with pytest.raises(ValueError, match=rf"config\.json: (rope_type|{key.replace('_', '[_ ]')})"):
        read_config(tmp_path, family)


@pytest.mark.parametrize(
    ("family", "change", "lost"),
    [
        ("llama", {"query_scale": 7}, "query_scale=7 against 16"),
        ("llama", {"qkv_bias": True}, "qkv_bias=True against False"),
        ("mistral.MISTRAL", {"rope_theta_local": 500.0}, "rope_theta_local=500.0 against 10000.0"),
        ("mistral.MISTRAL", {"pattern": ("local", "global")}, r"pattern=\('local', 'global'\) against"),
    ],
)
def test_what_a_config_json_cannot_say_is_not_written(family, change, lost):
    cfg = architecture("llama_tiny" if family == "llama" else "mistral_tiny")
    config_json(cfg, find_family(family))
    with pytest.raises(ValueError, match=lost):
        config_json(replace(cfg, **change), find_family(family))
