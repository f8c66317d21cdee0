"""Programs are traced once: what `jax.jit` made of a function of the package is taken again for a function that says the
same. Whole runs make the same functions again and again, and half the seconds of a short run are tracing; conftest.py
imports this.

A function says the same if its code is the same object, and all that it holds has the same values. Where that cannot be
known, or a test is about compiling (fixture `programs_anew`), jax.jit does as it always does.
"""

import dataclasses
import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import jax
import numpy as np
import pytest

from tunix_lite.learner.update import TrainStep
from tunix_lite.parallel import mesh
from tunix_lite.rollout.programs import Programs

MOST = 400  # programs that are kept
OWN = ("tunix_lite", "optax", "jax", "flax")  # modules whose functions change nothing outside
# Modules whose functions are traced: a patch there makes other programs.
TRACED = tuple(f"tunix_lite.{room}." for room in ("algorithms", "kernels", "learner", "models", "parallel", "rollout"))
TRACED += OWN[1:]
PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...), Enum, np.dtype, type, types.ModuleType)
BY_VALUE = (jax.sharding.Mesh, jax.sharding.Sharding, jax.sharding.PartitionSpec, jax.tree_util.PyTreeDef)

_jit = jax.jit
_kept: dict[Any, tuple] = {}
_patches: list[tuple] = []  # (target, name, value) of monkeypatches that stand
_off: list[None] = []


class _Unknown(Exception):
    """Nobody can say whether another object has the same value."""


def _key(x: Any, held: list) -> Any:
    """A hashable that stands for the value; `held` keeps alive what is known by its identity."""
    match x:
        case bool() | int() | float() | complex() | np.generic():
            return type(x), repr(x)
        case _ if isinstance(x, (*PLAIN, *BY_VALUE)):
            return x
        case Programs():
            return Programs, _key(x.spec, held)
        case TrainStep():  # of the policy it reads the scores alone
            fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)} | {"policy": x.policy.scores}
            return TrainStep, _key(tuple(fields.items()), held)
        case functools.partial():
            return functools.partial, _key((x.func, x.args, tuple(x.keywords.items())), held)
        case types.MethodType():
            return types.MethodType, _key((x.__func__, x.__self__), held)
        case types.FunctionType():
            return _key_of_function(x, held)
        case np.ndarray() if x.dtype != object and x.nbytes < 1 << 16:
            return x.dtype, x.shape, x.tobytes()
        case dict():
            return type(x), *(_key(pair, held) for pair in x.items())
        case tuple() | list() if x or isinstance(x, tuple):
            return type(x), *(_key(one, held) for one in x)
        case _ if dataclasses.is_dataclass(x) and x.__dataclass_params__.frozen and type(x).__module__.startswith(OWN):
            return type(x), *(_key(getattr(x, f.name), held) for f in dataclasses.fields(x))
        case types.BuiltinFunctionType() | np.ufunc() | jax.custom_jvp() | jax.custom_vjp():
            held.append(x)
            return id(x)
    if type(x) is type(_jit(abs)):
        held.append(x)
        return id(x)
    raise _Unknown(type(x))


def _key_of_function(x: types.FunctionType, held: list) -> Any:
    if not x.__module__.startswith(OWN):
        raise _Unknown(x)
    held.append(x.__code__)
    cells = tuple(cell.cell_contents for cell in x.__closure__ or ())
    defaults = (x.__defaults__ or (), tuple((x.__kwdefaults__ or {}).items()))
    return id(x.__code__), _key((cells, defaults), held)


def _jit_once(fun: Any = None, **options: Any) -> Any:
    if fun is None or _off:
        return _jit(**options) if fun is None else _jit(fun, **options)
    held = [*_patches]
    try:
        tables = [tuple(mesh._tables[name].items()) for name in ("train", "rollout", mesh._active[-1])]
        patched = tuple((id(target), name, id(value)) for target, name, value in _patches)
        key = (_key((fun, options), held), jax.sharding.get_mesh(), *tables, patched)
        hash(key)
    except (_Unknown, ValueError, TypeError):
        return _jit(fun, **options)
    program, _ = _kept.pop(key, None) or (_jit(fun, **options), held)
    _kept[key] = program, held  # at the end: the first are those that were not used for the longest time
    if len(_kept) > MOST:
        del _kept[next(iter(_kept))]
    return program


@contextmanager
def anew() -> Iterator[None]:
    """Inside, all programs are traced and compiled."""
    _off.append(None)
    try:
        yield
    finally:
        _off.pop()


def _noting_patches(really, undo):
    """Programs of a patched package are other programs."""

    def setattr_(self, target, name, value=pytest.MonkeyPatch, **how):
        really(self, target, name, *([] if value is pytest.MonkeyPatch else [value]), **how)
        where = target if isinstance(target, str) else getattr(target, "__module__", getattr(target, "__name__", ""))
        if where.startswith(TRACED):
            _patches.append((target, name, value))
            self.__dict__.setdefault("_noted", []).append(_patches[-1])

    def undo_(self):
        undo(self)
        noted = self.__dict__.pop("_noted", [])
        _patches[:] = [patch for patch in _patches if not any(patch is one for one in noted)]

    return setattr_, undo_


jax.jit = _jit_once
_ours = _noting_patches(pytest.MonkeyPatch.setattr, pytest.MonkeyPatch.undo)
pytest.MonkeyPatch.setattr, pytest.MonkeyPatch.undo = _ours
