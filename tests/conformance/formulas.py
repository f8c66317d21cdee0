"""The pieces of an objective in float64 numpy, and its gradient by a complex step.

A loss is a function of log-probabilities [..., B, T] that may be complex. Its derivative along a
token is Im(loss(lp + i h)) / h with h = 1e-30: no differences are taken, so nothing is rounded away
and nobody derives anything by hand. Whatever decides, such as a clip or a minimum, looks at real
parts; a stop gradient is the real part.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from conformance.fixtures import Fixture

STEP = 1e-30
# (fixture, log-probabilities [..., B, T]) -> the loss, [...]
Loss = Callable[[Fixture, np.ndarray], np.ndarray]


def value_and_gradient(loss: Loss, fixture: Fixture) -> tuple[float, np.ndarray]:
    """The loss at the fixture's log-probabilities, and its gradient [B, T], 0 off the tokens."""
    # A copy of the batch for each token, which is moved in it alone.
    here = fixture.array("logprobs")
    places = np.argwhere(fixture.counted)
    moved = np.repeat(here[None].astype(complex), len(places), axis=0)
    moved[np.arange(len(places)), places[:, 0], places[:, 1]] += 1j * STEP

    # How the loss of each copy has moved.
    gradient = np.zeros(here.shape)
    gradient[fixture.counted] = np.imag(loss(fixture, moved)) / STEP
    return float(np.real(loss(fixture, here))), gradient


# ---- what works on complex numbers


def stop(x: np.ndarray) -> np.ndarray:
    return np.real(x)


def within(x: np.ndarray, low: float | None = None, high: float | None = None) -> np.ndarray:
    """x within [low, high], without a gradient outside."""
    if low is not None:
        x = np.where(np.real(x) < low, low, x)
    if high is not None:
        x = np.where(np.real(x) > high, high, x)
    return x


def minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(np.real(a) <= np.real(b), a, b)


def sigmoid(x: np.ndarray) -> np.ndarray:
    # exp of a large number would overflow
    return 1 / (1 + np.exp(-within(x, -700, 700)))


# ---- advantages: a fixture -> [P, G], 0 where dropped


def _kept(fixture: Fixture) -> np.ndarray:
    return ~np.isnan(fixture.rewards)


def _in_groups(values_PG: np.ndarray, of_group: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """of_group(the kept values of a group) of every group with two or more; 0 elsewhere."""
    # a completion that is alone has nothing to be compared with
    found = np.zeros(values_PG.shape)
    for row, values in zip(found, values_PG):
        kept = ~np.isnan(values)
        if kept.sum() >= 2:
            row[kept] = of_group(values[kept])
    return found


def _centred(values: np.ndarray) -> np.ndarray:
    """Less the mean, exactly 0 where all agree."""
    # a mean of equal numbers can be off by a rounding
    if values.size == 0 or values.min() == values.max():
        return np.zeros(values.shape)
    return values - values.mean()


def group_std(eps: float, ddof: int = 1) -> Callable:
    """(r - mean) / (std + eps) in the group."""

    def of_group(values: np.ndarray) -> np.ndarray:
        centred = _centred(values)
        return centred / (np.sqrt((centred**2).sum() / (len(values) - ddof)) + eps)

    return lambda fixture: _in_groups(fixture.rewards, of_group)


def less_group_mean(fixture: Fixture) -> np.ndarray:
    """r - mean of the group."""
    return _in_groups(fixture.rewards, _centred)


def less_others_mean(fixture: Fixture) -> np.ndarray:
    """r - mean of the others."""
    return _in_groups(fixture.rewards, lambda r: np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]))


def peers_std(eps: float) -> Callable:
    """(r - mean of the others) / (std of the others + eps), undivided where that std is 0
    (NeMo-RL)."""

    def of_group(values: np.ndarray) -> np.ndarray:
        found = []
        for i, own in enumerate(values):
            others = np.delete(values, i)
            spread = np.sqrt((_centred(others) ** 2).sum() / max(len(others) - 1, 1))
            # this is where one of a group is left undivided and the others are not
            gap = own - others.mean()
            found.append(gap / (spread + eps) if spread > 0 else gap)
        return np.array(found)

    return lambda fixture: _in_groups(fixture.rewards, of_group)


