"""The table of model sizes, made from conf/model/: names, parameters, meshes and the bytes of a
frozen base."""

from types import SimpleNamespace

from config_reference import as_table

from tunix_lite.models import decoder, weights
from tunix_lite.models.families import FAMILIES
from tunix_lite.models.quantize import stored_table
from tunix_lite.settings.compose import compose, conf_dir

PAGE = "guide/models"
MARKER = "<!-- generated: sizes -->"
NOT_A_SIZE = {"bundled", "random"}
TP = range(1, 17)
STORED = ("bf16", "int8", "nf4")


def render() -> str:
    """One row for each size, a family after the other, the small ones first."""
    names = {file.stem for file in conf_dir().glob("model/*.yaml")} - NOT_A_SIZE
    models = {name: compose([f"model={name}"]).model for name in names}

    def order(name: str) -> tuple:
        return list(FAMILIES).index(models[name].family), _count(models[name]), name

    head = (
        "option",
        "weights",
        "parameters",
        "`tp`",
        *(f"{storage}, GB" for storage in STORED),
    )
    return as_table(head, [_row(name, models[name]) for name in sorted(names, key=order)])


def _row(name: str, model) -> tuple[str, ...]:
    table = decoder.weights(model.architecture)
    sizes = ", ".join(str(tp) for tp in TP if _divides(table, tp))
    gigabytes = (
        f"{weights.num_bytes(stored_table(table, storage)) / 1e9:.2f}" for storage in STORED
    )
    return f"`model={name}`", f"`{model.weights}`", f"{_count(model):,}", sizes, *gigabytes


def _count(model) -> int:
    return weights.num_params(decoder.weights(model.architecture))


def _divides(table, tp: int) -> bool:
    try:
        weights.check_divisible(table, SimpleNamespace(shape={"fsdp": 1, "tp": tp}))
    except ValueError:
        return False
    return True
