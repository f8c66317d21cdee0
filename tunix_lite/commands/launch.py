"""`tunix-lite launch --nprocs=4 key=value ...`: the same as `python -m tunix_lite.launch`."""

from tunix_lite.distributed import launcher
from tunix_lite.hints import translated


def main() -> None:
    launcher.main(overrides_of=overrides_of)


def overrides_of(name: str, value: str) -> tuple[str, ...]:
    """The settings of a run that a flag of another project means: --bf16."""
    hint = translated(name, value or "true")
    return hint.overrides if hint else ()
