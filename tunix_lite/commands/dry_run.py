"""`runtime.dry_run=true`: every check, the start-up summary and the plan of a run, without the
run."""

from pathlib import Path

from tunix_lite.config import RunConfig
from tunix_lite.distributed.join import is_first
from tunix_lite.errors import error_context
from tunix_lite.plain_text import visible
from tunix_lite.planning import plan as planning
from tunix_lite.planning.at_start import check_fits
from tunix_lite.planning.hardware import find_machine
from tunix_lite.planning.report import short_form
from tunix_lite.runs.setup import Parts, find_parts, resume_from_folder, startup_summary
from tunix_lite.tracking.rundir import RunDir


def look_at(run: RunConfig, folder: Path) -> Parts:
    """Checks a run as its start would, prints its summary, and leaves nothing behind.

    Weights of a hub model are not downloaded. Raises ConfigError for what would stop the run.
    """
    run_dir = RunDir(folder)
    parts = find_parts(run)
    with error_context("hydra.run.dir"):
        run_dir.check()
    resume_from = resume_from_folder(run, run_dir)

    # The plan by formulas: compiling would take as long as a start.
    model = parts.model
    sizes = dict(parts.mesh.shape)
    machine = find_machine("attached")
    plan = planning.estimated(run, machine, model.cfg, model.lora, sizes)
    messages: list[str] = []
    check_fits(plan, messages.append)
    title, rows = startup_summary(parts, run_dir)
    shown = [(name, text) for name, text in rows if name != "outputs"]
    if resume_from is not None:
        shown.append(("resume", f"from the checkpoint in {resume_from}"))
    if is_first():
        lines = [f"{title}: a dry run", *(f"  {name:<10}{text}" for name, text in shown)]
        lines += [*short_form(plan)[-2:], *messages, "nothing was run, nothing was written"]
        print("\n".join(visible(line) for line in lines), flush=True)
    return parts
