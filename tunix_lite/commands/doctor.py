"""`tunix-lite doctor RUN [RUN ...]`: what a run came to, and why it does not learn, from its files;
or several runs, beside each other."""

from dataclasses import dataclass
from pathlib import Path

from tunix_lite.basics.errors import error_context
from tunix_lite.basics.locks import is_held
from tunix_lite.basics.plain_text import counted, escaped
from tunix_lite.basics.untrusted import as_path
from tunix_lite.commands import program
from tunix_lite.report.comparison import lines_of_runs, result_lines, runs_in
from tunix_lite.report.evidence import read_evidence
from tunix_lite.report.findings import diagnose


@dataclass(frozen=True)
class Doctor:
    """Which runs are looked at.
    Example: `tunix-lite doctor outputs/latest` is Doctor(folders=("outputs/latest",))."""

    # conf/command/doctor.yaml explains each setting
    folders: tuple[str, ...] = ()

    def __post_init__(self):
        if not self.folders:
            raise ValueError("give the folder of a run: tunix-lite doctor outputs/latest")


def main() -> None:
    program.run_command(
        "doctor", Doctor, doctor, positional="folders", is_list=True, takes_run=False
    )


def doctor(settings: Doctor) -> None:
    """Prints the results of a run and what is wrong with it, the heaviest finding first; of
    several, what each came to. The folders may be somebody else's."""
    with error_context(""):
        folders = [as_path(folder) for folder in settings.folders]
        # a folder of a sweep has no metrics of its own, and its runs have
        if len(folders) == 1 and not (folders[0] / "metrics.jsonl").is_file():
            folders = runs_in(folders[0]) or folders
        lines = lines_of_runs(folders) if len(folders) > 1 else lines_of_run(folders[0])
        print("\n".join(escaped(line, 1000) for line in lines))


def lines_of_run(folder: Path) -> list[str]:
    """The results and the findings of a run for people."""
    run = read_evidence(folder)
    courses = map(run.series, ("reward/mean", "eval/accuracy"))
    known = [f", {one.name} {one.first:.3g} → {one.last:.3g}" for one in courses if one]
    lines = [f"{run.folder}: {counted(run.num_steps, 'step')}{''.join(known)}"]
    # a run that holds its folder is alive, and was not killed
    lines += result_lines(run, is_held(folder))
    findings = diagnose(run)
    lines += [f"not read: {text}" for text in dict.fromkeys(run.unread)]
    for number, finding in enumerate(findings, 1):
        lines.append(f"{number}. {finding.what} [{finding.name}]")
        lines += [f"     {text}" for text in finding.evidence]
        lines += [f"     try {text}" for text in finding.overrides]
    if not findings:
        lines.append("no finding: these files show none of the faults that the doctor knows")
    return lines
