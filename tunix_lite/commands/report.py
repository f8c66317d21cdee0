"""`tunix-lite report RUN [RUN ...]`: write a page on the results of a run, or of several."""

from dataclasses import dataclass
from pathlib import Path

from tunix_lite.commands import program
from tunix_lite.config import RunConfig
from tunix_lite.distributed.folder_lock import is_held
from tunix_lite.errors import ConfigError, RunFailed
from tunix_lite.files.plain_text import escaped, shown
from tunix_lite.files.untrusted import as_path
from tunix_lite.report.comparison import comparison_page, runs_in
from tunix_lite.report.page import write_page
from tunix_lite.report.run_page import run_page


@dataclass(frozen=True)
class ReportOptions:
    """Where a report is written.

    Example: `tunix-lite report RUN report.out=page` is ReportOptions(out="page").
    """

    # folder of report.html; None: the run's own, of several runs this one
    out: str | None = None


@dataclass(frozen=True)
class Report:
    """Which runs are looked at.

    Example: `tunix-lite report outputs/latest` is Report(folders=("outputs/latest",)).
    """

    # Run folders, or one sweep folder. `tunix-lite report FOLDER [FOLDER ...]` is the short form.
    folders: tuple[str, ...] = ()
    report: ReportOptions = ReportOptions()

    def __post_init__(self):
        if not self.folders:
            raise ValueError("give the folder of a run: tunix-lite report outputs/latest")


def main() -> None:
    program.run_command("report", Report, report, positional="folders", is_list=True)


def report(run: RunConfig, settings: Report) -> None:
    """Writes report.html of one run, of several, or of a sweep."""
    try:
        folders = [as_path(folder) for folder in settings.folders]
        first = folders[0]
        place = as_path(settings.report.out) if settings.report.out else None
        if len(folders) == 1 and not (first / "metrics.jsonl").is_file() and runs_in(first):
            place = place or first
            folders = runs_in(first)
        if len(folders) == 1:
            page = run_page(first, is_held(first))
            place = place or first
        else:
            page = comparison_page(folders, lambda line: print(escaped(line, 1000)))
    except ValueError as error:
        raise ConfigError(str(error)) from error

    # The folder may be somebody else's.
    place = place or Path()
    try:
        file = write_page(page, place)
    except OSError as error:
        why = error.strerror or str(error)
        raise RunFailed(
            f"{shown(str(place))} cannot be written to ({why}); give report.out=FOLDER"
        ) from error
    print(escaped(str(file), 1000))
