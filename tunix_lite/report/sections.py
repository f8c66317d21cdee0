"""Sections of the report of one run: its costs, its settings, and lines to paste.

The costs are where its seconds went, memory against the plan, and the bytes that crossed devices.
"""

import math
import shlex
from collections.abc import Iterator

from tunix_lite.plain_text import escaped
from tunix_lite.report.evidence import Evidence, checkpoint_steps, read_plan
from tunix_lite.report.page import Bar, Block, Commands, Folded, Table, Text
from tunix_lite.tracking.dashboard import minutes
from tunix_lite.tracking.rows import is_number

GiB = 2**30
# collectives in the table of what is sent
MOST_COLLECTIVES = 24


# time/ keys of parts of collecting, but for the pass of each scorer, and of what is beside it
COLLECTING = {"time/rollout": "sampling", "time/rewards": "waiting for rewards"}
BESIDE = {"time/update": "update", "time/compile": "compiling in steps", "time/eval": "evaluation"}
# and those that lie in other ones
OTHER_TIMES = {"time/collect", "time/step", "time/rollout_beside_update", "time/extra_rounds"}
OTHER_TIMES |= {"time/reward_p50", "time/reward_p99"}


def phases(run: Evidence) -> list[tuple[str, float, int]]:
    """Where the seconds went, (phase, seconds, in how many steps) each; all together they are the
    seconds of status.json, as far as it knows them."""
    times = {key for row in run.rows for key in row if key.startswith("time/")}
    scorers = sorted(times - COLLECTING.keys() - BESIDE.keys() - OTHER_TIMES)
    passes = {key: f"pass of {escaped(key.removeprefix('time/'))}" for key in scorers}
    inside = [(name, *_total(run, key)) for key, name in (COLLECTING | passes).items()]
    beside = [(name, *_total(run, key)) for key, name in BESIDE.items()]
    collecting, count = _total(run, "time/collect")
    rest = collecting - sum(seconds for _, seconds, _ in inside)
    every = [*inside, ("rest of collecting", rest, count), *beside]
    whole = run.status.get("seconds")
    if is_number(whole):
        rest = whole - collecting - sum(seconds for _, seconds, _ in beside)
        every.append(("start, compiling, files", rest, 0))
    return [phase for phase in every if phase[1] > 0]


def _total(run: Evidence, name: str) -> tuple[float, int]:
    """Seconds in all, and the steps that have some."""
    rows = run.rows
    if name == "time/eval":
        trained = {row["step"] for row in run.rows}
        rows = [*run.rows, *(row for row in run.evaluations if row["step"] not in trained)]
    values = [row[name] for row in rows if is_number(row.get(name)) and row[name] >= 0]
    return math.fsum(values), len(values)


def time_blocks(run: Evidence) -> Iterator[Block]:
    every = phases(run)
    whole = sum(seconds for _, seconds, _ in every)
    if not every:
        return
    parts = [(name, seconds, f"{seconds / whole:.0%}") for name, seconds, _ in every]
    yield Bar(f"{minutes(whole)} in all", parts)
    rows = []
    for name, seconds, count in every:
        mean = f"{seconds / count:.3g}" if count else ""
        rows.append([name, f"{seconds:,.1f}", f"{seconds / whole:.1%}", mean])
    note = "The first step's sampling includes compiling it."
    mfu = run.series("perf/mfu")
    if mfu is not None:
        note += f" MFU, mean of the last third of the steps: {mfu.late:.1%}."
    yield Table(["phase", "seconds", "share", "seconds each time"], rows, 1, note)


def memory_blocks(run: Evidence) -> Iterator[Block]:
    plan = read_plan(run.folder, run.unread)
    capacity = plan.get("capacity_bytes")
    whole = float(capacity) if is_number(capacity) else 0.0
    resident = _amounts(plan.get("resident_bytes"))
    always = size_text(sum(resident.values()))
    rows = []
    for phase in _objects(plan.get("phases")):
        parts = [*resident.items(), *_amounts(phase.get("adds")).items()]
        name = escaped(str(phase.get("name")))
        total = sum(amount for _, amount in parts)
        texts = [(part, amount, size_text(amount)) for part, amount in parts]
        yield Bar(f"{name}: {size_text(total)} on a device, planned", texts)
        rows.append([name, always, size_text(total), f"{total / whole:.1%}" if whole else ""])
    if rows:
        heads = ["phase", "always there", "peak planned", "of the device"]
        yield Table(heads, rows, 1, "From plan.json, made before the first step.")
    measured = run.series("memory/peak_gb")
    if measured is not None:
        planned = plan.get("peak_bytes")
        against = f", planned {size_text(planned)}" if is_number(planned) else ""
        of_all = f" of {size_text(whole)}" if whole else ""
        yield Text(
            f"Measured peak {size_text(measured.largest * 1e9)}{of_all}{against}. On a CPU the "
            "measured peak is that of the whole process, compiler and Python included."
        )


def _objects(value: object) -> list[dict]:
    """The objects in a list of a JSON file; [] if it is none."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _amounts(value: object) -> dict[str, float]:
    items = list(value.items())[:16] if isinstance(value, dict) else []
    return {escaped(str(name)): float(x) for name, x in items if is_number(x) and x >= 0}


def size_text(amount: float) -> str:
    """Bytes as people say them: 2.4 MiB, 10.6 GiB."""
    if amount < 0.1 * GiB:
        return f"{amount / 2**20:.1f} MiB"
    return f"{amount / GiB:.2f} GiB" if amount < 100 * GiB else f"{amount / GiB:,.0f} GiB"


def sent_blocks(run: Evidence) -> Iterator[Block]:
    programs = _objects(read_plan(run.folder, []).get("programs"))
    rows = []
    for program in programs:
        for collective in _objects(program.get("collectives")):
            sent = collective.get("sent_bytes")
            texts = [program.get("name"), *map(collective.get, ("kind", "axis", "count"))]
            amount = f"{sent / 1e6:,.3g}" if is_number(sent) else ""
            rows.append([*(escaped(str(text)) for text in texts), amount])
    if rows:
        heads = ["program", "collective", "axis", "times", "sent by a device, MB"]
        note = "What the compiled programs send in one call, from plan.json."
        yield Table(heads, rows[:MOST_COLLECTIVES], 3, note)
    elif programs:
        yield Text("Nothing: the compiled programs send nothing from device to device.")
    if (run.folder / "communication.md").is_file():
        yield Text("communication.md lists each collective of an update, trace/ has the profile.")


# ---- settings

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
