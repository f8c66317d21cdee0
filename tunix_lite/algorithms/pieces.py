"""Pieces of an algorithm: functions that its settings name."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any


def function_of(piece: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function itself, without the settings that are bound to it."""
    return piece.func if isinstance(piece, partial) else piece


def settings_of(piece: Callable[..., Any]) -> dict[str, Any]:
    """Returns every setting of a function that has a value, bound or by default."""
    parameters = inspect.signature(function_of(piece)).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return defaults | (piece.keywords if isinstance(piece, partial) else {})


def takes(piece: Callable[..., Any], parameter: str) -> bool:
    """Returns whether a function that the settings name has this parameter."""
    return parameter in inspect.signature(piece).parameters
