"""Writes report.html."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from tunix_lite.report.comparison import comparison_page, runs_in
from tunix_lite.report.page import Page, page_as_html
from tunix_lite.report.run_page import run_page


def write_page(page: Page, folder: Path) -> Path:
    """Writes the report into a folder, and returns the file. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "report.html"
    # A new file replaces the old one at once: a reader never sees half of it.
    fresh = file.with_name(f".{file.name}.tmp")
    fresh.write_text(page_as_html(page), encoding="utf-8")
    fresh.replace(file)
    return file


def report_at_end(folder: Path, say: Callable[[str], None]) -> None:
    """Writes the report of a run that has just ended into its folder. It never fails: whatever is
    wrong becomes one line that `say` gets."""
    _write_or_say(folder, lambda: run_page(folder), say)


def report_of_sweep(folder: Path, say: Callable[[str], None]) -> None:
    """Writes the report of a sweep that has just ended into its folder, and says its results. As
    `report_at_end` it never fails."""
    if len(folders := runs_in(folder)) > 1:
        _write_or_say(folder, lambda: comparison_page(folders, say), say)


def _write_or_say(folder: Path, page: Callable[[], Page], say: Callable[[str], None]) -> None:
    try:
        say(f"report: {write_page(page(), folder)}")
    # A report is no reason for a run to fail, whatever its files hold.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        # The disk of the log may be full, too.
        with contextlib.suppress(OSError):
            say(f"warning: the report could not be written ({reason}); tunix-lite report {folder}")