def batch_std(eps: float, mean: str = "group", ddof: int = 1) -> Callable:
    """(r - mean of the group, or of the batch) / (std of the batch + eps)."""

    def advantages(fixture: Fixture) -> np.ndarray:
        kept = _kept(fixture)
        values = fixture.rewards[kept]
        spread = np.sqrt((_centred(values) ** 2).sum() / max(len(values) - ddof, 1))
        found = less_group_mean(fixture)
        # a prompt that is easy then has advantages for that
        if mean == "batch":
            found[kept] = _centred(values)
        return found / (spread + eps)

    return advantages


def whitened(baseline: bool, over: str = "tokens", eps: float = 1e-8) -> Callable:
    """(a - mean) / sqrt(var + eps) over the batch's tokens or samples; a = r, or r - group mean."""

    def advantages(fixture: Fixture) -> np.ndarray:
        kept = _kept(fixture)
        values = (less_group_mean(fixture) if baseline else fixture.rewards)[kept]
        # a completion counts as often as it has tokens, or once
        lengths = fixture.mask.sum(axis=1).reshape(kept.shape)[kept]
        counts = lengths if over == "tokens" else np.ones(len(values))
        found = np.zeros(kept.shape)
        if counts.sum() < 2 or values.min() == values.max():
            return found
        spread = values - (counts * values).sum() / counts.sum()
        variance = (counts * spread**2).sum() / (counts.sum() - 1)
        found[kept] = spread / np.sqrt(variance + eps)
        return found

    return advantages


def over_mean(eps: float = 0.0) -> Callable:
    """(r - mean) / (mean + eps); without eps, 0 where the mean is 0 (MaxRL)."""

    def of_group(values: np.ndarray) -> np.ndarray:
        # of negative rewards the sign would turn
        mean = values.mean() + eps
        return _centred(values) / mean if mean else np.zeros(len(values))

    return lambda fixture: _in_groups(fixture.rewards, of_group)


def each_reward(eps: float, batch_eps: float) -> Callable:
    """Each reward standardised in its group, summed, and standardised over the batch (GDPO)."""

    def advantages(fixture: Fixture) -> np.ndarray:
        kept = _kept(fixture)
        # each on a scale of its own
        total = np.zeros(kept.shape)
        for values in fixture.components:
            total += _in_groups(
                values, lambda r: _centred(r) / (np.sqrt((_centred(r) ** 2).sum() / (len(r) - 1)) + eps)
            )
        # and their sum on one of the batch
        found = np.zeros(kept.shape)
        centred = _centred(total[kept])
        spread = np.sqrt((centred**2).sum() / max(len(centred) - 1, 1)) + batch_eps
        found[kept] = centred / spread if spread else 0.0
        return found

    return advantages


def with_k1(advantages: Callable, beta: float) -> Callable:
    """Advantages of r - beta * sum_t (old - ref): the KL to the reference in the reward."""

    def changed(fixture: Fixture) -> np.ndarray:
        k1 = (fixture.array("old_logprobs") - fixture.array("ref_logprobs")).sum(axis=1)
        rewards = fixture.rewards - beta * k1.reshape(fixture.rewards.shape)
        return advantages(_with_rewards(fixture, rewards))

    return changed


def _with_rewards(fixture: Fixture, rewards: np.ndarray) -> Fixture:
    kept = {name: getattr(fixture, name) for name in Fixture.__dataclass_fields__}
    return Fixture(**kept | {"rewards": rewards})


# ---- surrogates: the terms of a batch -> gain of each token


@dataclass(frozen=True)
class Terms:
    """What a surrogate is made of; [..., B, T], but advantages are [B, 1] or [B, T].

    Example: ratio_of_tokens(terms) of a policy that has not moved is 1 everywhere.
    """

    lp: np.ndarray  # may be complex; 0 off the tokens, as the others are
    old: np.ndarray
    sampler: np.ndarray
    ref: np.ndarray
    A: np.ndarray
    mask: np.ndarray

    def mean(self, x: np.ndarray) -> np.ndarray:
        """[..., B, 1]: the mean of x over the tokens of each completion."""
        count = np.maximum(self.mask.sum(axis=-1, keepdims=True), 1)
        return np.where(self.mask, x, 0).sum(axis=-1, keepdims=True) / count


