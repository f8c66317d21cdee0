"""The shape of a model: what families do differently, as flags and numbers of one dataclass."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tunix_lite.models.activations import ACTIVATIONS

# Published models have up to 126 layers; a config.json that we do not trust may have 10**9.
MOST_LAYERS = 1024
# Kinds of layers that have a name here (decoder.LAYER_KINDS). Another one has a dotted path.
KIND_NAMES = ("local", "global", "unrotated", "delta")
# Ends the name of a kind whose layers read the keys and values of another layer.
READER = "_reader"
# What a model gives of a token: scores over the vocabulary; or a number, with a bias or without one
# (models/scalar_head.py).
OUTPUTS = ("logits", "score", "biased_score")
# Elements of one dim of a weight, and every other number of an architecture, such as
# max_positions. Published models have dims of up to 262,208, and up to 10,485,760 positions.
_MOST_OF_A_DIM = 2**26
# The same of other numbers; an id of an expert has 16 bits where routes are recorded.
_MOST = {"num_layers": MOST_LAYERS, "count": 2**15, "per_token": 2**15}


def _check_numbers(values: object, of: str = "") -> None:
    """Raises ValueError for a number in a dataclass that no model has: a stranger's file must not
    become an array that no machine has. of: what its name begins with."""
    for field in fields(values):
        value = getattr(values, field.name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and (value < 0 or (value == 0 and field.default != 0)):
            raise ValueError(f"{of}{field.name}={value} must be above 0")
        most = _MOST.get(field.name, _MOST_OF_A_DIM)
        if isinstance(value, int) and value > most:
            raise ValueError(
                f"{of}{field.name}={value} is beyond {most:,}, which no model has"
            )


@dataclass(frozen=True)
class RopeScaling:
    """Longer rotary wavelengths: linear with `factor` alone, with the rest as in Llama 3.1.

    Example: RopeScaling(8.0) for Gemma 3; RopeScaling(8.0, 1.0, 4.0, 8192) for Llama 3.1.
    """

    # conf/model/parts/llama3.yaml explains each setting
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_positions: int | None = None

    def __post_init__(self):
        # linear has the factor alone, Llama 3 all of them
        rest = (self.low_freq_factor, self.high_freq_factor, self.original_positions)
        num_given = sum(x is not None for x in rest)
        if num_given not in (0, 3):
            raise ValueError(
                "give low_freq_factor, high_freq_factor and original_positions, or none of the "
                "three"
            )
        in_order = num_given == 0 or 0 < self.low_freq_factor < self.high_freq_factor
        if self.factor <= 0 or not in_order:
            raise ValueError(
                "factor must be above 0, and low_freq_factor between 0 and high_freq_factor"
            )

    def scaled(self, frequency: np.ndarray) -> np.ndarray:
        """Rotary frequencies, in radians per token, after the stretching of their wavelengths."""
        if self.original_positions is None:
            return frequency / self.factor
        # turns within the original length
        turns = self.original_positions * frequency / (2 * np.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        share = np.clip((turns - low) / (high - low), 0, 1)
        return frequency * (share + (1 - share) / self.factor)


@dataclass(frozen=True)
class Yarn:
    """Longer rotary wavelengths by yarn (arXiv:2309.00071), in global layers or in all.

    Example: Yarn(8.0, 8192, amplitude=1.2079441541679836) for OLMo 3.
    """

    # conf/model/gpt_oss_20b.yaml explains each setting
    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float = 1.0
    query_growth: float = 0.0
    truncate: bool = True
    in_windows: bool = False

    def __post_init__(self):
        positive = (self.factor, self.original_positions, self.beta_slow, self.amplitude)
        if min(positive) <= 0 or self.beta_fast < self.beta_slow or self.query_growth < 0:
            raise ValueError(
                "yarn: factor, original_positions, beta_slow and amplitude must be above 0, "
                "beta_fast at least beta_slow, and query_growth at least 0"
            )

    def scaled(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        """Rotary frequencies, in radians per token, after the stretching. theta: base of the
        wavelengths."""
        dim = 2 * len(frequency)
        # The pairs that turn so often, by place.
        turns = 2 * np.pi * np.array([self.beta_fast, self.beta_slow])
        pairs = dim * np.log(self.original_positions / turns) / (2 * np.log(theta))
        if self.truncate:
            pairs = np.array([np.floor(pairs[0]), np.ceil(pairs[1])])
        low, high = max(pairs[0], 0), min(pairs[1], dim - 1)
        # Never 0, where both ends are one pair; transformers does the same.
        slow = np.clip((np.arange(len(frequency)) - low) / ((high - low) or 0.001), 0, 1)
        return frequency * (1 - slow + slow / self.factor)


@dataclass(frozen=True)
class LongRope:
    """Rotary wavelengths with a factor for each pair of elements (longrope, arXiv:2402.13753).

    Example: LongRope((1.0, 1.0), (1.0, 30.0), 4096, 131_072, 1.19) for heads of four elements.
    """

    # conf/model/phi4_mini.yaml explains each setting
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_positions: int
    long_positions: int
    amplitude: float = 1.0

    def __post_init__(self):
        short, long = self.short_factors, self.long_factors
        rest = (self.original_positions, self.long_positions, self.amplitude)
        if len(short) != len(long) or min(len(short), *short, *long, *rest) <= 0:
            raise ValueError(
                f"longrope: short_factors has {len(short)} numbers, and long_factors {len(long)}; "
                "they must be as many, one or more, and all numbers above 0"
            )


@dataclass(frozen=True)
class DeltaNet:
    """The sizes of a gated delta net (models/gated_delta_net.py).

    Example: DeltaNet(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128).
    """

    # Heads of queries and keys.
    num_key_heads: int
    # Heads of values and of the state, a multiple of num_key_heads.
    num_value_heads: int
    # Width of a head of queries and keys.
    key_dim: int
    # Width of a head of values.
    value_dim: int
    # Tokens that the short convolution reads, the current one included.
    taps: int = 4

    def __post_init__(self):
        _check_numbers(self, "delta.")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"delta.num_value_heads={self.num_value_heads} is not a multiple of "
                f"num_key_heads={self.num_key_heads}"
            )

    @property
    def parts(self) -> tuple[int, int, int]:
        """The widths of queries, keys and values that belong to one key head."""
        per_key_head = self.num_value_heads // self.num_key_heads
        return self.key_dim, self.key_dim, per_key_head * self.value_dim


@dataclass(frozen=True)
class Experts:
    """The sizes and flags of a mixture of experts (models/experts.py).

    Example: Experts(count=128, per_token=8, mlp_dim=768) for Qwen 3 30B-A3B.
    """

    # conf/model/gemma4_26b_a4b.yaml explains each setting
    count: int  # experts of a layer
    per_token: int
    mlp_dim: int  # hidden width of one expert
    normalised: bool = True
    softmax_after: bool = False
    shared_dim: int = 0
    beside_dense: bool = False
    router_norm: bool = False
    biases: bool = False
    limit: float | None = None

    def __post_init__(self):
        _check_numbers(self, "experts.")
        if self.per_token > self.count:
            raise ValueError(
                f"experts.per_token={self.per_token} is above experts.count={self.count}"
            )


@dataclass(frozen=True)
class Architecture:
    """The sizes and flags of a decoder; the defaults are Gemma 3's. Raises ValueError for what no
    model has.

    Example: Architecture(vocab_size=64, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=64).
    """

    # Tokens in the vocabulary.
    vocab_size: int
    num_layers: int  # blocks of attention and feed-forward
    embed_dim: int  # width of the residual stream
    num_heads: int  # query heads
    # Key/value heads, a divisor of num_heads.
    num_kv_heads: int
    # Width of one attention head.
    head_dim: int
    mlp_dim: int  # hidden width of the gated feed-forward
    # Kind of each layer, repeated over the depth: local, global or unrotated (attention), delta
    # (gated delta net), or the dotted path of a LayerKind.
    pattern: tuple[str, ...] = ("local",) * 5 + ("global",)
    # Tokens that a local layer attends to, the current one included. null has no local layers.
    window: int | None = 512
    # Attention scores are divided by the square root of this.
    query_scale: int = 256
    # Base of the rotary wavelengths of local layers, in tokens.
    rope_theta_local: float = 10_000.0
    # Base of the rotary wavelengths of global layers, in tokens.
    rope_theta_global: float = 1_000_000.0
    # Stretching of rotary wavelengths for long contexts. null stretches none.
    rope_scaling: RopeScaling | None = None
    # Stretching by yarn, in global layers. null stretches none.
    yarn: Yarn | None = None
    # A factor for each rotary wavelength. null has none.
    longrope: LongRope | None = None
    # Share of each head that rotary positions turn: its first elements.
    rope_share: float = 1.0
    # Added to the mean square before its root is taken.
    norm_eps: float = 1e-6
    # Activation of the gated feed-forward: silu, or gelu in its tanh form.
    activation: str = "gelu"
    # true multiplies embeddings by sqrt(embed_dim).
    embed_scale: bool = True
    # true multiplies by 1 + scale in a norm, false by scale.
    norm_plus_one: bool = True
    # true has norms before attention and before the feed-forward.
    pre_norms: bool = True
    # true adds norms after attention and after the feed-forward.
    post_norms: bool = True
    # true normalises queries and keys per head.
    qk_norm: bool = True
    # true normalises them over all heads together.
    qk_norm_whole: bool = False
    # true adds biases to queries, keys and values.
    qkv_bias: bool = False
    # true adds a bias to the output of attention.
    out_bias: bool = False
    # true adds a score of its own, which no value has, to the softmax of each query head.
    attn_sinks: bool = False
    # true multiplies the output of attention by the sigmoid of a gate, per element.
    attn_gate: bool = False
    # Sizes of the gated delta net of delta layers. null has no such layers.
    delta: DeltaNet | None = None
    # Sizes of the mixture of experts of every layer. null has a dense feed-forward.
    experts: Experts | None = None
    # true uses the embedding as the head. false has a separate matrix.
    tied: bool = True
    # tanh keeps attention scores between -x and x. null does not limit them.
    attn_softcap: float | None = None
    # tanh keeps logits between -x and x. null does not limit them.
    final_softcap: float | None = None
    # Longest sequence, in tokens.
    max_positions: int = 131_072
    # What it gives of a token: logits, or score or biased_score, the number of a reward model.
    output: str = "logits"

    # ---- layers of several shapes, as Gemma 4 has them
    # Width of one attention head in global layers. null is head_dim.
    global_head_dim: int | None = None
    # Key/value heads of global layers. null is num_kv_heads.
    global_kv_heads: int | None = None
    # Share of the rotary frequencies of global layers that turn, the highest ones.
    global_rope_share: float = 1.0
    # true has no matrix for the values of global layers: they are the keys before their norm.
    keys_as_values: bool = False
    # true normalises values per head, without a scale.
    value_norm: bool = False
    # Last layers that read the keys and values of the last layer of their kind that has its own.
    kv_readers: int = 0
    # true has a feed-forward of twice mlp_dim in these layers.
    wide_readers: bool = False
    # Width of the input that each layer has of its own for each token. 0 has none.
    per_layer_dim: int = 0
    # true multiplies the output of each layer by a stored number, which never trains.
    layer_scalar: bool = False

    def __post_init__(self):
        _check_numbers(self)
        num_factors = 0 if self.longrope is None else len(self.longrope.short_factors)
        # the last layers read the keys of others
        first_reader = max(0, self.num_layers - self.kv_readers)
        with_sources = {*self.kinds[:first_reader]} & {"local", "global"}
        mistakes = {
            f"activation={self.activation!r}; it is {' or '.join(ACTIVATIONS)}": (
                self.activation not in ACTIVATIONS
            ),
            f"output={self.output!r}; it is {', '.join(OUTPUTS)}": self.output not in OUTPUTS,
            f"pattern={list(self.pattern)} has local layers, and window is not given": (
                "local" in self.pattern and self.window is None
            ),
            f"pattern={list(self.pattern)} has delta layers, and delta is not given": (
                "delta" in self.pattern and self.delta is None
            ),
            f"rope_share={self.rope_share} of head_dim={self.head_dim} is no even number of at "
            "least 2 elements": (
                self.rope_share > 1 or self.rotated_dim < 2 or self.rotated_dim % 2
            ),
            "rope_scaling, yarn and longrope: give one of the three": (
                [self.rope_scaling, self.yarn, self.longrope].count(None) < 2
            ),
            f"rope_theta_global={self.rope_theta_global} with yarn; it is above 1": (
                self.yarn is not None and self.rope_theta_global <= 1
            ),
            f"longrope: its lists have {num_factors} numbers, and rope_share={self.rope_share} of "
            f"head_dim={self.head_dim} needs {self.rotated_dim // 2}": (
                num_factors not in (0, self.rotated_dim // 2)
            ),
            f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}": (
                self.num_heads % self.num_kv_heads
            ),
            f"head_dim={self.head_dim} is odd; rotary embeddings need an even one": (
                self.head_dim % 2
            ),
            f"num_heads={self.num_heads} is not a multiple of global_kv_heads="
            f"{self.global_kv_heads}": self.num_heads % (self.global_kv_heads or 1),
            f"global_head_dim={self.global_head_dim} is odd; rotary embeddings need an even one": (
                (self.global_head_dim or 0) % 2
            ),
            f"global_rope_share={self.global_rope_share} is above 1": (
                self.global_rope_share > 1
            ),
            f"kv_readers={self.kv_readers}: each of them needs a layer of its kind before them, "
            f"which is local or global, and there are {self.num_layers} layers": (
                not {*self.kinds[first_reader:]} <= with_sources
            ),
            "qkv_bias=true has a bias for keys and values, and keys_as_values or kv_readers has "
            "layers without them": (
                self.qkv_bias and (self.keys_as_values or self.kv_readers)
            ),
            f"pattern={list(self.pattern)}: its entries are {', '.join(KIND_NAMES)} or the dotted "
            "path of a LayerKind, whose last names differ": (
                not self.pattern
                or not all(kind in KIND_NAMES or "." in kind for kind in self.pattern)
                or len({kind.rsplit(".", 1)[-1] for kind in self.pattern})
                < len(set(self.pattern))
            ),
        }
        for message, is_so in mistakes.items():
            if is_so:
                raise ValueError(message)

    def rope(self, kind: str) -> tuple[np.ndarray, float]:
        """The frequencies of a kind of layer, radians per token, and what rotated elements are
        multiplied by."""
        half = int(self.kv_shape(kind)[1] * self.rope_share) // 2
        theta = self.rope_theta_local if kind == "local" else self.rope_theta_global
        frequency = theta ** -(np.arange(half) / half)
        if kind == "global":
            # Frequency 0 turns nothing.
            frequency[int(half * self.global_rope_share) :] = 0
        if (long := self.longrope) is not None:
            is_long = self.max_positions > long.original_positions
            factors = long.long_factors if is_long else long.short_factors
            return frequency / np.array(factors), long.amplitude
        if self.yarn is not None and (kind == "global" or self.yarn.in_windows):
            return self.yarn.scaled(frequency, theta), self.yarn.amplitude
        if kind == "global" and self.rope_scaling is not None:
            return self.rope_scaling.scaled(frequency), 1.0
        return frequency, 1.0

    @property
    def rotated_dim(self) -> int:
        """Elements of a head that rotary positions turn."""
        return int(self.head_dim * self.rope_share)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of every layer, in order."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

    @property
    def kinds_of_weights(self) -> tuple[str, ...]:
        """The same, with local_reader and global_reader for layers without keys and values."""
        first = self.num_layers - self.kv_readers
        kinds = self.kinds
        return kinds[:first] + tuple(kind + READER for kind in kinds[first:])

    @property
    def sources(self) -> dict[int, int]:
        """Of each layer that reads the keys and values of another one: of which."""
        kinds = self.kinds
        first = self.num_layers - self.kv_readers
        last = {kind: i for i, kind in enumerate(kinds[:first])}
        return {i: last[kinds[i]] for i in range(first, self.num_layers)}

    def kv_shape(self, kind: str) -> tuple[int, int]:
        """Key/value heads in attention of this kind, and the width of a head."""
        if kind.removesuffix(READER) != "global":
            return self.num_kv_heads, self.head_dim
        heads = self.global_kv_heads or self.num_kv_heads
        return heads, self.global_head_dim or self.head_dim


def repeated(entries: Sequence[Any]) -> tuple[Any, ...]:
    """The shortest sequence that, repeated and cut at the end, gives these entries."""
    entries = tuple(entries)
    count = len(entries)
    for size in range(1, count):
        period = entries[:size]
        times = count // size + 1
        if (period * times)[:count] == entries:
            return period
    return entries
