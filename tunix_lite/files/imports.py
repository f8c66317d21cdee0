"""Imports what settings name by dotted path. Settings that a folder gave may name only what was
allowed beforehand: importing a module runs it."""

import contextlib
import difflib
import importlib
import sys
from collections.abc import Iterator, Set
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from tunix_lite.plain_text import shown

# what may be imported, and what to say of anything else; None: the settings are the user's own
_allowed: ContextVar[tuple[Set[str], str] | None] = ContextVar("allowed", default=None)


@contextlib.contextmanager
def importing_only(names: Set[str], refusal: str) -> Iterator[None]:
    """Inside, settings may name these dotted paths and no others.

    refusal: the end of the sentence about any other, such as "'os.system' is named by a folder".
    """
    token = _allowed.set((names, refusal))
    try:
        yield
    finally:
        _allowed.reset(token)


def import_named(path: str) -> Any:
    """What a dotted path such as `package.module.NAME` means. Raises ValueError where there is no
    such thing, or where it may not be imported: then nothing was."""
    allowed = _allowed.get()
    if allowed is not None and path not in allowed[0]:
        raise ValueError(f"{shown(path)} {allowed[1]}")
    module, _, name = path.rpartition(".")
    if not module:
        name = name or "NAME"
        raise ValueError(
            f"{shown(path)} has no module; write module.{name}, as in `from module import {name}`"
        )
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        hint = _hint(error, module, name)
        raise ValueError(f"cannot import {path!r} ({error}){hint}") from error


def _hint(error: Exception, module: str, name: str) -> str:
    """What to do about a module that Python does not find, or about a name that it does not have.

    Example: `; did you mean my_rewards?`, where my_rewards.py lies in this folder.
    """
    top = module.partition(".")[0]
    near: list[str] = []
    if isinstance(error, ModuleNotFoundError) and error.name == top:
        here = [file.stem for file in Path().glob("*.py")]
        if top in here:
            return "; Python does not look in this folder: put PYTHONPATH=. before the command"
        near = difflib.get_close_matches(top, here, n=1)
        if not near:
            return "; Python looks beside run_training.py and in the folders of PYTHONPATH"
    elif isinstance(error, AttributeError) and module in sys.modules:
        near = difflib.get_close_matches(name, dir(sys.modules[module]), n=1)
    return f"; did you mean {shown(near[0])}?" if near else ""
