"""Writes docs/references/objectives.md, a section for each file of conf/algorithm:

    python docs/objective_pages.py

Formulas and settings are read from the code that has them. What is written by hand stands
in WORDS. tests/test_written_pages.py compares the page with what this makes, so neither can
change alone.
"""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tunix_lite.algorithms import advantages as adv
from tunix_lite.algorithms import ratios, shaping, surrogates, weighting
from tunix_lite.algorithms.objective import function_of, settings_of
from tunix_lite.settings.compose import compose, conf_dir

PAGE = Path(__file__).parent / "references" / "objectives.md"
WIDTH = 118
DISTRIBUTIONS = "preferences_and_distillation.md#two-distributions-in-place-of-one-token"


@dataclass(frozen=True)
class Words:
    """The hand-written part of a section."""

    what: str  # up to three sentences: what it is
    paper: str  # arXiv number; "": there is none
    more: tuple[str, ...] = ()  # overrides that its command needs
    others: tuple[str, ...] = ()  # overrides of further commands


WORDS = {
    "grpo": Words(
        "GRPO samples a group of completions for each prompt and compares their rewards. A "
        "completion that is better than its group becomes likelier, and a worse one less likely. "
        "A clip ends the gradient of a token whose probability has already moved far.",
        "2402.03300",
        others=(
            "algorithm.kl_coef=0.02",
            "algorithm.mini_batches=4 algorithm.updates_per_rollout=4",
        ),
    ),
    "dr_grpo": Words(
        "Dr. GRPO is GRPO without two divisions. It does not divide the advantage by the standard "
        "deviation of the group. It divides each completion by the same constant, so a long wrong "
        "answer pays for every token.",
        "2503.20783",
    ),
    "dapo": Words(
        "DAPO replaces groups in which all rewards are equal, since such groups teach nothing. "
        "Its upper clip is higher than the lower one, so rare tokens may grow. Completions near "
        "the limit of length lose reward.",
        "2503.14476",
        others=("algorithm.max_rounds=5",),
    ),
    "gspo": Words(
        "GSPO gives a completion one ratio, the geometric mean of the ratios of its tokens. The "
        "clip then keeps or leaves out the whole completion. Its bounds are much nearer to 1 than "
        "those of a token.",
        "2507.18071",
        others=("algorithm.mini_batches=4 algorithm.updates_per_rollout=4",),
    ),
    "cispo": Words(
        "CISPO uses the ratio as a fixed weight of the log-probability. The weight has an upper "
        "bound. Every token keeps its gradient, where a clip would end it.",
        "2506.13585",
    ),
    "dppo": Words(
        "DPPO looks at how far the probability of a token has moved, and not at the ratio. A "
        "token that has moved too far in the direction of its advantage is left out. A rare token "
        "may therefore change its ratio a lot.",
        "2602.04879",
    ),
    "sapo": Words(
        "SAPO replaces the clip with a smooth gate. The gate is a sigmoid of the ratio, so the "
        "gradient fades and never ends at once. Negative advantages have a slightly steeper gate.",
        "2511.20347",
    ),
    "gmpo": Words(
        "GMPO takes the geometric mean of the token ratios of a completion. Each log-ratio is "
        "clipped before the mean, in the direction of the advantage. One outlier among the tokens "
        "then counts little.",
        "2507.20673",
    ),
    "rloo": Words(
        "RLOO is plain REINFORCE with a good baseline. The baseline of a completion is the mean "
        "reward of the other completions of its group. There is no ratio and no clip.",
        "2402.14740",
        others=("algorithm.kl_coef=0.01 algorithm.kl_estimator=k1_reward",),
    ),
    "reinforce_pp": Words(
        "REINFORCE++ subtracts the mean of the group from each reward. It then whitens the result "
        "over all tokens of the batch. The scale of an advantage therefore does not hang on one "
        "small group.",
        "2501.03262",
        others=("algorithm.num_generations=4",),
    ),
    "maxrl": Words(
        "MaxRL divides the advantage by the success rate of the group. A right answer to a hard "
        "prompt then counts more than one to an easy prompt. It needs rewards of 0 and 1.",
        "2602.02710",
    ),
    "scalerl": Words(
        "ScaleRL is the objective of CISPO with advantages that are scaled over the batch. Groups "
        "of equal rewards get no weight, and every other prompt counts the same. "
        "The paper's pipeline and its forced interruptions are not here.",
        "2510.13786",
    ),
    "gdpo": Words(
        "GDPO standardises each reward by itself within the group. It then adds them up with "
        "their weights. The sum is standardised once more over the batch.",
        "2601.05242",
    ),
    "dpo": Words(
        "DPO learns from pairs of completions of which one is better. It makes the chosen one "
        "likelier than the rejected one, measured against a reference. The pairs come from a "
        "file, or from sampled groups.",
        "2305.18290",
        more=("algorithm.pairs=sampled", "algorithm.num_generations=8"),
        others=(
            "task=preferences task.train=data/pairs.jsonl training.prompts_per_step=4 "
            "evaluation.num_examples=0",
        ),
    ),
    "reward_model": Words(
        "A reward model gives a whole conversation one number. It learns to give the chosen one of "
        "two a larger number than the rejected one. Nothing is sampled, and the model that comes "
        "out is a reward of other runs.",
        "2203.02155",
        more=(
            "task=preferences",
            "task.train=data/pairs.jsonl",
            "training.prompts_per_step=4",
        ),
        others=("task=preferences task.train=data/pairs.jsonl algorithm.centering=0.01",),
    ),
    "ppo": Words(
        "PPO trains a critic beside the policy. The critic learns what reward is still to come "
        "after each token, and an advantage is what a token brought beyond that. So one "
        "completion of a prompt is enough, and every token has an advantage of its own.",
        "1707.06347",
        others=(
            "algorithm.critic=own algorithm.critic_warmup=10",
            "algorithm.num_generations=1 training.prompts_per_step=128",
        ),
    ),
    "distill": Words(
        "The policy samples, and a frozen teacher scores what it wrote. Tokens that the teacher "
        "finds likelier than the policy did become likelier. A reward may be added.",
        "2306.13649",
        others=(
            "algorithm.divergence=reverse",
            "algorithm.divergence=forward",
            "algorithm.teacher.storage=int8 algorithm.reward_coef=0.5",
        ),
    ),
    "sft": Words(
        "Supervised fine-tuning makes the demonstrations of the task likelier. Nothing is "
        "sampled. There is no reward in the loss.",
        "",
        others=(
            "algorithm.weighting._target_=tunix_lite.algorithms.weighting.per_sequence "
            "optimizer.learning_rate=1e-3",
        ),
    ),
}
# ---- the formula

