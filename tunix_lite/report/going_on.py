"""The settings of a run, and the lines to paste: resume, measure, talk, export, repeat."""

import shlex
from collections.abc import Iterator

from tunix_lite.plain_text import escaped
from tunix_lite.report.evidence import Evidence, checkpoint_steps
from tunix_lite.report.page import Block, Commands, Folded, Table, Text

# settings in the table of all, and characters of a value
MOST_SETTINGS = 400
MOST_CHARACTERS = 160


def flat(settings: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """The dotted names of all settings, and their values."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def setting_blocks(run: Evidence, overrides: list[str] | None) -> Iterator[Block]:
    if overrides is None:
        yield Text("The run was not started from the command line. Its settings are below.")
    elif not overrides:
        yield Text("All settings are the defaults.")
    else:
        parts = [override.partition("=") for override in overrides]
        rows = [[_short(key), _short(value)] for key, _, value in parts]
        yield Table(["changed from the defaults", "value"], rows[:MOST_SETTINGS])
    facts = []
    for name in ("batch", "mesh", "versions"):
        value = run.status.get(name)
        if isinstance(value, dict):
            value = ", ".join(f"{key}={item}" for key, item in value.items())
        if value is not None:
            facts.append([name, _short(value)])
    if facts:
        yield Table(["what they come to", ""], facts)
    rows = [[_short(key), _short(value)] for key, value in flat(run.settings)]
    if rows:
        more = len(rows) - MOST_SETTINGS
        note = f"{more} more are left out." if more > 0 else ""
        yield Folded(
            f"all {len(rows)} settings",
            Table(["setting", "value"], rows[:MOST_SETTINGS], note=note),
        )


def _short(value: object) -> str:
    return escaped(str(value), MOST_CHARACTERS)


# ---- lines to paste


def command_blocks(
    run: Evidence, overrides: list[str] | None, status: str, command: str
) -> Iterator[Block]:
    steps = checkpoint_steps(run.folder)
    place = shlex.quote(str(run.folder))
    words = [shlex.quote(text) for text in overrides or [] if text.isprintable()]
    lines = []
    if overrides is not None:
        again = " ".join([command, *words])
        here = shlex.quote(f"hydra.run.dir={run.folder}")
        if status != "completed":
            does = "go on from its newest checkpoint" if steps else "begin it anew in its folder"
            lines.append((does, f"{again} {here}"))
        elif run.rows:
            more = f"training.max_steps={2 * run.rows[-1]['step']}"
            without = [text for text in words if not text.startswith("training.max_steps=")]
            lines.append(("train on", " ".join([command, *without, more, here])))
        lines.append(("make it again, in a folder of its own", again))
    if steps:
        folder = shlex.quote(f"checkpoint={run.folder}")
        of_data = ("task", "generation", "rewards")
        same = [text for text in words if text.strip("'\"+~").startswith(of_data)]
        lines += [
            ("measure it", " ".join(["tunix-lite evaluate", folder, *same])),
            ("talk to it", f"tunix-lite chat {folder}"),
            ("export it for transformers or vLLM", f"tunix-lite export {folder}"),
        ]
    lines.append(("ask why it does not learn", f"tunix-lite doctor {place}"))
    lines.append(("write this report again", f"tunix-lite report {place}"))
    yield Commands(lines)
    if not steps:
        yield Text("There is no checkpoint, so there is nothing to measure, talk to or export.")
    if any("_target_" in text for text in overrides or []):
        yield Text(
            "An override names something to import and call (_target_): read it before you run a "
            "line of somebody else's run.",
            is_warning=True,
        )
