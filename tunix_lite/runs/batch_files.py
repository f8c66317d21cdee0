"""A batch as a file keeps it: arrays by name."""

from dataclasses import fields

import numpy as np

from tunix_lite.types import Batch

# prefix of a stream's name among the arrays of a batch
STREAM = "streams."


def arrays_of_batch(batch: Batch) -> dict[str, np.ndarray]:
    """Returns all arrays of a batch by name, `streams.NAME` for a stream; without its constants,
    which belong to a model."""
    named = {field.name: getattr(batch, field.name) for field in fields(batch)}
    streams = named.pop("streams")
    del named["constants"]
    named |= {f"{STREAM}{name}": value for name, value in streams.items()}
    return {name: np.asarray(value) for name, value in named.items() if value is not None}
