"""The table of variants as text and as a page: green or red for each."""

import textwrap
from dataclasses import dataclass

from conformance import ours
from conformance.rows import READ, Variant
from conformance.variants import VARIANTS

GREEN = "🟩"
RED = "🟥"


@dataclass(frozen=True)
class Cell:
    """A variant, and by fixture where our settings should give its numbers and do not.

    Example: `make conformance ARGS=cispo` prints a cell for each framework's CISPO.
    """

    variant: Variant
    differs: str

    @property
    def ours(self) -> str:
        return RED if self.variant.ours is None or self.differs else GREEN


def cells(names: list[str] | None = None) -> list[Cell]:
    """All of them, or those whose name contains one of `names`. Runs our algorithms."""
    chosen = [variant for name, variant in VARIANTS.items() if not names or any(part in name for part in names)]
    return [Cell(variant, _differs(variant)) for variant in chosen]


def _differs(variant: Variant) -> str:
    # one reason may hold for several fixtures
    wheres: dict[str, list[str]] = {}
    for fixture, words in (ours.differs(variant) if variant.ours else {}).items():
        if words:
            wheres.setdefault(words, []).append(fixture)
    return "; ".join(f"{words} ({', '.join(names)})" for words, names in wheres.items())


def settings_text(settings: dict) -> str:
    """Settings of ours as overrides, without what stands at its default."""
    words = []
    for key, value in settings.items():
        if key == "_target_":
            words.append(value.rpartition(".")[2])
        elif isinstance(value, dict):
            function = value["_target_"].rpartition(".")[2]
            bound = ", ".join(f"{name}={item}" for name, item in value.items() if name[0] != "_")
            words.append(f"{key}={function}" + (f"({bound})" if bound else ""))
        else:
            words.append(f"{key}={'null' if value is None else value}")
    return " ".join(words)


def for_terminal(found: list[Cell], with_formulas: bool = False) -> str:
    """For a terminal: a line for each, or three."""
    lines = []
    for cell in found:
        # why it is not green, if it is not
        variant = cell.variant
        word = "green" if cell.ours == GREEN else "red"
        reason = cell.differs or (variant.why if cell.ours == RED else "")
        lines.append(f"{variant.name:<28} {word:<6} {reason}".rstrip())
        if with_formulas:
            lines.append(f"    {variant.formula}")
            if variant.ours is not None:
                lines.append(f"    ours: {settings_text(variant.ours)}")
    return "\n".join(lines)


HEAD = """\
# What each framework means by a name

The same name means different mathematics in different frameworks. `tests/conformance` writes this page, and a test
compares them. An entry is an objective as one framework defines it. 🟩 means that settings of ours give the same
numbers on every fixture of `tests/conformance/fixtures.py`. Loss and gradient are within 1e-4 of the formula in float64
numpy. 🟥 means that no settings do, and the entry says why.

`lp` is the log-probability of a token now. `old` is that of the trainer when it was sampled, `sampler` that of the
sampler, and `ref` that of the reference. `rho` is exp(lp - old), and `w` is exp(old - sampler). A is the advantage, and
sg is a value without gradient. "Token mean" is 1 / all tokens of the batch.

Settings that an entry does not name are `advantages=centre`, `weighting=per_token`, and the defaults of `GRPO`. An
entry with the surrogate `clip`, the default, that names no clip has `clip_low=0.2 clip_high=0.2`.

For an entropy or a divergence the distribution of a token is over four tokens: the policy has the logits (lp, 0, -1,
-2), the teacher (ref, 0, -1, -2). `tests/test_comparison.py` checks divergences of whole models.

```bash
make conformance
make conformance ARGS=cispo
```

The first prints this table, the second the variants of one name with their formulas.
"""


def page(found: list[Cell]) -> str:
    """docs/references/conformance.md, of all cells."""
    parts = [HEAD, _summary(found)]
    for objective in dict.fromkeys(cell.variant.objective for cell in found):
        rows = [cell for cell in found if cell.variant.objective == objective]
        parts.append("\n".join([f"## {objective}", "", *_rows(rows)]))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _summary(found: list[Cell]) -> str:
    # counts of the table below
    green = sum(cell.ours == GREEN for cell in found)
    frameworks = sorted({cell.variant.by for cell in found} - {"paper"})
    objectives = len({cell.variant.objective for cell in found})
    words = (
        f"{len(found)} variants of {objectives} names in {len(frameworks)} frameworks; "
        f"{green} of them are settings of ours."
    )
    lines = [*_wrapped(words), "", "Read in:", ""]
    return "\n".join(lines + [f"- `{name}`: {READ[name]}" for name in READ])


def _rows(rows: list[Cell]) -> list[str]:
    """A line for each: the colour, the formula, our settings, and why not. Frameworks whose entries are equal share one."""
    lines = []
    shared: dict[tuple, list[Cell]] = {}
    for cell in rows:
        same = cell.variant.formula, str(cell.variant.ours), cell.differs, cell.variant.why
        shared.setdefault(same, []).append(cell)
    for cell, *others in shared.values():
        variant = cell.variant
        by = ", ".join(each.variant.by for each in (cell, *others))
        settings = "" if variant.ours is None else f"`{_briefly(settings_text(variant.ours))}`"
        remark = "; ".join(part for part in (settings, _escaped(cell.differs), _escaped(variant.why)) if part)
        entry = f"{cell.ours} **{by}**: {_escaped(variant.formula)}." + (f" {remark}." if remark else "")
        lines += _wrapped(f"- {entry}", "  ")
    return lines


def _briefly(settings: str) -> str:
    """Without the words that the head of the page says once."""
    usual = ["GRPO", "advantages=centre", "weighting=per_token"]
    if "surrogate=" not in settings or "surrogate=clip(" in settings:
        usual += ["clip_low=0.2", "clip_high=0.2"] if "clip_low=0.2 clip_high=0.2" in settings else []
    return " ".join(word for word in settings.split(" ") if word not in usual) or "GRPO"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _escaped(formula: str) -> str:
    """As Markdown; a minus sign that begins a line would begin a list."""
    for plain, written in (("*", "\\*"), ("_", "\\_"), ("<", "\\<"), ("- ", "\N{MINUS SIGN} ")):
        formula = formula.replace(plain, written)
    return formula
