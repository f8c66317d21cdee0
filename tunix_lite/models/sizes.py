"""A decoder by its number of parameters: one rule gives depth, width, heads and feed-forward.

The rule. Heads come in fours, with one head of keys and values for each four. A head is 16 wide in
models narrower than 256, 32 below 512, 64 below 2048, and 128 from there on. For each width, the
depth is the one whose count comes nearest with a feed-forward of 8/3 widths, and the feed-forward,
2 to 4 widths, takes what is left. Of the shapes within 2 % of the number, the one whose width is
nearest to 64 times its depth is taken; it may be 4 to 1024 times."""

import math
import re
from dataclasses import replace

from tunix_lite.models import decoder
from tunix_lite.models.architecture import MOST_LAYERS, Architecture
from tunix_lite.models.weights import num_params

# width of a model / its depth: 40 to 130 in published models; and how far it may be from that
_ASPECT = 64
_MOST_UNLIKE = math.log(16)
# least width of a model -> width of its heads
_HEAD_DIMS = {2048: 128, 512: 64, 256: 32, 64: 16}
# largest difference from the number that is asked for, as a share
_TOLERANCE = 0.02
_WIDEST = 16_384
# the vocabulary is a multiple of it
_VOCAB_STEP = 128
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def count_in(text: str | int | float) -> int:
    """The number in `5M`, `1.2B`, `350K` or `350000`. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", str(text).strip().upper())
    count = 0 if match is None else round(float(match[1]) * _UNITS[match[2]])
    if count < 1:
        raise ValueError(f"target_params={text}: write a number such as 5M, 1.2B or 350000")
    return count


def sized(base: Architecture, target: str | int | float, vocab_size: int) -> Architecture:
    """An architecture of about `target` parameters, embeddings included, with the norms, the
    activation and the positions of `base`. All its layers are global. vocab_size: tokens of the
    tokenizer. Raises ValueError if no shape of the rule is near.
    Example: sized(base, "5M", 8192) has 4 layers of width 256."""
    count = count_in(target)

    # a mesh divides it
    vocab_size = -(-vocab_size // _VOCAB_STEP) * _VOCAB_STEP

    def head_dim_of(width: int) -> int:
        return next(dim for least, dim in _HEAD_DIMS.items() if width >= least)

    def shape(width: int, depth: int, mlp_dim: int) -> Architecture:
        head_dim = head_dim_of(width)
        return replace(
            base,
            vocab_size=vocab_size,
            num_layers=depth,
            embed_dim=width,
            num_heads=width // head_dim,
            num_kv_heads=width // head_dim // 4,
            head_dim=head_dim,
            mlp_dim=mlp_dim,
            query_scale=head_dim,
            pattern=("global",),
            window=None,
            # what only some published models have
            global_head_dim=None,
            global_kv_heads=None,
            kv_readers=0,
            wide_readers=False,
            per_layer_dim=0,
            delta=None,
        )

    def params(*sizes: int) -> int:
        return num_params(decoder.weights(shape(*sizes)))

    # the nearest to the number, and of those that are near enough the most usual one
    shapes = []
    for width in range(min(_HEAD_DIMS), _WIDEST + 1, 64):
        if width % (4 * head_dim_of(width)):
            continue
        # the number of parameters is linear in the depth and in the feed-forward
        step = max(8, width // 32)
        mlp_dim = round(8 / 3 * width / step) * step
        one_layer = params(width, 1, mlp_dim)
        each = params(width, 2, mlp_dim) - one_layer
        depth = min(max(1, 1 + round((count - one_layer) / each)), MOST_LAYERS)
        missing = count - one_layer - (depth - 1) * each
        each_column = params(width, 1, mlp_dim + 1) - one_layer
        mlp_dim += round(missing / depth / each_column / step) * step
        sizes = (width, depth, min(max(2 * width, mlp_dim), 4 * width))
        made = params(*sizes)
        unlike = abs(math.log(width / depth / _ASPECT))
        if unlike <= _MOST_UNLIKE:
            off = max(_TOLERANCE, abs(made / count - 1))
            shapes.append((off, unlike, made, sizes))
        if one_layer > 2 * count:
            break
    off, _, made, sizes = min(shapes)
    if off > _TOLERANCE:
        raise ValueError(
            f"target_params={target}: no shape of the rule has about so many with {vocab_size:,} "
            f"tokens; the nearest has {made:,}: model.target_params={made}. A tokenizer with fewer "
            "tokens allows fewer: tunix-lite tokenizer vocab_size=512"
        )
    return shape(*sizes)


def shape_line(cfg: Architecture) -> str:
    """The sizes of a decoder in words."""
    return (
        f"{cfg.num_layers} layers of width {cfg.embed_dim}, {cfg.num_heads} heads of "
        f"{cfg.head_dim} with {cfg.num_kv_heads} of keys and values, feed-forward {cfg.mlp_dim}, "
        f"{cfg.vocab_size:,} tokens"
    )
