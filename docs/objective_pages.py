"""Writes docs/references/objectives/NAME.md, a page for each file of conf/algorithm:

    python docs/objective_pages.py

Formula, settings, choices, other frameworks and metrics are read from the code that has them. What
is written by hand stands in WORDS. tests/test_objective_pages.py compares the pages with what this
makes, so neither can change alone.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config_reference import FUNCTIONS

from tunix_lite.algorithms import advantages as adv
from tunix_lite.algorithms import (
    checks,
    distill,
    dpo,
    ratios,
    shaping,
    surrogates,
    variants,
    weighting,
)
from tunix_lite.algorithms.formula import PIECES
from tunix_lite.algorithms.pieces import function_of, settings_of
from tunix_lite.commands.program import compose, conf_dir
from tunix_lite.conformance import adapters
from tunix_lite.conformance.rows import Variant
from tunix_lite.conformance.variants import VARIANTS

DOCS = Path(__file__).parent
FOLDER = DOCS / "references" / "objectives"
METRICS = DOCS / "references" / "metrics.md"
WIDTH = 118
DISTRIBUTIONS = "preferences_and_distillation.md#two-distributions-in-place-of-one-token"
LOG = "[Log](../../log.md), 22 November 2026."
AT_1E4 = (
    "60 steps of the quick start at `optimizer.learning_rate=1e-4 optimizer.schedule=linear`, seed "
    "0, took the greedy accuracy from 42.2 % to {} %."
)
NOT_LOGGED = "The log has no run of it by itself."


@dataclass(frozen=True)
class Words:
    """What is written by hand about an objective."""

    title: str
    what: str  # three sentences: what it is
    when: str  # when to take it
    paper: str  # arXiv number; "": there is none
    rows: tuple[str, ...]  # its names in the table of conformance
    seen: str = NOT_LOGGED
    more: tuple[str, ...] = ()  # overrides that its command needs
    others: tuple[str, ...] = ()  # overrides of further commands
    metrics: tuple[str, ...] = ()  # beside those that follow from its settings


WORDS = {
    "grpo": Words(
        "GRPO",
        "GRPO samples a group of completions for each prompt and compares them with each other. A "
        "completion that is better than its group becomes likelier, and a worse one less likely. "
        "A clip ends the gradient of a token whose probability has already moved far.",
        "Take it when in doubt. It is the default.",
        "2402.03300",
        ("grpo", "grpo_default", "two_sided_clip"),
        "60 steps of the quick start at a constant rate of 4e-5 ended at 95.3, 94.9 and 95.3 % "
        "greedy accuracy (seeds 0, 1 and 2).",
        others=(
            "algorithm.kl_coef=0.02",
            "algorithm.mini_batches=4 algorithm.updates_per_rollout=4",
        ),
    ),
    "dr_grpo": Words(
        "Dr. GRPO",
        "Dr. GRPO is GRPO without two divisions. It does not divide the advantage by the standard "
        "deviation of the group. It divides each completion by the same constant, so a long wrong "
        "answer pays for every token.",
        "Take it when completions grow longer and no better.",
        "2503.20783",
        ("dr_grpo",),
    ),
    "dapo": Words(
        "DAPO",
        "DAPO replaces groups in which all rewards are equal, since such groups teach nothing. "
        "Its upper clip is higher than the lower one, so rare tokens may grow. Completions near "
        "the limit of length lose reward.",
        "Take it when most groups agree, because the task is very easy or very hard.",
        "2503.14476",
        ("dapo",),
        AT_1E4.format("94.1")
        + " It sampled 1,808 prompts and kept 960. The further rounds took 22.2 of 220 s.",
        others=("algorithm.max_rounds=5",),
        metrics=("prompts/drawn", "prompts/mixed", "prompts/kept", "time/extra_rounds"),
    ),
    "gspo": Words(
        "GSPO",
        "GSPO gives a completion one ratio, the geometric mean of the ratios of its tokens. The "
        "clip then keeps or leaves out the whole completion. Its bounds are much nearer to 1 than "
        "those of a token.",
        "Take it for several updates from one rollout, and for long answers.",
        "2507.18071",
        ("gspo", "gspo_token_mean", "luspo"),
        AT_1E4.format("95.3"),
        others=("algorithm.mini_batches=4 algorithm.updates_per_rollout=4",),
    ),
    "cispo": Words(
        "CISPO",
        "CISPO uses the ratio as a fixed weight of the log-probability. The weight has an upper "
        "bound. Every token keeps its gradient, where a clip would end it.",
        "Take it when clipping silences rare tokens that decide the answer.",
        "2506.13585",
        ("cispo", "cispo_default"),
        AT_1E4.format("95.3"),
    ),
    "dppo": Words(
        "DPPO",
        "DPPO looks at how far the probability of a token has moved, and not at the ratio. A "
        "token that has moved too far in the direction of its advantage is left out. A rare token "
        "may therefore change its ratio a lot.",
        "Take it when samples are old, or come from another engine.",
        "2602.04879",
        ("dppo",),
        AT_1E4.format("94.9"),
    ),
    "sapo": Words(
        "SAPO",
        "SAPO replaces the clip with a smooth gate. The gate is a sigmoid of the ratio, so the "
        "gradient fades and never ends at once. Negative advantages have a slightly steeper gate.",
        "Take it when the edge of a clip is too hard.",
        "2511.20347",
        ("sapo",),
    ),
    "gmpo": Words(
        "GMPO",
        "GMPO takes the geometric mean of the token ratios of a completion. Each log-ratio is "
        "clipped before the mean, in the direction of the advantage. One outlier among the tokens "
        "then counts little.",
        "Take it when single ratios are outliers.",
        "2507.20673",
        ("gmpo",),
    ),
    "rloo": Words(
        "RLOO",
        "RLOO is plain REINFORCE with a good baseline. The baseline of a completion is the mean "
        "reward of the other completions of its group. There is no ratio and no clip.",
        "Take it for one update per rollout, when you want the simplest objective.",
        "2402.14740",
        ("rloo", "reinforce"),
        AT_1E4.format("94.9"),
        others=("algorithm.kl_coef=0.01 algorithm.kl_estimator=k1_reward",),
    ),
    "reinforce_pp": Words(
        "REINFORCE++",
        "REINFORCE++ subtracts the mean of the group from each reward. It then whitens the result "
        "over all tokens of the batch. The scale of an advantage therefore does not hang on one "
        "small group.",
        "Take it when groups are small.",
        "2501.03262",
        ("reinforce_pp", "reinforce_pp_baseline"),
        AT_1E4.format("94.9"),
        others=("algorithm.num_generations=4",),
    ),
    "maxrl": Words(
        "MaxRL",
        "MaxRL divides the advantage by the success rate of the group. A right answer to a hard "
        "prompt then counts more than one to an easy prompt. It needs rewards of 0 and 1.",
        "Take it when hard prompts matter and the rewards are 0 or 1.",
        "2602.02710",
        ("maxrl",),
        AT_1E4.format("94.5"),
    ),
    "scalerl": Words(
        "ScaleRL",
        "ScaleRL is the objective of CISPO with advantages that are scaled over the batch. Groups "
        "of equal rewards get no weight. It is the objective of the paper, without its pipeline "
        "and its forced interruptions.",
        "Take it for large runs.",
        "2510.13786",
        ("scalerl", "batch_scaled"),
        AT_1E4.format("94.9"),
        others=("curriculum.drop_at=0.9",),
    ),
    "gdpo": Words(
        "GDPO",
        "GDPO standardises each reward by itself within the group. It then adds them up with "
        "their weights. The sum is standardised once more over the batch.",
        "Take it when a task has several rewards of unlike size.",
        "2601.05242",
        ("gdpo",),
    ),
    "dpo": Words(
        "DPO",
        "DPO learns from pairs of completions of which one is better. It makes the chosen one "
        "likelier than the rejected one, measured against a reference. The pairs come from a "
        "file, or from sampled groups.",
        "Take it when you have preferences and no reward.",
        "2305.18290",
        ("dpo", "ipo"),
        more=("algorithm.pairs=sampled", "algorithm.num_generations=8"),
        others=(
            "task=preferences task.train=data/pairs.jsonl training.prompts_per_step=4 "
            "evaluation.num_examples=0",
        ),
        metrics=(
            "train/dpo_loss",
            "train/margin",
            "train/pair_accuracy",
            "completions/mean_length_chosen",
            "completions/mean_length_rejected",
        ),
    ),
    "distill": Words(
        "On-policy distillation",
        "The policy samples, and a frozen teacher scores what it wrote. Tokens that the teacher "
        "finds likelier than the policy did become likelier. A reward may be added.",
        "Take it when a better model with the same tokenizer is at hand.",
        "2306.13649",
        tuple(
            dict.fromkeys(
                v.objective for v in VARIANTS.values() if v.objective.startswith("distill")
            )
        ),
        "The teacher was a trained quick start with 95.3 % greedy. The base of the quick start "
        "came to 85 % greedy by step 8, and GRPO by step 10 (one seed, constant 4e-5). It came to "
        "80 % avg@4 by step 38 with `divergence=token`, by step 36 with `reverse`, and GRPO by "
        "step 44. No run of distillation came to 85 % avg@4.",
        others=(
            "algorithm.divergence=reverse",
            "algorithm.divergence=forward algorithm.top_k=64",
            "algorithm.teacher.storage=int8 algorithm.reward_coef=0.5",
        ),
        metrics=("train/teacher_kl", "train/teacher_gap_max", "train/teacher_divergence"),
    ),
    "sft": Words(
        "SFT",
        "Supervised fine-tuning makes the demonstrations of the task likelier. Nothing is "
        "sampled. There is no reward in the loss.",
        "Take it first when you have answers to copy, and RL after it.",
        "",
        ("sft",),
        "On the bundled base with reasoning-gym 0.1.25 at a rate of 1e-3, basic_arithmetic went "
        "from 5.1 to 50.8 % in 200 steps.",
        others=(
            "algorithm.weighting._target_=tunix_lite.algorithms.weighting.per_sequence "
            "optimizer.learning_rate=1e-3",
        ),
        metrics=("completions/mean_length",),
    ),
}
OF_ALL = ("train/loss", "train/grad_norm", "train/entropy", "train/learning_rate", "eval/accuracy")
OF_SAMPLES = (
    "reward/mean",
    "reward/groups_mixed",
    "completions/correct",
    "completions/mean_length",
)
OF_RATIOS = ("advantage/std", "train/ratio_mean", "train/ratio_max", "train/sampler_gap")

# metrics whose line on their page refers to its neighbours
FORMULAS = {
    "advantage/std": "standard deviation over completions of their advantages",
    "train/ratio_max": "the largest ratio of a token that counts",
    "train/clipped_high": "Σ w where the ratio rose above 1 + `clip_high` and clipping took "
    "the gradient",
    "train/teacher_gap_max": "the largest abs(old_logprob - teacher_logprob)",
}
HOW_TO_READ = {
    "train/sampler_gap": "rounding in the first update",
    "train/clipped_low": "0 in the first update",
    "train/clipped_high": "0 in the first update",
    "train/ratio_outside_clip": "0 in the first update, but for rounding",
    "completions/mean_length_rejected": "compare it with that of `chosen`",
}

# ---- the formula

# As formula.PIECES, in TeX; @name@ is a setting of the piece.
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
    weighting.per_sequence: "*N* is the number of completions of the update, and *T* the tokens "
    "of a completion.",
    weighting.constant_length: "*N* is the number of completions of the update, and *L* is "
    "`generation.max_new_tokens`.",
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
    shaping.overlong: "*T* is the number of tokens of a completion, and *L* is "
    "`generation.max_new_tokens`.",
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
            ""
            f"divergences](../../guide/{DISTRIBUTIONS}) "
            "compare whole distributions."
        ],
    ),
    "sft": ([r"\mathrm{loss} = - \sum_t w_t \, \ell_t", TEX[weighting.per_token]], []),
}
SYMBOLS = (
    "$\\ell_t$ is the log-probability of token *t* now, and $\\ell_t^{old}$ that under the policy "
    "that sampled it."
)


def formulas(name: str, algorithm: Any) -> tuple[list[str], list[str]]:
    """The lines of TeX for an objective with its default settings, and what the letters are."""
    if name in OF_THE_REST:
        tex, legend = OF_THE_REST[name]
        own = "" if name == "distill" else SYMBOLS.split(",")[0] + "."
        known = {
            key: f"{value:g}" for key, value in vars(algorithm).items() if isinstance(value, float)
        }
        return [_filled(line, known) for line in tex], [own or SYMBOLS, *legend]
    # the loss, then its pieces
    clipped = {"clipped": _clipped(algorithm.clip_low, algorithm.clip_high)}
    lines = [r"\mathrm{loss} = - \sum_t w_t \, g_t"]
    legend = [SYMBOLS]
    for piece in (
        algorithm.surrogate,
        algorithm.ratio,
        algorithm.advantages,
        algorithm.weighting,
        algorithm.shaping,
    ):
        if piece is None:
            continue
        function = function_of(piece)
        known = {key: _number(value) for key, value in settings_of(piece).items()} | clipped
        if function is shaping.overlong:
            known["free"] = f"{1 - settings_of(piece)['buffer']:g}"
        lines.append(_filled(TEX[function], known))
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


@dataclass(frozen=True)
class Setting:
    """A setting as YAML has it."""

    key: str  # with dots, below algorithm
    default: str
    comment: str


def settings(name: str) -> list[Setting]:
    """Those of conf/algorithm/NAME.yaml, and those that it takes from parts/common.yaml."""
    file = conf_dir() / "algorithm" / f"{name}.yaml"
    own = _read(file.read_text())
    common = (
        _read((file.parent / "parts" / "common.yaml").read_text())
        if "parts/common" in file.read_text()
        else {}
    )
    # in the order of the common ones, and what belongs to a setting right after it
    tops = dict.fromkeys(
        [*(key for key in own if "." not in key), *(key for key in common if "." not in key)]
    )
    merged = common | own
    return [
        merged[key] for top in tops for key in merged if key == top or key.startswith(f"{top}.")
    ]


def _read(text: str) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    above: list[str] = []
    parent = ""
    for line in text.splitlines()[1:]:
        if line.lstrip().startswith("# "):
            above.append(line.lstrip().removeprefix("# "))
            continue
        match = re.match(r"( *)(\w+):\s*(.*?)\s*(?:# (.*))?$", line)
        if not match:
            continue
        indent, key, value, comment = match.groups()
        comment = comment or " ".join(above)
        above = []
        if key == "defaults" or (key == "_target_" and not indent):
            continue
        if key == "_target_":
            found[parent] = Setting(parent, value.rpartition(".")[2], found[parent].comment)
            continue
        parent = parent if indent else key
        path = f"{parent}.{key}" if indent else key
        found[path] = Setting(path, value, comment)
    return found


def choices(name: str, setting: Setting) -> tuple[str, ...]:
    """The words that a setting takes; (): a number, a text, or what the comment says."""
    literal = checks.CHOICES | {"pairs": dpo.PAIRS, "divergence": distill.DIVERGENCES}
    if setting.key in literal:
        return tuple(literal[setting.key])
    if setting.key == "variant":
        return tuple(by for by, changes in variants.VARIANTS.get(name, {}).items() if changes)
    if setting.default in ("true", "false"):
        return ("true", "false")
    if name == "sft" or "." not in setting.key:
        return tuple(dict.fromkeys(_functions(setting.key)))
    return ()


def _functions(key: str) -> Iterator[str]:
    """The functions that a setting may name: those that have a formula."""
    for title, modules, _ in FUNCTIONS:
        if title.endswith(f"`algorithm.{key}`"):
            names = {module.__name__ for module in modules}
            yield from (f.__name__ for f in {**PIECES, **TEX} if f.__module__ in names)


def _setting_lines(name: str) -> Iterator[str]:
    for setting in settings(name):
        parent, _, own = setting.key.rpartition(".")
        is_ours = not parent or parent == "teacher"
        shown = f"`algorithm.{setting.key}`" if is_ours else f"`{own}` of `algorithm.{parent}`"
        text = f"{shown}: {_escaped(setting.comment)}"
        if setting.default:
            text += f" Default `{setting.default}`."
        words = choices(name, setting)
        if words:
            text += " Choices: " + ", ".join(f"`{word}`" for word in words) + "."
        yield from _wrapped(f"- {text}", "  ")


# ---- other frameworks


def _other_lines(name: str) -> Iterator[str]:
    """What each framework means by it, as tunix_lite.conformance has it."""
    for objective in WORDS[name].rows:
        for variant in VARIANTS.values():
            if variant.objective == objective:
                yield from _wrapped(f"- {_of_variant(variant)}", "  ")


def _of_variant(variant: Variant) -> str:
    text = f"**{variant.by.replace('_', '-')}**, `{variant.objective}`: `{variant.formula}`."
    if variant.why:
        text += f" {_escaped(variant.why[0].upper() + variant.why[1:])}."
    text += (
        " Settings of ours give it."
        if variant.ours is not None
        else " No settings of ours give it."
    )
    known = adapters.recorded().get(variant.by, {})
    if known.get("cells", {}).get(variant.name) == "":
        text += f" Its own function, version {known['version']}, gives this formula."
    return text


# ---- metrics


def _metric_names(name: str, algorithm: Any) -> list[str]:
    words = WORDS[name]
    if name in ("sft", "dpo", "distill"):
        return [*OF_ALL, *(OF_SAMPLES if name == "distill" else ()), *words.metrics]
    names = [*OF_ALL, *OF_SAMPLES, *OF_RATIOS]
    if function_of(algorithm.surrogate) not in (surrogates.policy_gradient, surrogates.sapo):
        names += ["train/clipped_low", "train/clipped_high"]
    if surrogates.takes_bounds(algorithm.surrogate):
        names.append("train/ratio_outside_clip")
    return [*names, *words.metrics]


def _metric_lines(names: list[str]) -> Iterator[str]:
    """What docs/references/metrics.md says of them."""
    rows = {}
    for line in METRICS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            rows.setdefault(cells[0].strip("`"), cells)
    for name in names:
        _, formula, how = rows[name]
        what = FORMULAS.get(name, formula)
        reading = HOW_TO_READ.get(name, how)
        text = f"- `{name}`: {_escaped(what)}. {_escaped(reading[0].upper() + reading[1:])}."
        yield from _wrapped(text, "  ")


# ---- the page


def render(name: str) -> str:
    """The whole page of an objective."""
    words = WORDS[name]
    chosen = " ".join([f"algorithm={name}", *words.more])
    algorithm = compose(chosen.split()).algorithm
    tex, legend = formulas(name, algorithm)
    parts = [
        f"# {words.title}: `algorithm={name}`",
        _paragraph(f"{words.what} {words.when}"),
        "## Formula",
        *("$$\n" + "\n".join(_wrapped(line)) + "\n$$" for line in tex),
        _paragraph(" ".join(legend)),
    ]
    if name != "sft":
        parts += [
            "The panel at the start of a run prints the same in text:",
            "```text\n"
            + "\n".join(x for line in algorithm.formula for x in textwrap.wrap(line, WIDTH))
            + "\n```",
        ]
    parts += [
        "## Run it",
        "On the tiny model of the quick start, on any machine:",
        _command(chosen),
    ]
    if words.others:
        base = f"algorithm={name}"
        parts += [
            "With other settings:",
            "\n\n".join(_command(f"{base} {more}") for more in words.others),
        ]
    parts += [
        "## What it was seen to do",
        _paragraph(f"{words.seen} {LOG if words.seen != NOT_LOGGED else ''}"),
    ]
    if name not in ("sft", "dpo", "distill"):
        parts.append(
            "The [overview](../../guide/objectives.md#presets) has three seeds of every objective "
            "of this family."
        )
    parts += _reference_parts(name, algorithm)
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _reference_parts(name: str, algorithm: Any) -> list[str]:
    """What is looked up: settings, source, other frameworks, metrics."""
    words = WORDS[name]
    source = (
        f"The paper is [arXiv:{words.paper}](https://arxiv.org/abs/{words.paper})."
        if words.paper
        else ""
    )
    file = f"conf/algorithm/{name}.yaml"
    here = f"Its settings are [{file}](../../../{file})."
    parts = ["## Settings", "\n".join(_setting_lines(name))]
    parts += ["## Source", _paragraph(f"{source} {here}")]
    parts += ["## Elsewhere"]
    parts.append(
        _paragraph(
            "In these formulas `lp` is the log-probability of a token now, and `old` the one when "
            "it was sampled. `rho` is exp(lp - old). [What names mean](../conformance.md) has all "
            "of them."
        )
    )
    parts.append("\n".join(_other_lines(name)))
    offered = [by for by, changes in variants.VARIANTS.get(name, {}).items() if changes]
    if offered:
        parts.append("One override takes the definition of another framework:")
        lines = [
            f"python run_training.py algorithm={name} algorithm.variant={by}" for by in offered
        ]
        parts.append("```bash\n" + "\n".join(lines) + "\n```")
    refused = variants.REFUSED.get(name, {})
    if refused:
        parts.append("These are known and not offered:")
        parts.append("\n".join(f"- `{by}`: {why}." for by, why in refused.items()))
    parts += ["## Metrics", "These say most about it; [metrics](../metrics.md) has all of them."]
    parts.append("\n".join(_metric_lines(_metric_names(name, algorithm))))
    guide = "preferences_and_distillation" if name in ("dpo", "distill") else "objectives"
    parts.append(
        f"More: [the guide](../../guide/{guide}.md), [an algorithm of your "
        f"own](../../extend/algorithm.md)."
    )
    return parts


def _command(overrides: str) -> str:
    lines = textwrap.wrap(f"python run_training.py {overrides}", WIDTH - 4, break_on_hyphens=False)
    return "```bash\n" + " \\\n  ".join(lines) + "\n```"


def _paragraph(text: str) -> str:
    return "\n".join(_wrapped(text.strip()))


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _escaped(text: str) -> str:
    """Plain text with `code` in it, as Markdown."""
    pieces = re.split(r"(`[^`]+`)", text)
    return "".join(
        x if i % 2 else re.sub(r"([\\*_<>\[\]])", r"\\\1", x) for i, x in enumerate(pieces)
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in WORDS:
        (FOLDER / f"{name}.md").write_text(render(name))