# In TeX; @name@ is a setting of the piece.
TEX = {
    adv.standardise: r"A = \frac{r - \mathrm{mean}_{group}(r)}{\mathrm{std}_{group}(r) + @eps@}",
    adv.centre: r"A = r - \mathrm{mean}_{group}(r)",
    adv.leave_one_out: r"A_i = r_i - \frac{1}{G - 1} \sum_{j \neq i} r_j",
    adv.max_likelihood: r"A = \frac{r - \mathrm{mean}_{group}(r)}{\mathrm{mean}_{group}(r) + "
    r"@eps@}",
    adv.batch_scaled: r"A = \frac{r - \mathrm{mean}_{@mean@}(r)}{\mathrm{std}_{batch}(r) + @eps@}",
    adv.whiten: r"A = \frac{a - \mathrm{mean}_{@over@}(a)}{\sqrt{\mathrm{var}_{@over@}(a) + "
    r"@eps@}}, \quad "
    r"a = r - \mathrm{mean}_{group}(r)",
    adv.per_reward: r"A = \mathrm{standardised}_{batch} \sum_k c_k "
    r"\frac{r_k - \mathrm{mean}_{group}(r_k)}{\mathrm{std}_{group}(r_k) + @eps@}",
    weighting.per_token: r"w_t = \frac{1}{\mathrm{tokens\ of\ the\ update}}",
    weighting.per_sequence: r"w_t = \frac{1}{N \, T}",
    weighting.per_prompt: r"w_t = \frac{1}{P \, T_P}",
    weighting.constant_length: r"w_t = \frac{1}{N \, L}",
    ratios.token_ratio: r"\rho_t = \exp(\ell_t - \ell_t^{old})",
    ratios.sequence_ratio: r"\rho = \exp \left( \frac{1}{T} \sum_t (\ell_t - \ell_t^{old}) \right)",
    ratios.no_ratio: r"\rho_t = \exp(\ell_t - \mathrm{sg}[\ell_t]) = 1",
    surrogates.clip: r"g_t = \min(\rho_t A, \; @clipped@ A)",
    surrogates.cispo: r"g_t = \mathrm{sg}[@clipped@] \, A \, \ell_t",
    surrogates.sapo: r"g_t = \frac{4}{\tau} \, \sigma(\tau (\rho_t - 1)) \, A",
    surrogates.binary_tv: r"g_t = m_t \, \rho_t A",
    surrogates.geometric_mean: r"g = \exp \left( \frac{1}{T} \sum_t c(\log \rho_t) \right) A",
    surrogates.policy_gradient: r"g_t = \rho_t A",
    shaping.overlong: r"r = r_{task} - @factor@ \, \mathrm{clip} \left( \frac{T - @free@ "
    r"L}{@buffer@ L}, 0, 1 \right)",
}
LEGEND = {
    adv.leave_one_out: "*G* is the number of completions of a prompt.",
    adv.max_likelihood: "*A* is 0 where the mean is 0.",
    adv.per_reward: "$c_k$ is the weight of reward *k*.",
    weighting.per_prompt: "*P* is the number of prompts of the update, and *T_P* the tokens of all "
    "completions of the prompt.",
    surrogates.cispo: "sg is a value without gradient.",
    surrogates.sapo: "*τ* is @tau_positive@ where *A* > 0, else @tau_negative@.",
    surrogates.binary_tv: "$m_t$ is 0 where *A* > 0 and the probability of the token has risen "
    "by more than "
    "@delta_high@. It is 0, too, where *A* < 0 and it has fallen by more than @delta_low@. Else "
    "it is 1.",
    surrogates.geometric_mean: "*c* keeps a log-ratio at most @log_clip@ where *A* > 0, and at "
    "least -@log_clip@ where "
    "*A* < 0.",
    ratios.no_ratio: "sg is a value without gradient, so the gradient is that of $A \\, \\ell_t$.",
}
OF_THE_REST = {
    "dpo": (
        [
            r"\mathrm{loss} = - \frac{1}{P} \sum_{pairs} \log \sigma(@beta@ \, (s_{chosen} - "
            r"s_{rejected}))",
            r"s = \sum_t (\ell_t - \ell_t^{ref})",
        ],
        [
            "*P* is the number of pairs. $\\ell_t^{ref}$ is the log-probability of a token under "
            "the reference."
        ],
    ),
    "reward_model": (
        [
            r"\mathrm{loss} = \frac{1}{P} \sum_{pairs} (- \log \sigma(r_{chosen} - r_{rejected} - "
            r"m) + @centering@ \, (r_{chosen} + r_{rejected})^2)",
        ],
        [
            "*P* is the number of pairs, *r* the number that the model gives a conversation, and "
            "*m* the margin of the pair, or 0."
        ],
    ),
    "ppo": (
        [
            r"\mathrm{loss} = - \sum_t w_t \min(\rho_t A_t, \mathrm{clip}(\rho_t, 1 - @clip_low@, "
            r"1 + @clip_high@) A_t) + \frac{@value_coef@}{2} \sum_t w_t \max((V_t - R_t)^2, "
            r"(V'_t - R_t)^2)",
            r"\delta_t = r_t + @gamma@ \, V_{t+1}^{old} - V_t^{old}",
            r"A_t = \delta_t + @gamma@ \cdot @gae_lambda@ \, A_{t+1}",
            r"R_t = A_t + V_t^{old}",
            TEX[weighting.per_token],
        ],
        [
            "$V_t$ is the critic's value of the state before token *t*, and $V_t^{old}$ that of "
            "the critic when the completion was sampled. $V'_t$ is $V_t$, at most @value_clip@ "
            "away from $V_t^{old}$. The reward of a completion is the $r_t$ of its last token. The "
            "advantages have mean 0 and variance 1 over the rollout."
        ],
    ),
    "distill": (
        [
            r"\mathrm{loss} = - \sum_t w_t \, \rho_t \, A_t",
            r"A_t = @teacher_coef@ \, (\ell_t^{teacher} - \ell_t^{old}) + @reward_coef@ \, "
            r"A_{reward}",
            TEX[ratios.token_ratio],
            TEX[weighting.per_token],
        ],
        [
            "$\\ell_t^{teacher}$ is the log-probability of the token under the teacher. [Other "
            f"divergences](../guide/{DISTRIBUTIONS}) compare whole distributions."
        ],
    ),
    "sft": ([r"\mathrm{loss} = - \sum_t w_t \, \ell_t", TEX[weighting.per_token]], []),
}
TOP = r"""
# Objectives, one by one

A section for each `algorithm=NAME`: its formula, command, paper, and what its file in
`conf/algorithm` sets otherwise than `grpo`. [Objectives](../guide/objectives.md) compares them
and explains the pieces.

The loss of all but the last five is $- \sum_t w_t \, g_t$ over the tokens of an update. The
ratio is $\rho_t = \exp(\ell_t - \ell_t^{old})$ unless a section says otherwise. $\ell_t$ is the
log-probability of token *t* now, and $\ell_t^{old}$ that under the policy that sampled it. *r* is
the reward of a completion, and *A* its advantage. *T* is the number of tokens of a completion,
*N* the number of completions of the update, and *L* is `generation.max_new_tokens`. Where a
section does not say *g*, *A* or *w*, it is that of `grpo`.
"""


