"""model.target_params: shapes by one rule, as many parameters as asked, shown before and kept after a run."""

import json
import re
from functools import cache

import pytest

from tunix_lite.commands.plan import PlanConfig, make_plans
from tunix_lite.models import decoder
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.sizes import shape_line, sized
from tunix_lite.models.source import locate, settings_to_keep
from tunix_lite.models.weights import num_params
from tunix_lite.planning.plans import Plans
from tunix_lite.settings.compose import compose


@cache
def base() -> Architecture:
    return compose(["model=random"]).model.architecture


def by_hand(cfg: Architecture) -> int:
    """The numbers of a Gemma 3 decoder: an embedding, and in each layer four products of attention, three of the
    feed-forward, four norms of the width and two of a head; one norm at the end."""
    width, heads, kv, dim = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    layer = width * dim * (2 * heads + 2 * kv) + 3 * width * cfg.mlp_dim + 4 * width + 2 * dim
    return cfg.vocab_size * width + cfg.num_layers * layer + width


COUNTS = {"5M": 5e6, "60M": 60e6, "1.2B": 1.2e9, "1M": 1e6, "20m": 20e6, "124M": 124e6, "350000000": 350e6, "7B": 7e9}


@pytest.mark.parametrize("asked", COUNTS)
@pytest.mark.parametrize("vocab", [512, 8192, 49_152])
def test_a_model_has_as_many_parameters_as_asked(asked, vocab):
    if vocab == 49_152 and asked in ("1M", "5M"):  # the embedding alone has as many
        says = f"target_params={asked}: no shape of the rule .* 49,152 tokens; the nearest has .*: model.target_params="
        with pytest.raises(ValueError, match=says) as error:
            sized(base(), asked, vocab)
        nearest = int(re.search(r"model.target_params=(\d+)", str(error.value))[1])
        assert num_params(decoder.weights(sized(base(), nearest, vocab))) == nearest > COUNTS[asked]
        return
    cfg = sized(base(), asked, vocab)
    count = num_params(decoder.weights(cfg))
    assert count == by_hand(cfg) and count == pytest.approx(COUNTS[asked], rel=0.03)
    assert cfg.vocab_size == vocab and cfg.norm_plus_one == base().norm_plus_one and cfg.max_positions == 512
    assert cfg.num_heads * cfg.head_dim == cfg.embed_dim and cfg.num_heads == 4 * cfg.num_kv_heads
    assert 2 * cfg.embed_dim <= cfg.mlp_dim <= 4 * cfg.embed_dim and cfg.query_scale == cfg.head_dim
    assert set(cfg.kinds) == {"global"}, "stories are longer than the window of the bundled model"


def test_a_number_may_be_written_in_any_way():
    shapes = [locate(compose(["model=random", f"model.target_params={x}"]).model).cfg for x in ("5e6", "5000000", "5m")]
    assert shapes[0] == shapes[1] == shapes[2]


def test_depth_and_width_grow_together():
    shapes = [sized(base(), count, 8192) for count in ("5M", "20M", "60M", "350M", "1.2B", "7B")]
    widths, depths = [cfg.embed_dim for cfg in shapes], [cfg.num_layers for cfg in shapes]
    assert widths == sorted(widths) and depths == sorted(depths)
    assert all(32 <= width / depth <= 128 for width, depth in zip(widths, depths))


@pytest.mark.parametrize("family", ["llama3.2_1b", "gemma4_e2b", "qwen3_0.6b", "qwen3.5_0.8b", "smollm2_135m"])
def test_any_family_has_any_size(family):
    model = compose([f"model={family}", "model.weights=random", "model.target_params=5M"]).model
    found = locate(model)
    assert num_params(decoder.weights(found.cfg)) == pytest.approx(5e6, rel=0.03)
    assert found.cfg.activation == model.architecture.activation and found.cfg.vocab_size == 512


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=random", "model.target_params=many"], "model: target_params=many: write a number such as 5M, 1.2B"),
        (["model=random", "model.target_params=0"], "model: target_params=0: write a number such as"),
        (["model=random", "model.target_params=10K"], "the nearest has 67,936: model.target_params=67936"),
        (
            ["model=random", "model.target_params=5M", "model.architecture.num_layers=2", "seed=1"],
            "model.architecture.num_layers=2 would change nothing; write model=random model.target_params=5M seed=1, or",
        ),
        (["model.target_params=5M"], "weights=bundled have a size; model=random model.target_params=5M"),
    ],
)
def test_a_wrong_number_of_parameters_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        locate(compose(words).model)


def test_the_shape_is_shown_and_kept():
    run = compose(["model=random", "model.target_params=5M"])
    found = locate(run.model)
    plans = make_plans(run, PlanConfig(target="h100x1", analytic=True), [])
    count = num_params(decoder.weights(found.cfg))
    lines = "\n".join(Plans(plans.plans).short_form())
    assert f"model      {count:,} parameters" in lines and f"shape      {shape_line(found.cfg)}" in lines
    kept = json.loads(json.dumps(settings_to_keep(run.model, found, 0)))["model"]
    assert kept["target_params"] is None, "a later tokenizer or rule must not change a model that is trained"
    assert kept["architecture"]["num_layers"] == found.cfg.num_layers
