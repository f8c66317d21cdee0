"""`tunix-lite export checkpoint=outputs/latest`: a folder that vLLM and transformers read, or a
GGUF file for llama.cpp."""

from dataclasses import dataclass
from pathlib import Path

from tunix_lite.commands import program
from tunix_lite.commands.which_weights import WhichWeights
from tunix_lite.inference import export as exporting
from tunix_lite.settings.config import RunConfig


@dataclass(frozen=True)
class ExportConfig(WhichWeights):
    """Settings of the command: the tensors to write, and their folder."""

    # conf/command/export.yaml explains each setting
    out: str | None = None
    kind: str = "auto"
    dtype: str | None = None
    type: str | None = None
    overwrite: bool = False

    def __post_init__(self):
        if self.out is None and self.checkpoint is None:
            raise ValueError("give checkpoint=RUN, or out=FOLDER to write model.weights there")
        super().__post_init__()


def main() -> None:
    program.run_command("export", ExportConfig, _export_chosen_model, positional="checkpoint")


def _export_chosen_model(run: RunConfig, settings: ExportConfig) -> None:
    """Loads the model, writes and compares it, and prints the command that serves it. Raises
    ConfigError."""
    has_adapters = bool(run.model.lora.rank or run.model.lora.adapter)
    name = "adapter" if has_adapters else "full"
    if settings.kind != "auto":
        name = settings.kind
    out = Path(settings.out or Path(settings.checkpoint) / "export" / name).expanduser()

    # Adapters are trained in float32; the exported dtype is chosen when they are written.
    kind = exporting.check_export(
        has_adapters, out, settings.kind, settings.dtype, settings.overwrite, settings.type
    )
    model = settings.open(run, "fp32")
    written = exporting.export(
        model, out, kind, settings.dtype, settings.overwrite, settings.type
    )

    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    print(f"{written.kind}: {size:,.1f} MB in {written.folder}")
    print(f"read back: scores differ by {written.difference:.2g} of their size, by rounding")
    print(written.serve)
