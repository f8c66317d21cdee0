"""Writes docs/references/benchmarks.md from benchmarks/results/*.json and */*.json:

    python docs/benchmarks_page.py

A folder in benchmarks/results/ holds the files of the same races on another machine.

tests/test_benchmarks.py compares the file with what this makes, so neither can change alone.
"""

import json
import sys
import textwrap
from pathlib import Path

DOCS = Path(__file__).parent
PAGE = DOCS / "references" / "benchmarks.md"
TEMPLATE = DOCS / "benchmarks_template.txt"
RESULTS = DOCS.parent / "benchmarks" / "results"
NAMES = {"tunix": "Tunix", "trl": "TRL", "ours": "ours", "ours_shared": "ours, shared prompts"}
OURS = ("ours", "ours_shared")
TITLES = {
    "fixed": "Fixed lengths",
    "long_tails": "Long tails",
    "long_prompts": "Long prompts, short completions",
    "vocabulary": "A vocabulary of 65,536",
    "lora": "LoRA",
}
WIDTH = 118
PHASES = ("rollout", "reference", "update", "step")
# A load of more than this beside two cores means that others computed too.
QUIET = 0.5


def render(results: Path = RESULTS) -> str:
    """The whole page."""
    found = _races(results)
    parts = [TEMPLATE.read_text().rstrip(), *_real(results)]
    if found:
        parts.append(
            "## All workloads\n\nAbove 1 ours is faster, below 1 the peer is.\n"
            f"{_machine(next(iter(found.values())))}. {_peaks(found)}"
        )
        parts += [_overview(found), _all_versions(found)]
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        races = _races(folder)
        if races:
            parts.append(_other_machine(folder.name, races))
    parts += [_workload(name, one) for name, one in found.items()]
    missing = [TITLES[name].lower() for name in TITLES if name not in found]
    if missing:
        parts.append(f"Not measured yet: {', '.join(missing)}.")
    installed = _read(results / "peers_install.json")
    if installed:
        parts.append(_installation(installed))
    return "\n\n".join(parts) + "\n"


