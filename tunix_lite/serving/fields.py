"""JSON objects -> dataclasses, each value checked: bodies of requests, and records of a journal."""

import dataclasses
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from tunix_lite.basics.plain_text import shown
from tunix_lite.rollout.settings import LEAST_POSITIVE
from tunix_lite.serving.bad_call import BadCall

_FLOAT32 = (-3.4e38, 3.4e38)
# Numbers of fields that have no limits of their own.
_LIMITS = {int: (0, 2**62), float: _FLOAT32}
# What a value of another type is told to be.
_WORDS = {bool: "true or false", str: "a text", dict: "an object", list: "a list"}

T = TypeVar("T")


def between(low: float, high: float, default: object = dataclasses.MISSING) -> Any:
    """A field of a dataclass that holds a number from low to high."""
    return dataclasses.field(default=default, metadata={"limits": (low, high)})


def read(kind: type[T], body: object, name: str | None = None) -> T:
    """The dataclass with the values of a JSON object, the field `name` of another one; a missing or
    null field has its default. Raises BadCall, naming the field."""
    if not isinstance(body, dict):
        raise BadCall(f"{name or 'the body'} is {shown(body)}, not a JSON object", name)
    hints = get_type_hints(kind)
    values = {}
    for one in dataclasses.fields(kind):
        value = body.get(one.name)
        # clients write null for what they do not set
        is_needed = one.default is one.default_factory is dataclasses.MISSING
        if value is not None or is_needed:
            values[one.name] = _checked(one.name, value, hints[one.name], one.metadata)
    return kind(**values)


def _checked(name: str, value: object, hint: object, metadata: Mapping) -> Any:
    if isinstance(hint, UnionType):
        if value is None:
            return None
        # of `int | None` the int
        [hint] = [kind for kind in get_args(hint) if kind is not NoneType]
    kind = get_origin(hint) or hint
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return read(kind, value, name)
    if kind in _LIMITS:
        return checked_number(name, value, kind, *metadata.get("limits", _LIMITS[kind]))
    if not isinstance(value, kind):
        raise BadCall(f"{name}={shown(value)}; it is {_WORDS[kind]}", name)
    return value


def checked_number(name: str, value: object, kind: type, low: float, high: float) -> Any:
    """The value as an int or a float. Raises BadCall, with the name, for one outside the limits."""
    # True is an int to isinstance.
    is_number = isinstance(value, int | kind) and not isinstance(value, bool)
    # A whole number may have more digits than a float holds, so it is compared as it is.
    if not is_number or not low <= value <= high:
        limits = f"number from {low:g} to {high:g}"
        if kind is int:
            limits = f"whole number from {low} to {high}"
        raise BadCall(f"{name}={shown(value)}; it is a {limits}", name)
    # The devices compute in float32, where it would be 0.
    if 0 < abs(value) < LEAST_POSITIVE:
        raise BadCall(
            f"{name}={shown(value)}; above 0 it is at least {LEAST_POSITIVE:g}", name
        )
    return kind(value)
