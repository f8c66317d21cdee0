"""Imports objects that the user's settings name by dotted path; what a folder names is never
imported."""

import contextlib
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from tunix_lite.basics.plain_text import shown

# whether a file in the working folder may be imported, where a setting names it
_looks_here: ContextVar[bool] = ContextVar("looks_here", default=False)


@contextlib.contextmanager
def looking_in_working_folder() -> Iterator[None]:
    """Inside, settings may name modules of the working folder, too, which comes last on the import
    path."""
    token = _looks_here.set(True)
    try:
        yield
    finally:
        _looks_here.reset(token)


def import_named(path: str) -> Any:
    """Imports the object of a dotted path such as `package.module.NAME`. Raises ValueError."""
    module, _, name = path.rpartition(".")
    if not module:
        name = name or "NAME"
        raise ValueError(
            f"{shown(path)} has no module; write module.{name}, as in `from module import {name}`"
        )
    # Only a module that Python has nowhere else: no folder stands in for an absent package.
    here = Path.cwd()
    top = module.partition(".")[0]
    is_here = (here / f"{top}.py").is_file() or (here / top).is_dir()
    is_known = top in sys.modules or str(here) in sys.path
    if (
        _looks_here.get()
        and is_here
        and not is_known
        and importlib.util.find_spec(top) is None
    ):
        sys.path.append(str(here))
        importlib.invalidate_caches()
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        hint = _hint(error, module, name)
        raise ValueError(f"cannot import {path!r} ({error}){hint}") from error


def _hint(error: Exception, module: str, name: str) -> str:
    """Suggests a remedy for a module that Python does not find, or for a name that it does not
    have."""
    top = module.partition(".")[0]
    near = []
    # The module itself may be there, and miss another one.
    if isinstance(error, ModuleNotFoundError) and error.name == top:
        # the usual mistake: the file lies beside the person, and not on the path
        here = [file.stem for file in Path().glob("*.py")]
        if top in here:
            return "; Python does not look in this folder: put PYTHONPATH=. before the command"
        near = difflib.get_close_matches(top, here, n=1)
        if not near:
            here_too = "in this folder, " if _looks_here.get() else ""
            folders = "beside run_training.py and in the folders of PYTHONPATH"
            return f"; Python looks {here_too}{folders}"
    elif isinstance(error, AttributeError) and module in sys.modules:
        near = difflib.get_close_matches(name, dir(sys.modules[module]), n=1)
    return f"; did you mean {shown(near[0])}?" if near else ""
