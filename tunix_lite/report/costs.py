"""What a run cost: where its seconds went, memory against the plan, and what crossed devices."""

import math
from collections.abc import Iterator

from tunix_lite.plain_text import escaped
from tunix_lite.report.evidence import Evidence, read_plan
from tunix_lite.report.page import Bar, Block, Table, Text
from tunix_lite.tracking.dashboard import minutes
from tunix_lite.tracking.rows import is_number

GiB = 2**30
# collectives in the table of what is sent
MOST_COLLECTIVES = 24


def phases(run: Evidence) -> list[tuple[str, float, int]]:
    """Where the seconds went, (phase, seconds, in how many steps) each; all together they are the
    seconds of status.json, as far as it knows them."""
    rollout = _total(run, "time/rollout")
    rewards = _total(run, "time/rewards")
    collect = _total(run, "time/collect")
    update = _total(run, "time/update")
    compiling = _total(run, "time/compile")
    evaluation = _total(run, "time/eval")
    times = {key for row in run.rows for key in row if key.startswith("time/")}
    scorers = sorted(times - _OTHER_TIMES)
    found = [("sampling", *rollout), ("waiting for rewards", *rewards)]
    for name in scorers:
        found.append((f"pass of {escaped(name.removeprefix('time/'))}", *_total(run, name)))
    inside = sum(seconds for _, seconds, _ in found)
    found.append(("rest of collecting", max(collect[0] - inside, 0.0), collect[1]))
    found += [("update", *update), ("compiling in steps", *compiling), ("evaluation", *evaluation)]
    seconds = run.status.get("seconds")
    if is_number(seconds):
        rest = seconds - collect[0] - update[0] - compiling[0] - evaluation[0]
        found.append(("start, compiling, files", max(rest, 0.0), 0))
    return [phase for phase in found if phase[1] > 0]


# time/ keys that are no scorer's pass, or lie in another one
_OTHER_TIMES = {
    "time/rollout",
    "time/rollout_beside_update",
    "time/rewards",
    "time/collect",
    "time/update",
    "time/compile",
    "time/eval",
    "time/step",
    "time/extra_rounds",
    "time/reward_p50",
    "time/reward_p99",
}


def _total(run: Evidence, name: str) -> tuple[float, int]:
    rows = run.rows
    if name == "time/eval":
        trained = {row["step"] for row in run.rows}
        rows = [*run.rows, *(row for row in run.evaluations if row["step"] not in trained)]
    values = [row[name] for row in rows if is_number(row.get(name)) and row[name] >= 0]
    return math.fsum(values), len(values)


def time_blocks(run: Evidence) -> Iterator[Block]:
    found = phases(run)
    whole = sum(seconds for _, seconds, _ in found)
    if not found:
        return
    yield Bar(f"{minutes(whole)} in all", [(name, s, f"{s / whole:.0%}") for name, s, _ in found])
    rows = []
    for name, seconds, count in found:
        mean = f"{seconds / count:.3g}" if count else ""
        rows.append([name, f"{seconds:,.1f}", f"{seconds / whole:.1%}", mean])
    note = "The first step's sampling includes compiling it."
    mfu = run.series("perf/mfu")
    if mfu is not None:
        note += f" MFU, mean of the last third of the steps: {mfu.late:.1%}."
    yield Table(["phase", "seconds", "share", "seconds each time"], rows, 1, note)


def memory_blocks(run: Evidence) -> Iterator[Block]:
    plan = read_plan(run.folder, run.unread)
    measured = run.series("memory/peak_gb")
    capacity = plan.get("capacity_bytes")
    whole = float(capacity) if is_number(capacity) else 0.0
    resident = _amounts(plan.get("resident_bytes"))
    listed = plan.get("phases")
    rows = []
    for phase in listed if isinstance(listed, list) else ():
        if not isinstance(phase, dict):
            continue
        adds = _amounts(phase.get("adds"))
        name = escaped(str(phase.get("name")))
        total = sum(amount for _, amount in [*resident, *adds])
        parts = [(part, amount, size_text(amount)) for part, amount in [*resident, *adds]]
        yield Bar(f"{name}: {size_text(total)} on a device, planned", parts)
        always = size_text(sum(amount for _, amount in resident))
        rows.append([name, always, size_text(total), f"{total / whole:.1%}" if whole else ""])
    if rows:
        heads = ["phase", "always there", "peak planned", "of the device"]
        yield Table(heads, rows, 1, "From plan.json, made before the first step.")
    if measured is not None:
        peak = measured.largest * 1e9
        planned = plan.get("peak_bytes")
        against = f", planned {size_text(planned)}" if is_number(planned) else ""
        held = f" of {size_text(whole)}" if whole else ""
        yield Text(
            f"Measured peak {size_text(peak)}{held}{against}. On a CPU the measured peak is that "
            "of the whole process, compiler and Python included."
        )


def _amounts(value: object) -> list[tuple[str, float]]:
    if not isinstance(value, dict):
        return []
    found = [(escaped(str(name)), amount) for name, amount in value.items() if is_number(amount)]
    return [(name, float(amount)) for name, amount in found[:16] if amount >= 0]


def size_text(amount: float) -> str:
    """Bytes as people say them: 2.4 MiB, 10.6 GiB."""
    if amount < 0.1 * GiB:
        return f"{amount / 2**20:.1f} MiB"
    return f"{amount / GiB:.2f} GiB" if amount < 100 * GiB else f"{amount / GiB:,.0f} GiB"


def sent_blocks(run: Evidence) -> Iterator[Block]:
    plan = read_plan(run.folder, [])
    rows = []
    programs = plan.get("programs")
    for program in programs if isinstance(programs, list) else ():
        listed = program.get("collectives") if isinstance(program, dict) else None
        for found in listed if isinstance(listed, list) else ():
            if not isinstance(found, dict):
                continue
            sent = found.get("sent_bytes")
            cells = [escaped(str(found.get(key, ""))) for key in ("kind", "axis", "count")]
            cells.append(f"{sent / 1e6:,.3g}" if is_number(sent) else "")
            rows.append([escaped(str(program.get("name"))), *cells])
    if rows:
        heads = ["program", "collective", "axis", "times", "sent by a device, MB"]
        note = "What the compiled programs send in one call, from plan.json."
        yield Table(heads, rows[:MOST_COLLECTIVES], 3, note)
    elif isinstance(programs, list) and programs:
        yield Text("Nothing: the compiled programs send nothing from device to device.")
    if (run.folder / "communication.md").is_file():
        yield Text("communication.md lists each collective of an update, trace/ has the profile.")
