"""Turns the command line into a `RunConfig` for the programs. Settings are composed and checked
here before `hydra.main` composes them and makes a folder, so a mistake leaves nothing behind."""

import argparse
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunix_lite.basics.addresses import is_address
from tunix_lite.basics.buckets import bring, send
from tunix_lite.basics.errors import ConfigError, RunFailed, error_context
from tunix_lite.basics.plain_text import visible, without_secrets
from tunix_lite.basics.untrusted import as_path
from tunix_lite.commands import help as help_pages
from tunix_lite.commands.closed_pipe import as_long_as_read, open_closed_streams
from tunix_lite.distributed.command_line import (
    SHOWS_ONLY,
    check_config_dir,
    conf_dir,
    config_dir,
    folder_given,
    folder_key,
    on_this_machine,
)
from tunix_lite.distributed.folder_lock import LOCK
from tunix_lite.distributed.host_memory import keep_freed_memory
from tunix_lite.inference.language_model import run_settings
from tunix_lite.runs.fingerprint import read_fingerprint
from tunix_lite.settings.compose import (
    as_yaml,
    compose_values,
    expand_short_forms,
    hydra_job,
    key_of,
    lacks_a_reference,
    runs_of_sweep,
    sweep_folder,
)
from tunix_lite.settings.config import RunConfig, build
from tunix_lite.settings.hints import HYDRA, OF_COMMANDS, flags_first
from tunix_lite.tracking.disk import ANYWHERE, DiskError
from tunix_lite.tracking.rundir import RunDir

EXIT_FAILED = 1
# A launcher does not start the run again after this one.
_EXIT_WRONG_SETTINGS = 2
# 128 + SIGINT, as shells have it.
EXIT_INTERRUPTED = 130


def say(text: str) -> None:
    """Prints a line on standard error: standard output is for results."""
    print(visible(text), file=sys.stderr, flush=True)


def main(
    task: Callable[[RunConfig, Path, Any], object], check: Callable[[RunConfig, Path], Any]
) -> None:
    """Runs `task(run, folder, found)` with the settings on the command line, after `check(run,
    folder)` of the same run, or of all runs of a sweep. found: what `check` returned; None in a
    sweep, where hours may lie between the two and each run holds its data. Errors end the process
    with a message and an exit code. The folder that `check` gets is the one that Hydra will make,
    as far as it is known."""
    keep_freed_memory()
    open_closed_streams()
    if SHOWS_ONLY & set(sys.argv[1:]):
        # It ends without a word where nobody reads any more, as `cat` does: Hydra would print a
        # traceback.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if help_pages.answered(sys.argv[1:]):
        return
    argv = expand_short_forms(sys.argv[1:])
    checked: list[tuple[dict, RunConfig, Any]] = []

    def check_all() -> None:
        with error_context(""):
            sys.argv[1:] = on_this_machine(flags_first(argv, HYDRA))
        with error_context(folder_key(argv)):
            as_path(folder_given(sys.argv[1:]) or ".")
        with error_context(""):
            check_config_dir(config_dir(argv))
        parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
        parser.add_argument("--multirun", "-m", action="store_true")
        parser.add_argument("--config-dir", "-cd")
        parser.add_argument("--config-name", "-cn", default="config")
        parser.add_argument("--cfg", "-c")
        parser.add_argument("--resolve", action="store_true")
        parser.add_argument("--package", "-p")
        parser.add_argument("overrides", nargs="*")
        known, others = parser.parse_known_intermixed_args(sys.argv[1:])
        runs = [known.overrides]
        if others:
            # Other flags of Hydra only show something; with --cfg the overrides must be right.
            runs = []
        elif known.multirun:
            runs = runs_of_sweep(known.overrides)
        for overrides in runs:
            try:
                values = compose_values(
                    overrides, known.config_dir, config_name=known.config_name
                )
            except ConfigError as error:
                # What a setting refers to may be missing where the settings are only shown.
                if known.cfg and lacks_a_reference(error):
                    continue
                raise
            if not known.cfg:
                run = build(RunConfig, values)
                # Without hydra.run.dir Hydra takes a new folder, named after the time.
                found = check(run, Path(folder_given(overrides) or "outputs/not-made-yet"))
                checked.append((values, run, None if known.multirun else found))

    _or_exit(check_all)
    # The check has shown what the run would be, and Hydra would make its folder.
    if checked and all(run.runtime.dry_run for _, run, _ in checked):
        return

    if {"--info", "-i"} & set(sys.argv[1:]):
        # Hydra prints by a handler of its own, beside that which absl made when it was imported.
        logging.getLogger().handlers.clear()

    def job(values: dict, folder: Path) -> object:
        # Hydra has written the command line's settings, and secrets with them.
        sweep = sweep_folder()
        of_sweep = [] if sweep is None else [sweep / "multirun.yaml"]
        for file in [*(folder / ".hydra").glob("*.yaml"), *of_sweep]:
            text = file.read_text()
            if text != without_secrets(text):
                file.write_text(without_secrets(text))

        # Values with ${now:...} or nan are never equal to those checked: they are checked again.
        same = [one for one in checked if one[0] == values]

        def start() -> object:
            if not same:
                return task(build(RunConfig, values), folder, None)
            _, run, found = same[0]
            return task(run, folder, found)

        return _or_exit(start, folder)

    hydra_job(job)