def ratio_of_tokens(terms: Terms) -> np.ndarray:
    return np.exp(terms.lp - terms.old)


def ratio_to_sampler(terms: Terms) -> np.ndarray:
    return np.exp(terms.lp - terms.sampler)


def ratio_of_completions(terms: Terms) -> np.ndarray:
    return np.exp(terms.mean(terms.lp - terms.old))


def completion_ratio_to_sampler(terms: Terms) -> np.ndarray:
    return np.exp(terms.mean(terms.lp - terms.sampler))


def completion_ratio_by_token(terms: Terms) -> np.ndarray:
    """The sequence's ratio, whose gradient is that of each token's own log-probability."""
    return np.exp(stop(terms.mean(terms.lp - terms.old)) + terms.lp - stop(terms.lp))


def clipped(low: float, high: float, ratio: Callable = ratio_of_tokens, dual: float | None = None) -> Callable:
    """min(rho A, within(rho) A); dual: where A < 0, not below dual A."""

    def gain(terms: Terms) -> np.ndarray:
        rho = ratio(terms)
        found = minimum(rho * terms.A, within(rho, 1 - low, 1 + high) * terms.A)
        if dual is None:
            return found
        # where A < 0 the minimum has no lower end
        least = dual * terms.A
        is_below = (terms.A < 0) & (np.real(found) < least)
        return np.where(is_below, least, found)

    return gain


def bounded_weight(low: float | None, high: float | None, ratio: Callable = ratio_of_tokens) -> Callable:
    """sg[rho within the absolute bounds] A lp."""

    def gain(terms: Terms) -> np.ndarray:
        return stop(within(ratio(terms), low, high)) * terms.A * terms.lp

    return gain


def soft_gate(positive: float, negative: float) -> Callable:
    """(4 / tau) sigmoid(tau (rho - 1)) A (SAPO)."""

    def gain(terms: Terms) -> np.ndarray:
        tau = np.where(terms.A > 0, positive, negative)
        return 4 / tau * sigmoid(tau * (ratio_of_tokens(terms) - 1)) * terms.A

    return gain


def tv_masked(
    delta: float, anchor: str = "sampler", cap: float | None = None, log_square: float = 0.0, drops_zero: bool = False
) -> Callable:
    """rho A, but 0 for a token whose probability has moved by more than delta along A (DPPO)."""

    def gain(terms: Terms) -> np.ndarray:
        # probabilities, not their logarithms, have a bound here
        before = getattr(terms, anchor)
        rho = np.exp(terms.lp - before)
        moved = stop(np.exp(terms.lp)) - np.exp(before)
        is_low = terms.A <= 0 if drops_zero else terms.A < 0
        out = ((terms.A > 0) & (moved > delta)) | (is_low & (moved < -delta))
        # the gradient of the ratio, or of the logarithm with a weight
        found = rho * terms.A
        if cap is not None:
            found = stop(within(rho, high=cap)) * terms.A * terms.lp
        return np.where(out, 0.0, found) - log_square * (terms.lp - before) ** 2

    return gain


def geometric_ratio(bound: float) -> Callable:
    """exp(mean_t of log rho_t, bounded by +-bound on the side of A) A (GMPO)."""

    def gain(terms: Terms) -> np.ndarray:
        # one side only: what moves along A too far
        log = terms.lp - terms.old
        up = np.broadcast_to(terms.A > 0, log.shape)
        kept = np.where(up, within(log, high=bound), within(log, low=-bound))
        return np.exp(terms.mean(kept)) * terms.A

    return gain


def plain_logprob(terms: Terms) -> np.ndarray:
    """A lp."""
    return terms.A * terms.lp


def importance(ratio: Callable = ratio_of_tokens) -> Callable:
    """rho A."""
    return lambda terms: ratio(terms) * terms.A


# ---- weights: the tokens that count [B, T] -> weights [B, T]


def token_mean(mask: np.ndarray, fixture: Fixture) -> np.ndarray:
    """1 / all tokens."""
    return mask / max(mask.sum(), 1)


