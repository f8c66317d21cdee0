"""What a client saves: a checkpoint, and beside it a file that says what kind of weights it
holds."""

import contextlib
import json
import os
from pathlib import Path

import numpy as np

from tunix_lite.basics.plain_text import shown
from tunix_lite.basics.types import Params, TrainState
from tunix_lite.basics.untrusted import read_object
from tunix_lite.models.lora import LoraConfig
from tunix_lite.parallel.mesh import put
from tunix_lite.tracking.checkpoint import Checkpoints, shapes_of

# The file beside the checkpoints.
KIND = "trainer.json"
# And what a process that was killed may leave of it.
_HALF = f"{KIND}.tmp"
_MADE_ALIKE = "load it into a client that is made like that"


# what a folder holds: model.weights of the base; rank (0: all weights), alpha and targets of
# adapters; and whether the state of the optimizer is there, too
Kind = dict[str, str | int | float | bool]


def kind_of(model: str, lora: LoraConfig | None, optimizer: bool) -> Kind:
    """What a client with these adapters saves."""
    adapters = {"rank": 0, "alpha": 0.0, "targets": ""}
    if lora is not None:
        adapters = {name: getattr(lora, name) for name in adapters}
    return {"model": model, **adapters, "optimizer": optimizer}


def save_state(folder: Path, state: TrainState, kind: Kind) -> None:
    """Saves the state as checkpoint `state.step` of the folder. Raises ValueError if it holds
    something else."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / KIND).exists():
        _check_kind(folder, kind, "save to another folder")
    elif any(file.name != _HALF for file in folder.iterdir()):
        raise ValueError(
            f"{folder} is not empty, and nothing in it says what it is: save elsewhere"
        )
    step = int(state.step)
    checkpoints = Checkpoints(folder)
    if step in checkpoints.steps():
        raise ValueError(f"{folder} holds step {step} already; save to another folder")
    half = folder / _HALF
    # The kind is there before the checkpoint: weights whose kind nobody knows cannot be loaded.
    half.write_text(json.dumps(kind) + "\n")
    os.replace(half, folder / KIND)
    if not kind["optimizer"]:
        state = state.replace(opt_state={})
    with contextlib.closing(checkpoints):
        checkpoints.save(state)


def load_state(folder: Path, like: TrainState, kind: Kind) -> TrainState:
    """The newest checkpoint of the folder, without its optimizer if `kind` has none. Raises
    ValueError."""
    if not kind["optimizer"]:
        step, params = load_trained(folder, shapes_of(like.params), kind)
        return like.replace(step=put(np.int32(step)), params=params)
    if not _check_kind(folder, kind, _MADE_ALIKE)["optimizer"]:
        raise ValueError(
            f"{folder} was saved without its optimizer; load it with optimizer=False"
        )
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        return checkpoints.restore(like)


def load_trained(folder: Path, like: Params, kind: Kind) -> tuple[int, Params]:
    """(step, the weights that train) of the newest checkpoint. like: their shapes. Raises
    ValueError."""
    _check_kind(folder, kind, _MADE_ALIKE)
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        return checkpoints.restore_params(like)


def read_kind(folder: Path) -> Kind:
    """What a folder holds. Raises ValueError if its file is damaged."""
    if not (folder / KIND).exists():
        raise ValueError(f"{folder} holds nothing that a client of a Trainer has saved")
    kind = read_object(folder / KIND)
    types = {name: type(value) for name, value in kind_of("", None, True).items()}
    if {name: type(value) for name, value in kind.items()} != types:
        raise ValueError(f"{folder / KIND} is damaged: {shown(kind)}")
    return kind


def _check_kind(folder: Path, kind: Kind, remedy: str) -> Kind:
    """What the folder holds. Raises ValueError if this client's weights are of another kind."""
    saved = read_kind(folder)
    # another optimizer is no obstacle: its state may be left out
    differ = [
        f"{name} is {shown(saved[name])} there and {shown(value)} here"
        for name, value in kind.items()
        if name != "optimizer" and saved[name] != value
    ]
    if differ:
        raise ValueError(f"{folder} holds other weights: {'; '.join(differ)}; {remedy}")
    return saved