def run_command(
    name: str,
    kind: type,
    action: Callable[..., None],
    positional: str | None = None,
    is_list: bool = False,
    takes_run: bool = True,
) -> None:
    """Runs a command beside training, `action(run, settings)`, with the settings of its command
    line. Errors end the process with a message and an exit code. name: the command, with defaults
    in conf/command/NAME.yaml. kind: the dataclass of its settings. With checkpoint=FOLDER the
    settings of `model` are those of that run. positional: the setting that a first word is short
    for: one without `=`, or a folder that is there; is_list: all such words. takes_run: False for
    `action(settings)`."""
    keep_freed_memory()
    # Flags that it does not have end the process, with what to write instead.
    _or_exit(lambda: flags_first(sys.argv[1:], OF_COMMANDS))
    parser = argparse.ArgumentParser(prog=f"tunix-lite {name}", add_help=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("overrides", nargs="*")
    known = parser.parse_intermixed_args()
    if known.help:
        place = ""
        if positional:
            more = " ..." if is_list else ""
            place = f" [{positional.upper()}{more}]"
        with as_long_as_read():
            flags = "[key=value ...] [--cfg job] [--config-dir DIR]"
            print(f"usage: tunix-lite {name}{place} {flags}\n")
            print((conf_dir() / "command" / f"{name}.yaml").read_text().partition("\n")[2])
        return
    folders = []
    if positional:
        # A word with `=` is a folder if there is one of that name: `sweep/seed=1`.
        first = known.overrides if is_list else known.overrides[:1]
        folders = [word for word in first if "=" not in word or os.path.isdir(word)]
    overrides = expand_short_forms([word for word in known.overrides if word not in folders])

    def act() -> None:
        values = compose_values(overrides, known.config_dir, (f"+command={name}",))
        if folders:
            values[positional] = folders if is_list else folders[0]
        # An address is read and written at its place on this machine.
        written = []
        for key in ("checkpoint", "out", "prompts"):
            value = values.get(key)
            with error_context(key):
                if isinstance(value, str) and is_address(value):
                    path = bring(value, is_mine=key == "out")
                    values[key] = str(path)
                    of_run = [path / "evaluation", path / "export"]
                    written += {"out": [path], "checkpoint": of_run}.get(key, [])
                elif isinstance(value, str):
                    as_path(value)
        began = time.time()

        # A folder is data: `_of_run` refuses one whose settings hold a _target_.
        if values.get("checkpoint") is not None:
            if not isinstance(values["checkpoint"], str):
                raise ConfigError(
                    f"checkpoint={values['checkpoint']!r} is not the folder of a run"
                )
            values["model"] = _of_run(values, overrides)
            groups = {key_of(text).lstrip("+~").partition(".")[0] for text in overrides}
            if name == "evaluate" and "task" not in groups:
                _refuse_run_on_text(Path(values["checkpoint"]))
        if known.cfg:
            print(as_yaml(values), end="")
            return
        own = {field.name: values.pop(field.name) for field in dataclasses.fields(kind)}
        settings = build(kind, own)
        if takes_run:
            action(build(RunConfig, values), settings)
        else:
            action(settings)
        with error_context("", RunFailed):
            for place in written:
                send(place, began)

    _or_exit(as_long_as_read()(act), interrupted="")


# Settings of `model` that may stand beside checkpoint=: where the base is, and the machine's own.
_BESIDE_A_RUN = {"weights", "tokenizer", "family", "mesh_shape"}


def _refuse_run_on_text(folder: Path) -> None:
    """Raises ConfigError if the run learned from plain text: it answers no prompts."""
    task = None
    # A copy may have lost its fingerprint.
    with contextlib.suppress(ValueError):
        task = read_fingerprint(RunDir(folder).fingerprint).get("task")
    if isinstance(task, dict) and str(task.get("_target_")).endswith(".TextTaskConfig"):
        raise ConfigError(
            f"checkpoint={folder} learned from plain text, which has no prompts; its held-out loss "
            "is eval/loss in metrics.jsonl. To grade its completions of other prompts, name a "
            "task, such as task=arithmetic"
        )


def _of_run(values: dict, overrides: list[str]) -> dict:
    """The `model` settings of the run in values["checkpoint"], with the command line's on top; the
    mesh belongs to the machine. Raises ConfigError for a setting not in _BESIDE_A_RUN."""
    own = {}
    for text in overrides:
        key = key_of(text)
        group, _, name = key.partition(".")
        if group.lstrip("+~") != "model":
            continue
        if group != "model" or name not in _BESIDE_A_RUN:
            allowed = ", ".join(f"model.{n}" for n in sorted(_BESIDE_A_RUN))
            raise ConfigError(
                f"{key}: the run in checkpoint= determines the model; beside it you can give "
                f"{allowed}"
            )
        # what the command line says comes last
        own[name] = values["model"][name]
    settings, _ = run_settings(Path(values["checkpoint"]), own.get("family"))
    return settings | own | {"mesh_shape": values["model"]["mesh_shape"]}


_RESUME_HINT = (
    "; if a checkpoint was saved, the same command with hydra.run.dir=FOLDER goes on from it"
)


def _or_exit(
    action: Callable[[], object],
    made_by_hydra: Path | None = None,
    interrupted: str = _RESUME_HINT,
) -> object:
    """Returns action(); errors that a user can cause become one line of text and an exit code.
    made_by_hydra: the folder of this run, removed where settings are wrong and it holds nothing
    else. interrupted: what follows "interrupted" after Ctrl-C."""
    try:
        return action()
    except KeyboardInterrupt:
        print(f"interrupted{interrupted}", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        # Standard output and error may be files on the full disk, too. An error of a file that was
        # open before has no name; standard output is the one here.
        if isinstance(error, DiskError):
            text = visible(str(error))
        elif error.filename is None and error.errno in ANYWHERE:
            text = f"{ANYWHERE[error.errno]}: standard output"
        else:
            raise
        with contextlib.suppress(OSError):
            print(f"error: {text}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        # A usual exit would wait for a thread that still writes a checkpoint, and print its error.
        os._exit(EXIT_FAILED)
    except (ConfigError, RunFailed, FloatingPointError) as error:
        # Of others than wrong settings the folder stays: another run may have it.
        is_wrong = isinstance(error, ConfigError)
        is_ours = made_by_hydra is not None and is_wrong
        if is_ours and {path.name for path in made_by_hydra.iterdir()} <= {".hydra", LOCK}:
            shutil.rmtree(made_by_hydra)
        say(f"error: {error}")
        sys.exit(_EXIT_WRONG_SETTINGS if is_wrong else EXIT_FAILED)