def mean_of_completions(mask: np.ndarray, fixture: Fixture) -> np.ndarray:
    """1 / (completions * tokens of the completion). Empty completions are completions."""
    kept = max(int((~np.isnan(fixture.rewards)).sum()), 1)
    return mask / np.maximum(mask.sum(axis=1, keepdims=True), 1) / kept


def sum_of_completions(mask: np.ndarray, fixture: Fixture) -> np.ndarray:
    """1 / completions."""
    return mask / max(int((~np.isnan(fixture.rewards)).sum()), 1)


def over_longest_allowed(mask: np.ndarray, fixture: Fixture) -> np.ndarray:
    """1 / (completions * the longest that a completion may be)."""
    return sum_of_completions(mask, fixture) / fixture.max_length


def prompt_mean(mask: np.ndarray, fixture: Fixture) -> np.ndarray:
    """1 / (prompts * tokens of the prompt's completions)."""
    P, G = fixture.rewards.shape
    tokens = mask.reshape(P, -1).sum(axis=1)
    prompts = max(int((~np.isnan(fixture.rewards)).any(axis=1).sum()), 1)
    return mask / np.repeat(np.maximum(tokens, 1), G)[:, None] / prompts


# ---- corrections for the sampler: the terms -> a factor of the gain, without gradient


def truncate(cap: float) -> Callable:
    """min(w, cap)."""

    def factor(terms: Terms) -> np.ndarray:
        return np.minimum(np.exp(terms.old - terms.sampler), cap)

    return factor


def mask_outside(low: float, high: float) -> Callable:
    """w within [low, high], else 0."""

    def factor(terms: Terms) -> np.ndarray:
        weight = np.exp(terms.old - terms.sampler)
        return np.where((weight >= low) & (weight <= high), weight, 0.0)

    return factor


def geometric_mask(low: float, high: float) -> Callable:
    """1 for a completion whose geometric mean of w is within [low, high], else 0."""

    def factor(terms: Terms) -> np.ndarray:
        mean = np.exp(terms.mean(terms.old - terms.sampler))
        inside = (mean >= low) & (mean <= high)
        return np.where(inside, 1.0, 0.0)

    return factor


def off_policy_mask(delta: float) -> Callable:
    """0 for a completion with A < 0 whose mean of old - lp is above delta (OPSM)."""

    def factor(terms: Terms) -> np.ndarray:
        away = terms.mean(terms.old - stop(terms.lp))
        return np.where((terms.A < 0) & (away > delta), 0.0, 1.0)

    return factor


# ---- the KL to the reference: the terms -> its estimate for each token


def kl_k2(terms: Terms) -> np.ndarray:
    return 0.5 * (terms.lp - terms.ref) ** 2


def kl_k3(terms: Terms) -> np.ndarray:
    return np.exp(terms.ref - terms.lp) - (terms.ref - terms.lp) - 1


def kl_k3_ratio(terms: Terms) -> np.ndarray:
    """rho k3, with both gradients."""
    return ratio_of_tokens(terms) * kl_k3(terms)


def kl_k3_exact(terms: Terms) -> np.ndarray:
    """sg[rho] (k3 as value, k2 as gradient)."""
    return stop(ratio_of_tokens(terms)) * (stop(kl_k3(terms)) + kl_k2(terms) - stop(kl_k2(terms)))


# ---- an objective


def objective(
    advantages: Callable,
    gain: Callable,
    weighting: Callable = token_mean,
    correction: Callable | None = None,
    kl: Callable | None = None,
    kl_coef: float = 0.0,
) -> Loss:
    """loss = sum_t w_t (- factor_t gain_t + kl_coef KL_t)."""

    def loss(fixture: Fixture, logprobs: np.ndarray) -> np.ndarray:
        terms = _terms(fixture, logprobs, np.reshape(advantages(fixture), (-1, 1)))
        lost = -gain(terms)
        if correction is not None:
            lost = lost * correction(terms)
        if kl is not None:
            lost = lost + kl_coef * kl(terms)
        weight = weighting(fixture.counted, fixture)
        return np.where(terms.mask, weight * lost, 0.0).sum(axis=(-2, -1))

    return loss


def _terms(fixture: Fixture, logprobs: np.ndarray, A: np.ndarray) -> Terms:
    others = (fixture.array(f"{name}_logprobs") for name in ("old", "sampler", "ref"))
    return Terms(np.where(fixture.counted, logprobs, 0.0), *others, A, fixture.counted)


