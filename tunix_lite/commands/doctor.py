"""`tunix-lite doctor RUN`: find in the files of a run why it does not learn."""

import json
from dataclasses import asdict, dataclass

from tunix_lite.commands import program
from tunix_lite.config import RunConfig
from tunix_lite.errors import ConfigError
from tunix_lite.files.plain_text import escaped
from tunix_lite.files.untrusted import as_path
from tunix_lite.report.evidence import Evidence, read_evidence
from tunix_lite.report.findings import Finding, diagnose


@dataclass(frozen=True)
class DoctorOptions:
    """How the findings are shown.

    Example: `tunix-lite doctor RUN doctor.json=true` is DoctorOptions(json=True).
    """

    # true prints one JSON object instead of lines.
    json: bool = False


@dataclass(frozen=True)
class Doctor:
    """Which run is looked at.

    Example: `tunix-lite doctor outputs/latest` is Doctor(folder="outputs/latest").
    """

    # Folder of the run. `tunix-lite doctor FOLDER` is the short form.
    folder: str | None = None
    doctor: DoctorOptions = DoctorOptions()

    def __post_init__(self):
        if self.folder is None:
            raise ValueError("give the folder of a run: tunix-lite doctor outputs/latest")


def main() -> None:
    program.run_command("doctor", Doctor, doctor, positional="folder")


def doctor(run: RunConfig, settings: Doctor) -> None:
    """Prints what is wrong with the run in a folder, the heaviest finding first."""
    try:
        evidence = read_evidence(as_path(settings.folder))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    findings = diagnose(evidence)
    if settings.doctor.json:
        print(json.dumps(as_object(evidence, findings), indent=2))
        return
    for line in finding_lines(evidence, findings):
        print(escaped(line, 1000))


def as_object(run: Evidence, findings: list[Finding]) -> dict:
    """The findings as plain values."""
    return {
        "folder": str(run.folder),
        "steps": run.num_steps,
        "findings": [asdict(finding) for finding in findings],
        "unread": run.unread,
    }


def finding_lines(run: Evidence, findings: list[Finding]) -> list[str]:
    """The findings for people."""
    courses = map(run.series, ("reward/mean", "eval/accuracy"))
    known = [f", {one.name} {one.first:.3g} → {one.last:.3g}" for one in courses if one]
    lines = [f"{run.folder}: {run.num_steps} steps{''.join(known)}"]
    lines += [f"not read: {text}" for text in run.unread]
    for number, finding in enumerate(findings, 1):
        lines.append(f"{number}. {finding.what} [{finding.name}]")
        lines += [f"     {text}" for text in finding.evidence]
        lines += [f"     try {text}" for text in finding.overrides]
    if not findings:
        lines.append("no finding: these files show none of the faults that the doctor knows")
    return lines
