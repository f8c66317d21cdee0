"""Rows as other projects write them: the form of a row, and the columns that tasks read of it. A
form adds columns and takes none away, so rewards and task.prompt still find those of the file."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tunix_lite.basics.plain_text import shortened
from tunix_lite.tasks.messages import fields_of

# what ShareGPT calls a role
_SPEAKERS = {"human": "user", "gpt": "assistant", "model": "assistant", "observation": "tool"}
_SPEAKERS |= {role: role for role in ("user", "assistant", "system", "tool")}


def _alpaca(row: Mapping) -> dict:
    # what the instruction is about follows it, after a blank line
    parts = [row["instruction"], row.get("input")]
    return {"prompt": "\n\n".join(filter(None, parts)), "completion": row["output"]}


def _sharegpt(row: Mapping) -> dict:
    messages = _system(row)
    for turn in row["conversations"]:
        speaker = turn.get("from") if isinstance(turn, Mapping) else None
        if speaker not in _SPEAKERS or "value" not in turn:
            raise ValueError(
                f"`conversations` holds {shortened(turn)}; a turn of ShareGPT has `from` "
                f"({', '.join(_SPEAKERS)}) and `value`"
            )
        messages.append({"role": _SPEAKERS[speaker], "content": turn["value"]})
    return {"messages": messages}


def _questions(row: Mapping) -> dict:
    messages = [*_system(row), {"role": "user", "content": row["question"]}]
    return {"prompt": messages if len(messages) > 1 else row["question"]}


def _system(row: Mapping) -> list[dict]:
    if row.get("system"):
        return [{"role": "system", "content": row["system"]}]
    return []


class Form(NamedTuple):
    """A way of writing rows. Example: FORMS[0] is that of verl."""

    name: str
    # columns that a row of this form has
    columns: tuple[str, ...]
    # type of the first of them
    kind: type = object
    # the columns that tasks read; None: they are there
    read: Callable[[Mapping], dict] | None = None


# the first that fits counts
FORMS = (
    Form(
        "verl",
        ("reward_model", "prompt"),
        Mapping,
        lambda row: {"answer": row["reward_model"].get("ground_truth")},
    ),
    Form("prompt, chosen, rejected", ("prompt", "chosen", "rejected")),
    Form("question, chosen, rejected", ("question", "chosen", "rejected"), str, _questions),
    Form("conversations chosen, rejected", ("chosen", "rejected"), list),
    Form("messages", ("messages",), list),
    Form("prompt, completion", ("prompt", "completion")),
    Form("ShareGPT", ("conversations",), list, _sharegpt),
    Form("Alpaca", ("instruction", "output"), str, _alpaca),
)


def formed(row: Mapping, fields: tuple[tuple[str, str], ...] = ()) -> tuple[str, dict]:
    """The name of the row's form, "" if it has columns of its own, and the row with the columns
    that tasks read. A null is absent. fields: (name in the task, name in the file) of columns.
    Raises ValueError for a column that is not there.
    Example: formed({"problem": "1 + 2"}, (("question", "problem"),)) is ("", {"question": "1 +
    2"})."""
    names = {}
    for name, column in fields:
        if column not in row or (name in row and name != column):
            why = f"no {column!r}" if column not in row else f"a {name!r} already"
            raise ValueError(
                f"task.fields={{{name}: {column}}}, and the row has {why}: {fields_of(row)}"
            )
        names[column] = name
    renamed = {names.get(column, column): value for column, value in row.items()}
    present = {name for name, value in renamed.items() if value is not None}
    for form in FORMS:
        first, *_ = form.columns
        if present.issuperset(form.columns) and isinstance(renamed[first], form.kind):
            more = {} if form.read is None else form.read(renamed)
            added = {name: more[name] for name in more.keys() - present}
            return form.name, renamed | added
    return "", renamed
