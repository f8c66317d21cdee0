"""Writes report.html and report.md."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from tunix_lite.report.comparison import (
    compared,
    comparison_page,
    results_table,
    runs_in,
    table_lines,
)
from tunix_lite.report.html import page_as_html
from tunix_lite.report.markdown import page_as_markdown
from tunix_lite.report.page import Page
from tunix_lite.report.run_page import run_page

# the names of the files
HTML = "report.html"
MARKDOWN = "report.md"


def write_page(page: Page, folder: Path) -> list[Path]:
    """Writes both files of a report into a folder, and returns them. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / HTML, folder / MARKDOWN]
    for file, text in zip(files, (page_as_html(page), page_as_markdown(page))):
        # A new file replaces the old one at once: a reader never sees half of it.
        fresh = file.with_name(f".{file.name}.tmp")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(file)
    return files


def report_at_end(folder: Path, say: Callable[[str], None]) -> None:
    """Writes the report of a run that has just ended into its folder. It never fails: whatever is
    wrong becomes one line that `say` gets."""
    try:
        files = write_page(run_page(folder), folder)
        say(f"report: {files[0]}")
    # A report is no reason for a run to fail, whatever its files hold.
    except Exception as error:
        _say_why_not(folder, error, say)


def _say_why_not(folder: Path, error: Exception, say: Callable[[str], None]) -> None:
    reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
    # The disk of the log may be full, too.
    with contextlib.suppress(OSError):
        say(f"warning: the report could not be written ({reason}); tunix-lite report {folder}")


def report_of_sweep(folder: Path, say: Callable[[str], None]) -> None:
    """Writes the report of a sweep that has just ended into its folder, and says its results. As
    `report_at_end` it never fails."""
    try:
        folders = runs_in(folder)
        if len(folders) < 2:
            return
        files = write_page(comparison_page(folders), folder)
        for line in table_lines(results_table(compared(folders))):
            say(line)
        say(f"report: {files[0]}")
    except Exception as error:
        _say_why_not(folder, error, say)