def likelihood() -> Loss:
    """- sum_t w_t lp (SFT)."""
    return objective(lambda fixture: np.ones(fixture.rewards.shape), plain_logprob)


def preferences(beta: float) -> Loss:
    """- log sigmoid(beta (s_chosen - s_rejected)), a mean over pairs, s = sum_t (lp - ref) (DPO).

    The pair of a group is its best and its worst completion, the first of equals; a group that
    agrees has none.
    """

    def loss(fixture: Fixture, logprobs: np.ndarray) -> np.ndarray:
        terms = _terms(fixture, logprobs, np.zeros((1, 1)))
        score = (terms.lp - terms.ref).sum(axis=-1)
        # a pair counts once, however long its completions are
        pairs = pairs_of(fixture)
        total = 0.0
        for best, worst in pairs:
            total = total - np.log(sigmoid(beta * (score[..., best] - score[..., worst])))
        return total / max(len(pairs), 1) + 0 * score.sum(axis=-1)

    return loss


def pairs_of(fixture: Fixture) -> list[tuple[int, int]]:
    """Rows of the best and the worst completion of each group in which two differ, but for pairs
    without any token."""
    found = []
    for p, values in enumerate(fixture.rewards):
        if np.isnan(values).all() or np.nanmin(values) == np.nanmax(values):
            continue
        start = p * len(values)
        pair = start + int(np.nanargmax(values)), start + int(np.nanargmin(values))
        if fixture.mask[list(pair)].any():
            found.append(pair)
    return found


def distillation() -> Loss:
    """- sum_t w_t rho_t A_t, A_t = - (old - teacher): the token's k1 as advantage; `ref` is the
    teacher."""

    def loss(fixture: Fixture, logprobs: np.ndarray) -> np.ndarray:
        terms = _terms(fixture, logprobs, np.zeros((1, 1)))
        # how much likelier the teacher finds what was sampled
        advantages = terms.ref - terms.old
        weight = token_mean(fixture.counted, fixture)
        lost = -ratio_of_tokens(terms) * advantages
        return np.where(terms.mask, weight * lost, 0.0).sum(axis=(-2, -1))

    return loss


# ---- of whole distributions

# A fixture has one log-probability of each token, and these need all tokens that could have been
# drawn. So a token is drawn from four, of logits lp and these; a teacher's first logit is ref.
OTHER_LOGITS = (0.0, -1.0, -2.0)


def distribution(first: np.ndarray) -> np.ndarray:
    """Log-probabilities [..., 4] of the tokens that could have been drawn."""
    others = [np.full_like(first, x) for x in OTHER_LOGITS]
    logits = np.stack([first, *others], axis=-1)
    # relative to the largest, or an exponential overflows
    logits = logits - np.real(logits).max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def less_entropy(terms: Terms) -> np.ndarray:
    """- H, to be added as a KL is."""
    logs = distribution(terms.lp)
    return (np.exp(logs) * logs).sum(axis=-1)


def forward_kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(q || p) of log-probabilities, p of the policy, q of the teacher."""
    return (np.exp(q) * (q - p)).sum(axis=-1)


def reverse_kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q)."""
    return (np.exp(p) * (p - q)).sum(axis=-1)


def jensen_shannon(mix: float) -> Callable:
    """b KL(q || m) + (1 - b) KL(p || m), m = b q + (1 - b) p; b: `mix`."""

    def apart(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        m = np.log(mix * np.exp(q) + (1 - mix) * np.exp(p))
        return mix * forward_kl(m, q) + (1 - mix) * reverse_kl(p, m)

    return apart


def divergence(apart: Callable) -> Loss:
    """sum_t w_t D(p_t, q_t), q of the teacher."""

    def loss(fixture: Fixture, logprobs: np.ndarray) -> np.ndarray:
        terms = _terms(fixture, logprobs, np.zeros((1, 1)))
        p, q = distribution(terms.lp), distribution(terms.ref)
        weight = token_mean(fixture.counted, fixture)
        return np.where(terms.mask, weight * apart(p, q), 0.0).sum(axis=(-2, -1))

    return loss