def _real(results: Path) -> list[str]:
    """What benchmarks/real/race.py prints of the cells that are kept: a table, then notes."""
    sys.path.append(str(DOCS.parent / "benchmarks" / "real"))
    from race import table as table_of_real

    rows, _, notes = table_of_real(results).partition("\n\n")
    wrapped = [
        textwrap.fill(f"- {note}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        for note in notes.splitlines()
    ]
    return [rows, "\n".join(wrapped)] if notes else []


def _races(folder: Path) -> dict[str, dict]:
    """The results of a folder, by workload."""
    read = {name: _read(folder / f"peers_{name}.json") for name in TITLES}
    return {name: one for name, one in read.items() if one}


def _read(file: Path) -> dict:
    return json.loads(file.read_text()) if file.exists() else {}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    align = "| --- |" + " ---: |" * (len(head) - 1)
    return "\n".join([lines[0], align, *lines[1:]])


def _overview(found: dict[str, dict]) -> str:
    """Whole steps: how many times longer the peers take than ours, workload by workload."""
    head = (
        "times our whole step",
        *(f"{NAMES[peer]} / {NAMES[ours]}" for ours in OURS for peer in ("tunix", "trl")),
    )
    rows = []
    for name, one in found.items():
        cells = [_times(one, peer, ours) for ours in OURS for peer in ("tunix", "trl")]
        rows.append((TITLES[name].lower(), *cells))
    return table(head, rows)


def _other_machine(folder: str, found: dict[str, dict]) -> str:
    """The ratios that another machine gave, and the conditions."""
    loads = [one["machine"]["load_before"] for one in found.values()]
    rounds = [int(_rounds(one)) for one in found.values()]
    dates = sorted({f"{one['date']} {one['commit']}" for one in found.values()})
    about = (
        f"{_machine(next(iter(found.values())))}. {_peaks(found)} The load before was "
        f"{min(loads)} to {max(loads)}; above {QUIET} others computed, too. "
        f"{min(rounds)} to {max(rounds)} rounds; {', '.join(dates)}."
    )
    failed = [
        f"{TITLES[name]}: {NAMES[key]} gave no figures: {each['error']}"
        for name, one in found.items()
        for key, each in one["frameworks"].items()
        if "error" in each
    ]
    title = f"## The same workloads on another machine: {folder}"
    return "\n\n".join(
        [title, "\n".join(textwrap.wrap(about, WIDTH)), _overview(found), *failed]
    )


def _peaks(found: dict[str, dict]) -> str:
    """How fast the machine was: a faster one gives other ratios."""
    peaks = [max(one["matmul_peak_gflops"]) for one in found.values()]
    return f"The matmul peak of the machine was {min(peaks):.0f} to {max(peaks):.0f} GFLOP/s."


def _load(one: dict) -> str:
    load = one["machine"]["load_before"]
    return f"{load}: **others computed, too**" if load > QUIET else str(load)


def _rounds(one: dict) -> str:
    return str(
        max((len(each.get("steps", ())) for each in one["frameworks"].values()), default=0)
    )


def _times(one: dict, peer: str, ours: str) -> str:
    ratio = one["frameworks"].get(peer, {}).get(f"times_{ours}", {}).get("step")
    return "-" if ratio is None else f"{ratio:.2f}"


def _workload(name: str, one: dict) -> str:
    """Conditions, then seconds, speed and memory of every framework."""
    head = ("seconds, median", *PHASES, "rollout, tokens/s", "peak memory, MB")
    frameworks = one["frameworks"].items()
    measured = [_measured(key, each) for key, each in frameworks if "error" not in each]
    failed = [
        f"{NAMES[key]} gave no figures: {each['error']}"
        for key, each in frameworks
        if "error" in each
    ]
    return "\n\n".join(
        [f"## {TITLES[name]}", _conditions(one), table(head, measured), *failed]
    )


def _conditions(one: dict) -> str:
    work, lengths = one["workload"], one["lengths"]
    trained = f"adapters of rank {work['lora_rank']}" if work["lora_rank"] else "all weights"
    lines = (
        f"{work['prompts']} prompts of {work['prompt_length']} tokens, {work['generations']} "
        f"completions each: mean {lengths['mean']:.0f} tokens, longest {lengths['most']}",
        f"a vocabulary of {work['vocab_size']:,}; trained: {trained}; "
        f"{one['gflop_per_step']:.0f} GFLOP a step",
        f"load before {_load(one)}; {_rounds(one)} rounds; {one['date']}, commit {one['commit']}",
    )
    return "\n".join(f"- {line}" for line in lines)


def _machine(one: dict) -> str:
    machine = one["machine"]
    return f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB"


def _all_versions(found: dict[str, dict]) -> str:
    """The packages of all races, each version once."""
    each = [framework for one in found.values() for framework in one["frameworks"].values()]
    versions = sorted(
        {f"{name} {v}" for framework in each for name, v in _versions(framework)}
    )
    return "\n".join(textwrap.wrap(f"Versions: {', '.join(versions)}.", WIDTH))


def _versions(each: dict) -> list[tuple[str, str]]:
    return list(each.get("versions", {}).items())


def _measured(key: str, each: dict) -> tuple[str, ...]:
    return (
        NAMES[key],
        *(f"{each['seconds'][phase]['median']:.2f}" for phase in PHASES),
        f"{each['rollout_tokens_per_second']:,.0f}",
        f"{each['peak_rss_mb']:,}",
    )


def _installation(installed: dict[str, dict]) -> str:
    rows = [_installed(NAMES[key], each) for key, each in installed.items()]
    head = ("in a new venv", "version", "seconds", "load", "MB on the disk", "distributions")
    note = (
        "pip without its cache. TRL's torch is a CPU build, whose file lay on the disk; all else\n"
        "was downloaded."
    )
    return f"## Installation\n\n{note}\n\n{table(head, rows)}"


def _installed(name: str, each: dict) -> tuple[str, ...]:
    sizes = f"{each['megabytes']:,}", str(each["distributions"])
    return name, each["version"], f"{each['seconds']:.0f}", f"{each['load_after']:.1f}", *sizes


if __name__ == "__main__":
    PAGE.write_text(render())