def formulas(name: str, algorithm: Any) -> tuple[list[str], list[str]]:
    """The lines of TeX for an objective with its default settings, and the meaning of letters that
    the top of the page does not have."""
    if name in OF_THE_REST:
        tex, legend = OF_THE_REST[name]
        known = {
            key: f"{value:g}"
            for key, value in vars(algorithm).items()
            if isinstance(value, float)
        }
        return [_filled(line, known) for line in tex], [
            _filled(line, known) for line in legend
        ]
    clipped = {"clipped": _clipped(algorithm.clip_low, algorithm.clip_high)}
    pieces = [
        algorithm.surrogate,
        algorithm.advantages,
        algorithm.weighting,
        algorithm.shaping,
    ]
    if function_of(algorithm.ratio) is not ratios.token_ratio:
        pieces.insert(1, algorithm.ratio)
    lines, legend = [], []
    for piece in filter(None, pieces):
        function = function_of(piece)
        known = {key: _number(value) for key, value in settings_of(piece).items()} | clipped
        if function is shaping.overlong:
            known["free"] = f"{1 - settings_of(piece)['buffer']:g}"
        line = _filled(TEX[function], known)
        if (
            name == "grpo"
            or line not in formulas("grpo", compose(["algorithm=grpo"]).algorithm)[0]
        ):
            lines.append(line)
        if function in LEGEND:
            legend.append(_filled(LEGEND[function], known))
    if algorithm.agreeing_groups != "keep":
        word = {"drop": "have no weight", "replace": "are replaced by other prompts"}[
            algorithm.agreeing_groups
        ]
        legend.append(f"Groups of equal rewards {word}.")
    return lines, legend


