"""Settings: conf/ and the words of a command line become a built `RunConfig`. Hydra and OmegaConf
are used here alone."""

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import hydra
import yaml
from flax.traverse_util import flatten_dict
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tunix_lite.basics.errors import ConfigError, error_context
from tunix_lite.basics.plain_text import SHOWN, hide, hide_users_of_urls
from tunix_lite.distributed.command_line import check_config_dir, conf_dir
from tunix_lite.settings.config import EVALUATED, RunConfig, build
from tunix_lite.settings.hints import check_values, shell_quoted, wrong_override

# Enough for the sums of the bundled model, chat template included.
_OF_BUNDLED = {"max_prompt_length": 32, "max_new_tokens": 48}
# For data of the user's and a model by its name, such as model=qwen3_0.6b.
_OF_NAMED = {"max_prompt_length": 512, "max_new_tokens": 512}
# Of conversations, and of several completions of a prompt, which are to differ.
_TEMPERATURE = 0.7


def auto(name: str, *, _root_: Mapping[str, int | float | dict]) -> int | float | str:
    """The value of `${auto:NAME}` in conf/, a default that follows other settings. What depends on
    the model's files or on the devices is chosen later, by settings/resolved_run.py. _root_: all
    settings, as OmegaConf gives them.
    Example: with task=gsm8k, `auto("max_new_tokens")` is 512."""
    if name == "temperature":
        has_prompt = _root_.get("prompt") is not None or _root_.get("prompts") is not None
        return 0.0 if has_prompt and _root_["num_generations"] == 1 else _TEMPERATURE
    # the rows of text: all tokens but the first are learned
    row_tokens = _root_["task"].get("row_tokens")
    usual = {"num_examples": EVALUATED, "best_metric": "eval/accuracy"}
    if row_tokens is not None:
        usual = {"max_prompt_length": 1, "max_new_tokens": row_tokens - 1, "num_examples": 0}
        usual["best_metric"] = "eval/loss"
    if name in usual:
        return usual[name]
    lengths = _root_["task"].get("lengths")
    if lengths is not None:
        return lengths[name]
    model = _root_["model"]
    architecture = model.get("architecture")
    if architecture is None or model["weights"] == "random":
        return _OF_BUNDLED[name]
    # both together must fit
    return min(_OF_NAMED[name], architecture["max_positions"] // 2)


OmegaConf.register_new_resolver("auto", auto, replace=True)


def compose(overrides: list[str], more_conf: str | None = None) -> RunConfig:
    """The settings of a run, built from conf/ and these overrides, written as on the command line.
    more_conf: a folder with the user's own options. Raises ConfigError.
    Example: `compose(["algorithm=dr_grpo", "training.max_steps=20"]).training.max_steps` is 20."""
    return build(RunConfig, compose_values(overrides, more_conf))


def compose_values(
    overrides: list[str],
    more_conf: str | None = None,
    of: tuple[str, ...] = (),
    config_name: str = "config",
) -> dict:
    """The settings as nested plain values, not built yet. of: overrides that a command adds,
    `("+command=generate",)`. config_name: of the file that everything begins with. Raises
    ConfigError."""
    overrides = expand_short_forms(overrides)
    hide_users_of_urls(overrides)
    with error_context(""):
        check_config_dir(more_conf)
    check_values(overrides)
    with _options_in(more_conf):
        try:
            return _plain_values(hydra.compose(config_name, [*of, *overrides]))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(explain(error, overrides, more_conf, of, config_name)) from error
        except yaml.YAMLError as error:
            # PyYAML says where the structure began, which is where a bracket was left open.
            mark = getattr(error, "context_mark", None) or getattr(error, "problem_mark", None)
            if mark is None:
                raise ConfigError(" ".join(str(error).split())) from error
            why = ": ".join(text for text in (error.context, error.problem) if text)
            raise ConfigError(f"{mark.name}, line {mark.line + 1}: no YAML: {why}") from error


@contextlib.contextmanager
def _options_in(more_conf: str | None) -> Iterator[None]:
    """Inside, Hydra composes from conf/ and from this folder, as with --config-dir."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        if more_conf is not None:
            search_path = create_config_search_path(str(conf_dir()))
            # where --config-dir puts it: before Hydra's own entry, which must be the last
            place = f"file://{Path(more_conf).absolute()}"
            search_path.prepend("command-line", place, SearchPathQuery(provider="schema"))
            GlobalHydra.instance().clear()
            Hydra.create_main_hydra2("app", search_path)
        yield


# Settings whose value is a text: a shell's quotes around it are enough.
_TEXTS = {"task.prompt", "task.system", "prompt", "system"}


def expand_short_forms(argv: list[str]) -> list[str]:
    """The words of a command line, with `resume=X` written out as `resume.folder=X`, with `++`
    before a variable of the chat template, and with the quotes that Hydra wants around a text with
    braces, commas or spaces."""
    words = []
    for word in argv:
        key, equals, text = word.partition("=")
        has_quotes = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        if key == "resume" and equals:
            word = f"resume.folder={text}"
        elif key.startswith("model.template.") and equals:
            # Any name may be there: the chat template knows which it reads.
            word = f"++{word}"
        elif key in _TEXTS and text != "null" and not has_quotes:
            # backslashes are doubled before a quote, and nowhere else
            escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
            escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
            if "." not in key:
                # a text for the model, in which OmegaConf would look for a setting of that name
                escaped = escaped.replace("${", "\\${")
            word = f"{key}='{escaped}'"
        words.append(word)
    return words


# Groups of settings whose texts name models, folders and hosts.
_NO_SECRETS = {"model", "hydra", "launch"}


def _plain_values(settings: DictConfig) -> dict:
    """The settings with all references resolved. Secrets among them are hidden from now on."""
    # Values of environment variables that settings refer to as ${oc.env:NAME}, if they may be a key
    # or a password: no number, no short word, and no path. Hiding those would spoil messages.
    unresolved = OmegaConf.to_container(settings, resolve=False)
    others = {name: value for name, value in unresolved.items() if name not in _NO_SECRETS}
    for name in set(re.findall(r"\$\{oc\.env:[\s'\"\\]*(\w+)", repr(others))):
        text = os.environ.get(name, "")
        first = re.match(r"/[^/]+", text)
        is_path = os.path.exists(text) or (first is not None and os.path.exists(first[0]))
        if len(text) >= 8 and not is_path and re.fullmatch(r"[\d.eE+-]+", text) is None:
            hide(text)
    values = OmegaConf.to_container(settings, resolve=True)
    hide_users_of_urls(values)
    return values


def explain(
    error: Exception,
    overrides: list[str],
    more_conf: str | None,
    of: tuple[str, ...],
    config_name: str,
) -> str:
    """The message for an error of Hydra: which override is wrong, with the nearest right spelling.
    The other arguments are those of `compose_values`. Call it inside `_options_in`."""
    # An override that Hydra's grammar refuses.
    groups = [folder.name for folder in sorted(conf_dir().iterdir()) if folder.is_dir()]
    parsed = {}
    for text in overrides:
        try:
            parsed[text] = OverridesParser.create().parse_override(text)
        except HydraException:
            start = f"{text}: cannot be read as an override; write "
            if "=" not in text and "+command=generate" in of:
                return f"{start}prompt='...'"
            key, equals, value = text.partition("=")
            is_key = equals and re.fullmatch(r"[+~]*[\w./@-]+", key)
            if is_key and not re.search(r"[\[\]{}\"]", value):
                # the shell's quotes, if any, are gone: those inside are Hydra's
                line = f'{key}="{value}"'
                with contextlib.suppress(HydraException):
                    OverridesParser.create().parse_override(line)
                    return f"{start}{shell_quoted(line)}"
            return (
                f"{start}key=value, and a value with brackets or spaces in two pairs of quotes: "
                "'key=\"value\"'"
            )

    # The overrides whose option or key does not exist, all of them.
    chosen = [
        text for text, override in parsed.items() if override.get_key_element() in groups
    ]
    known = []
    # of the options that are chosen, or where they cannot be composed of the default ones
    for options in ([*of, *chosen], list(of)):
        with contextlib.suppress(HydraException, OmegaConfBaseException):
            values = _plain_values(hydra.compose(config_name, options))
            known = known or list(flatten_dict(values, keep_empty_nodes=True, sep="."))
    folders = [conf_dir()]
    if more_conf:
        folders.append(Path(more_conf))
    if not known:
        file = f"{config_name.removesuffix('.yaml')}.yaml"
        if any((folder / file).is_file() for folder in folders):
            return str(error).replace("\n", " ")
        places = " or ".join(map(str, folders))
        return (
            f"--config-name={config_name}: there is no {file} in {places}; --config-dir=FOLDER"
        )
    wrong = []
    for text, override in parsed.items():
        key = override.get_key_element().lstrip("+~")
        if text.startswith("+") and key in groups and "Multiple values" in str(error):
            # Hydra takes a + for a group that the defaults list does not have.
            return f"{text}: write it without the +: {text.lstrip('+')}"
        is_added = text.startswith("+") and key not in groups
        if key.startswith("hydra/") and (extra := _PLUGINS.get(text.split("/")[-1])):
            return f"{text} needs a package that is not installed: pip install -e '.[{extra}]'"
        # Hydra explains its own, and what is added has no right spelling
        if key.startswith(("hydra.", "hydra/")) or is_added:
            continue
        value = override.value() if key in groups else text.partition("=")[2]
        message = wrong_override(key, value, known, groups, folders)
        if message is not None:
            wrong.append(message)
    if wrong:
        line = ". ".join(wrong)
        # many words of other projects have a line each
        if len(line) <= SHOWN:
            return line
        return "\n  ".join(wrong)
    for text, override in parsed.items():
        if override.is_sweep_override():
            return f"{text}: several values are a sweep, which needs --multirun"
    return str(error).replace("\n", " ")


# Options of Hydra that a package brings, and the extra of ours that installs it.
_PLUGINS = {
    "launcher=submitit_local": "submitit",
    "launcher=submitit_slurm": "submitit",
    "sweeper=optuna": "optuna",
}


def fill_in_folder(text: str, values: dict) -> str:
    """Fills in `${now:...}` and settings in the folder that a command line gives. values: the
    settings as plain values. Raises ConfigError for what only Hydra could fill in."""
    setup_globals()
    try:
        return str(OmegaConf.create({**values, "hydra": {"folder": text}}).hydra.folder)
    except OmegaConfBaseException as error:
        why = str(error).splitlines()[0]
        raise ConfigError(
            f"{text}: {why}; a run of several processes fills in only ${{now:...}} and settings"
        ) from error


def key_of(override: str) -> str:
    """The key of an override, `model.weights` or `+model.more`."""
    return OverridesParser.create().parse_override(override).get_key_element()


def runs_of_sweep(overrides: list[str]) -> list[list[str]]:
    """The overrides of each run of a sweep: a=1,2 b=3 -> [[a=1, b=3], [a=2, b=3]]."""
    choices = []
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException:
            # Composing this override will raise an error that says what is wrong.
            return [overrides]
        values = [text]
        if override.is_interval_sweep():
            # of optuna, which draws numbers from it: its lower end stands for them
            values = [f"{override.get_key_element()}={override.value().start}"]
        elif override.is_sweep_override():
            key = override.get_key_element()
            values = [f"{key}={value}" for value in override.sweep_string_iterator()]
        choices.append(values)
    return [list(run) for run in itertools.product(*choices)]


def hydra_job(job: Callable[[dict, Path], object]) -> None:
    """Lets Hydra read the command line, and calls job(plain values, folder) for each run of it. A
    sweeper that looks for the best settings, as optuna does, compares what the job returns."""

    @hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
    def run(settings: DictConfig) -> object:
        return job(_plain_values(settings), Path(HydraConfig.get().runtime.output_dir))

    run()


def as_yaml(values: dict) -> str:
    """Plain values as `--cfg job` prints them."""
    return OmegaConf.to_yaml(values)


def lacks_a_reference(error: ConfigError) -> bool:
    """Returns whether composing failed because a setting refers to something that is missing."""
    return isinstance(error.__cause__, OmegaConfBaseException)


def sweep_folder() -> Path | None:
    """The folder of the sweep that the current run belongs to; None if it is no run of a sweep.
    Call it while Hydra runs a job."""
    settings = HydraConfig.get()
    if settings.mode == RunMode.MULTIRUN:
        return Path(settings.sweep.dir).absolute()
    return None
