"""The field of an example that a reward compares with."""

from collections.abc import Mapping
from typing import Any


def field_of(example: Mapping, field: str) -> Any:
    """Reads a field of the example. Dots lead into the objects of a row:
    `reward_model.ground_truth`.

    Raises ValueError if there is no such field."""
    if field in example:
        return example[field]
    value: Any = example
    for name in field.split("."):
        if not isinstance(value, Mapping) or name not in value:
            fields = ", ".join(map(str, example))
            raise ValueError(f"an example has no field {field!r}: it has {fields:.200}")
        value = value[name]
    return value
