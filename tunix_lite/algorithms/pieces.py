"""Functions with settings, as YAML names them: what they are and whether two are the same."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any


def function_of(piece: Any) -> Any:
    """The function itself, without the settings that are bound to it."""
    return piece.func if isinstance(piece, partial) else piece


def settings_of(piece: Callable) -> dict[str, Any]:
    """Every setting of a function that has a value, bound or by default."""
    parameters = inspect.signature(function_of(piece)).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return defaults | (piece.keywords if isinstance(piece, partial) else {})


def same(one: Any, other: Any) -> bool:
    """True if two values are equal; of functions, their settings too."""
    if callable(one) and callable(other):
        is_same_function = function_of(one) is function_of(other)
        return is_same_function and settings_of(one) == settings_of(other)
    return type(one) is type(other) and one == other


def name_of(piece: Any) -> str:
    """`clip` or `clip(dual=3)` of a function, the value itself of anything else."""
    if not callable(piece):
        return str(piece)
    function = function_of(piece)
    name = getattr(function, "__name__", type(function).__name__)
    bound = piece.keywords if isinstance(piece, partial) else {}
    settings = ", ".join(f"{key}={value}" for key, value in bound.items())
    return f"{name}({settings})" if settings else name
