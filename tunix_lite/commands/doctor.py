"""`tunix-lite doctor RUN [RUN ...]`: find in the files of a run why it does not learn, write a page
on its results, or compare several runs."""

from dataclasses import dataclass

from tunix_lite.basics.addresses import check_on_disk
from tunix_lite.basics.errors import RunFailed, error_context
from tunix_lite.basics.locks import is_held
from tunix_lite.basics.plain_text import counted, escaped, shown
from tunix_lite.basics.untrusted import as_path
from tunix_lite.commands import program
from tunix_lite.report.comparison import lines_of_runs, runs_in
from tunix_lite.report.evidence import Evidence, read_evidence
from tunix_lite.report.findings import Finding, diagnose
from tunix_lite.report.page import write_page
from tunix_lite.report.run_page import run_page


@dataclass(frozen=True)
class DoctorOptions:
    """Where the page goes.
    Example: `tunix-lite doctor RUN doctor.report=RUN` is DoctorOptions(report="RUN")."""

    # conf/command/doctor.yaml explains each setting
    report: str | None = None

    def __post_init__(self):
        check_on_disk("report", self.report)


@dataclass(frozen=True)
class Doctor:
    """Which runs are looked at.
    Example: `tunix-lite doctor outputs/latest` is Doctor(folders=("outputs/latest",))."""

    # conf/command/doctor.yaml explains each setting
    folders: tuple[str, ...] = ()
    doctor: DoctorOptions = DoctorOptions()

    def __post_init__(self):
        if not self.folders:
            raise ValueError("give the folder of a run: tunix-lite doctor outputs/latest")


def main() -> None:
    program.run_command(
        "doctor", Doctor, doctor, positional="folders", is_list=True, takes_run=False
    )


def doctor(settings: Doctor) -> None:
    """Prints what is wrong with a run, the heaviest finding first, and may write its page; of
    several, what each came to. The folders may be somebody else's."""
    place = settings.doctor.report
    page = None
    with error_context(""):
        folders = [as_path(folder) for folder in settings.folders]
        of_sweep = [] if (folders[0] / "metrics.jsonl").is_file() else runs_in(folders[0])
        # a folder of a sweep has no metrics of its own, and its runs have
        if len(folders) == 1 and of_sweep:
            folders = of_sweep
        if len(folders) > 1:
            if place is not None:
                raise ValueError("doctor.report is of one run: give its folder alone")
            print("\n".join(escaped(line, 1000) for line in lines_of_runs(folders)))
        else:
            evidence = read_evidence(folders[0])
            findings = diagnose(evidence)
            print("\n".join(escaped(x, 1000) for x in finding_lines(evidence, findings)))
            # a run that holds its folder is alive, and was not killed
            page = run_page(folders[0], is_held(folders[0])) if place else None
    if page is None:
        return
    try:
        file = write_page(page, as_path(place))
    except OSError as error:
        why = error.strerror or str(error)
        raise RunFailed(
            f"{shown(place)} cannot be written to ({why}); give doctor.report=FOLDER"
        ) from error
    print(escaped(str(file), 1000))


def finding_lines(run: Evidence, findings: list[Finding]) -> list[str]:
    """The findings for people."""
    courses = map(run.series, ("reward/mean", "eval/accuracy"))
    known = [f", {one.name} {one.first:.3g} → {one.last:.3g}" for one in courses if one]
    lines = [f"{run.folder}: {counted(run.num_steps, 'step')}{''.join(known)}"]
    lines += [f"not read: {text}" for text in run.unread]
    for number, finding in enumerate(findings, 1):
        lines.append(f"{number}. {finding.what} [{finding.name}]")
        lines += [f"     {text}" for text in finding.evidence]
        lines += [f"     try {text}" for text in finding.overrides]
    if not findings:
        lines.append("no finding: these files show none of the faults that the doctor knows")
    return lines