def _number(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, int | float) else str(value)
    return re.sub(r"^1e-0?(\d+)$", r"10^{-\1}", text)


def _filled(text: str, known: dict[str, str]) -> str:
    text = text.replace(" + @eps@", "") if known.get("eps") == "0" else text
    return re.sub("@([a-z_]+)@", lambda match: known[match[1]], text)


def _clipped(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return r"\rho_t"
    if low is None:
        return rf"\min(\rho_t, {1 + high:g})"
    return rf"\mathrm{{clip}}(\rho_t, {1 - low:g}, {1 + high:g})"


# ---- its settings


def settings(name: str) -> dict[str, str]:
    """{key below algorithm: default} of conf/algorithm/NAME.yaml and of parts/common.yaml, which it
    may take. A function goes by its last name."""
    file = conf_dir() / "algorithm" / f"{name}.yaml"
    values = yaml.safe_load(file.read_text())
    if "parts/common@_here_" in values.pop("defaults", []):
        values = yaml.safe_load((file.parent / "parts" / "common.yaml").read_text()) | values
    flat: dict[str, str] = {}
    for key, value in values.items():
        inner = value if isinstance(value, dict) else {"_target_": value}
        if key != "_target_":
            for own, x in inner.items():
                path = key if own == "_target_" else f"{key}.{own}"
                flat[path] = _shown(x)
    return flat


def _shown(x: Any) -> str:
    if x is None or isinstance(x, bool):
        return {None: "null", True: "true", False: "false"}[x]
    if isinstance(x, float):
        return f"{x:g}"
    return x.rpartition(".")[2] if str(x).startswith("tunix_lite.") else str(x)


def _setting_line(name: str) -> str:
    """The settings in which an objective differs from grpo; none of one that is of another kind."""
    if name in OF_THE_REST:
        return ""
    own, base = settings(name), settings("grpo")
    changed = [f"`{key}: {value}`" for key, value in own.items() if base.get(key) != value]
    return "Other than `grpo`: " + ", ".join(changed) + "." if changed else ""


# ---- the page


def render() -> str:
    """The whole page."""
    return "\n\n".join([top(), *map(section, WORDS)]) + "\n"


def top() -> str:
    """What holds for every section."""
    paragraphs = TOP.strip().split("\n\n")
    return "\n\n".join(map(_wrapped, paragraphs))


def section(name: str) -> str:
    """The part of the page about one objective."""
    words = WORDS[name]
    chosen = " ".join([f"algorithm={name}", *words.more])
    tex, legend = formulas(name, compose(chosen.split()).algorithm)
    paper = (
        f"[arXiv:{words.paper}](https://arxiv.org/abs/{words.paper})." if words.paper else ""
    )
    lines = [chosen, *(f"algorithm={name} {more}" for more in words.others)]
    parts = [
        f"## {name}",
        _wrapped(f"{words.what} {paper}"),
        "$$\n" + _math(", \\quad ".join(tex)) + "\n$$",
        _wrapped(" ".join(legend)),
        "```bash\n" + "\n".join(map(_command, lines)) + "\n```",
        _wrapped(f"{_setting_line(name)}"),
    ]
    return "\n\n".join(filter(None, parts))


def _command(overrides: str) -> str:
    lines = textwrap.wrap(
        f"python run_training.py {overrides}", WIDTH - 4, break_on_hyphens=False
    )
    return " \\\n  ".join(lines)


def _math(tex: str) -> str:
    # no line begins with what Markdown takes for a list or a heading, nor ends within a name
    lines = textwrap.wrap(tex.replace("\\ ", "\\\0"), WIDTH, break_on_hyphens=False)
    return re.sub(r"\n([-+=]) ", r" \1\n", "\n".join(lines)).replace("\0", " ")


def _wrapped(text: str) -> str:
    # a setting and its value stay on one line
    kept = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", "\0"), " ".join(text.split()))
    lines = textwrap.wrap(kept, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


if __name__ == "__main__":
    PAGE.write_text(render())
