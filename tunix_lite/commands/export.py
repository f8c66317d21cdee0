"""`tunix-lite export checkpoint=outputs/latest`: what a run trained, as a folder that vLLM and
transformers read."""

from dataclasses import dataclass
from pathlib import Path

from tunix_lite.commands import program
from tunix_lite.commands.generate import open_chosen_model
from tunix_lite.config import RunConfig
from tunix_lite.inference import export as exporting


@dataclass(frozen=True)
class ExportConfig:
    """What to write, and where."""

    # the folder of a run, whose newest weights are written; null: model.weights as is
    checkpoint: str | None = None
    step: int | None = None  # of an older checkpoint of that run; null: the newest
    out: str | None = None  # the folder to write; null: export/<kind> in the folder of the run
    # full, merged (adapters added to their base), adapter (PEFT); auto: adapter if any, else full
    kind: str = "auto"
    # bf16, fp16 or fp32; null: as the original stores each tensor, bf16 for a model born here
    dtype: str | None = None
    overwrite: bool = False  # replace a folder that export wrote before

    def __post_init__(self):
        if self.out is None and self.checkpoint is None:
            raise ValueError(
                "give checkpoint=RUN, or say with out=FOLDER where to write model.weights"
            )
        if self.step is not None and self.checkpoint is None:
            raise ValueError("step= is of a run: give checkpoint=FOLDER, too")


def main() -> None:
    program.run_command("export", ExportConfig, export_chosen_model)


def export_chosen_model(run: RunConfig, settings: ExportConfig) -> None:
    """Loads, writes, reads back, compares, and says how to serve it."""
    lora = run.model.lora
    has_adapters = bool(lora.rank or lora.adapter)
    guess = ("adapter" if has_adapters else "full") if settings.kind == "auto" else settings.kind
    out = Path(settings.out or Path(settings.checkpoint) / "export" / guess).expanduser()
    kind = exporting.check_export(
        has_adapters, out, settings.kind, settings.dtype, settings.overwrite
    )
    written = exporting.export(
        open_chosen_model(run, settings, "fp32"), out, kind, settings.dtype, settings.overwrite
    )
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    print(f"{written.kind}: {size:,.1f} MB in {written.folder}")
    print(f"read back: scores differ by {written.difference:.2g} of their size")
    print(written.serve)
