"""The configuration reference, made from the dataclasses: every setting, its type, its default and
its comment, which stands there or in the file of conf/ that the class names."""

import ast
import dataclasses
import inspect
import io
import re
import tokenize
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from tunix_lite.algorithms import (
    advantages,
    corrections,
    distill,
    dpo,
    grpo,
    ppo,
    ratios,
    reward_model,
    sft,
    shaping,
    surrogates,
    weighting,
)
from tunix_lite.commands.check import Check
from tunix_lite.commands.doctor import Doctor
from tunix_lite.commands.evaluate import EvaluateConfig, EvaluateTaskConfig
from tunix_lite.commands.export import ExportConfig
from tunix_lite.commands.generate import GenerateConfig
from tunix_lite.commands.plan import PlanConfig
from tunix_lite.commands.serve import ServeConfig
from tunix_lite.commands.tokenizer import TokenizerConfig
from tunix_lite.distributed.process_place import LaunchConfig
from tunix_lite.environments import guessing, tools
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.learner.optim import (
    AdafactorConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
)
from tunix_lite.models.architecture import (
    Architecture,
    DeltaNet,
    Experts,
    LongRope,
    RopeScaling,
    Yarn,
)
from tunix_lite.models.lora import LoraConfig
from tunix_lite.models.source import ModelConfig, TeacherConfig
from tunix_lite.parallel.mesh import MeshShape, ShardingConfig, as_text
from tunix_lite.rewards import (
    answers,
    code,
    judge,
    math,
    math_verify,
    model,
    similarity,
    text,
)
from tunix_lite.rollout.settings import GenerationConfig, RolloutConfig
from tunix_lite.settings import config
from tunix_lite.settings.compose import compose, conf_dir
from tunix_lite.tasks import files, gsm8k, preferences, sources, task
from tunix_lite.tasks import text as plain_text
from tunix_lite.tasks.puzzles import countdown, last_word
from tunix_lite.tracking.plugs import Mlflow, Wandb
from tunix_lite.workers.pool import RewardsConfig

PAGE = "config/reference"
MARKER = "<!-- generated: settings -->"


@dataclasses.dataclass(frozen=True)
class Group:
    """One dataclass of settings, and where it stands among the keys of a run."""

    title: str
    prefix: str  # of its keys, with the dot
    kind: type
    # (run) -> the instance that a run without overrides holds; None: it holds none
    used: Callable | None


GROUPS = (
    Group("The run", "", config.RunConfig, lambda run: run),
    Group("Model", "model.", ModelConfig, lambda run: run.model),
    Group("Adapters and their base", "model.lora.", LoraConfig, lambda run: run.model.lora),
    Group("Architecture", "model.architecture.", Architecture, None),
    Group("Rope scaling", "model.architecture.rope_scaling.", RopeScaling, None),
    Group("Yarn", "model.architecture.yarn.", Yarn, None),
    Group("Longrope", "model.architecture.longrope.", LongRope, None),
    Group("Gated delta net", "model.architecture.delta.", DeltaNet, None),
    Group("Experts", "model.architecture.experts.", Experts, None),
    Group("Algorithm: GRPO", "algorithm.", grpo.GRPO, lambda run: run.algorithm),
    Group("Algorithm: SFT", "algorithm.", sft.SFT, None),
    Group("Algorithm: DPO", "algorithm.", dpo.DPO, None),
    Group("Algorithm: reward model", "algorithm.", reward_model.RewardModelTraining, None),
    Group("Algorithm: PPO", "algorithm.", ppo.PPO, None),
    Group("Algorithm: distillation", "algorithm.", distill.Distill, None),
    Group("The teacher of a distillation", "algorithm.teacher.", TeacherConfig, None),
    Group("Task", "task.", task.TaskConfig, lambda run: run.task),
    Group(
        "A reward of the task",
        "task.rewards.<name>.",
        task.Reward,
        lambda run: run.task.rewards["correct"],
    ),
    Group("Usual lengths of a task", "task.lengths.", task.TaskLengthsConfig, None),
    Group(
        "Source: arithmetic", "task.source.", sources.Arithmetic, lambda run: run.task.source
    ),
    Group("Source: rows of files", "task.source.", sources.FileRows, None),
    Group("Task: files of your own", "task.", files.FilesTaskConfig, None),
    Group("Task: plain text", "task.", plain_text.TextTaskConfig, None),
    Group("Source: countdown", "task.source.", countdown.Countdown, None),
    Group("Source: last word", "task.source.", last_word.LastWord, None),
    Group("Right by: exact answer", "task.correct.", answers.ExactAnswer, None),
    Group("Reward: ROUGE-L", "task.rewards.<name>.fn.", similarity.RougeL, None),
    Group("Reward: a reward model", "task.rewards.<name>.", model.RewardModel, None),
    Group("Task: GSM8K", "task.", gsm8k.Gsm8kTaskConfig, None),
    Group("Source: guessing", "task.source.", guessing.Secrets, None),
    Group("Environment: guessing", "task.environment.", guessing.GuessingGame, None),
    Group("Environment: tools", "task.environment.", tools.ToolEnvironment, None),
    Group("Task: preferences", "task.", preferences.PreferencesTaskConfig, None),
    Group("Generation", "generation.", GenerationConfig, lambda run: run.generation),
    Group("Rollout", "rollout.", RolloutConfig, lambda run: run.rollout),
    Group("Training", "training.", config.TrainingConfig, lambda run: run.training),
    Group("Optimizer: AdamW", "optimizer.", OptimizerConfig, lambda run: run.optimizer),
    Group("Optimizer: Adafactor", "optimizer.", AdafactorConfig, None),
    Group("Optimizer: Muon", "optimizer.", MuonConfig, None),
    Group("Optimizer: Lion", "optimizer.", LionConfig, None),
    Group("Optimizer: SGD", "optimizer.", SGDConfig, None),
    Group("Evaluation", "evaluation.", config.EvaluationConfig, lambda run: run.evaluation),
    Group("Sharding", "sharding.", ShardingConfig, lambda run: run.sharding),
    Group("Tracking", "tracking.", config.TrackingConfig, lambda run: run.tracking),
    Group("Tracker: Weights & Biases", "tracking.trackers.wandb.", Wandb, None),
    Group("Tracker: MLflow", "tracking.trackers.mlflow.", Mlflow, None),
    Group("Resuming", "resume.", config.ResumeConfig, lambda run: run.resume),
    Group("The program", "runtime.", config.RuntimeConfig, lambda run: run.runtime),
    Group("Where rewards run", "rewards.", RewardsConfig, lambda run: run.rewards),
    Group("Conversations", "conversation.", ConversationConfig, lambda run: run.conversation),
    Group("Launch", "launch.", LaunchConfig, lambda run: run.launch),
    Group("The command generate", "", GenerateConfig, None),
    Group("The command serve", "", ServeConfig, None),
    Group("The command evaluate", "", EvaluateConfig, None),
    Group("The command evaluate: what is asked", "evaluate.", EvaluateTaskConfig, None),
    Group("The command export", "", ExportConfig, None),
    Group("The command tokenizer", "", TokenizerConfig, None),
    Group("The command plan", "", PlanConfig, None),
    Group("The command check", "", Check, None),
    Group("The command doctor", "", Doctor, None),
)
# groups of which nobody chooses an option: a program begins with its own
OF_PROGRAMS = {"command"}
# What YAML may name where, the modules to look in, and the arguments that the caller passes: the
# rest are settings.
FUNCTIONS = (
    ("Rewards to advantages: `algorithm.advantages`", (advantages,), ("rewards_PG",)),
    (
        "The same with statistics of the whole batch: `algorithm.advantages`",
        (advantages,),
        ("rewards_PG", "whole"),
    ),
    (
        "Completions to loss weights: `algorithm.weighting`",
        (weighting,),
        ("completion_mask_BT",),
    ),
    (
        "The same with the prompt of each completion: `algorithm.weighting`",
        (weighting,),
        ("completion_mask_BT", "prompt_B"),
    ),
    ("What is maximised per token: `algorithm.surrogate`", (surrogates,), ("terms",)),
    (
        "The same with `algorithm.clip_low` and `clip_high`: `algorithm.surrogate`",
        (surrogates,),
        ("terms", "bounds"),
    ),
    ("Ratios: `algorithm.ratio`", (ratios,), ("log_ratio_RW", "batch")),
    (
        "Trainer and sampler: `algorithm.correction`",
        (corrections,),
        ("log_weight_BT", "mask_BT"),
    ),
    ("Lengths to penalties: `algorithm.shaping`", (shaping,), ("lengths_B",)),
    (
        "Completion to reward: `task.rewards.<name>.fn` and `task.correct`",
        (math, text, answers, math_verify, similarity, code, judge),
        ("completion", "example"),
    ),
    (
        "Completion to the text of its answer: `task.extract`",
        (math, text, answers),
        ("completion",),
    ),
)
PASSED = {name for _, _, passed in FUNCTIONS for name in passed}
CODE = re.compile(r"(`[^`]+`)")
EXPLAINED_IN = re.compile(r"# conf/(\S+) explains each setting$", re.MULTILINE)


def render() -> str:
    """The whole reference, in Markdown."""
    run = compose([])
    return "\n\n".join([_options(), *(_group(group, run) for group in GROUPS), _functions()])


def _options() -> str:
    rows = []
    for file in sorted(conf_dir().glob("*/*.yaml")):
        lines = [line for line in file.read_text().splitlines() if "@package" not in line]
        first = lines[0]
        # the others are the only file of their group
        if first.startswith("#") and file.parent.name not in OF_PROGRAMS:
            rows.append((f"`{file.parent.name}={file.stem}`", _text(first.lstrip("# "))))
    return "## Options of groups\n\n" + as_table(("choose with", "what it is"), rows)


def _group(group: Group, run: config.RunConfig) -> str:
    used = group.used(run) if group.used else None
    comments, hints = field_comments(group.kind), get_type_hints(group.kind)
    rows = []
    for f in (f for f in dataclasses.fields(group.kind) if f.init):
        meaning = comments.get(f.name) or _first_paragraph(hints[f.name])
        rows.append(
            (
                f"`{group.prefix}{f.name}`",
                _type(hints[f.name]),
                _default(f, used),
                _text(meaning),
            )
        )
    path = f"`{group.kind.__module__}.{group.kind.__qualname__}`"
    said = _text(_first_paragraph(group.kind))
    return f"## {group.title}\n\n{said} Class: {path}.\n\n" + as_table(
        ("key", "type", "default", "meaning"), rows
    )


def _functions() -> str:
    parts = ["## Functions that settings name"]
    for title, modules, passed in FUNCTIONS:
        rows = _callable_classes(modules, passed)
        for function in (
            f for module in modules for _, f in inspect.getmembers(module, inspect.isfunction)
        ):
            parameters = inspect.signature(function).parameters
            if (
                function.__module__ in [m.__name__ for m in modules]
                and _passed(parameters) == passed
            ):
                settings = [
                    str(p.replace(annotation=p.empty))
                    for p in parameters.values()
                    if p.name not in passed
                ]
                shown = ", ".join(f"`{text}`" for text in settings)
                rows.append((f"`{_path(function)}`", shown, _text(_first_paragraph(function))))
        parts += [f"### {title}", as_table(("`_target_`", "settings", "what it does"), rows)]
    return "\n\n".join(parts)


def _callable_classes(modules: tuple, passed: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """The dataclasses of these modules whose instances are called with `passed`."""
    rows = []
    for module in modules:
        for _, kind in inspect.getmembers(module, dataclasses.is_dataclass):
            if kind.__module__ != module.__name__ or "__call__" not in vars(kind):
                continue
            parameters = list(inspect.signature(kind.__call__).parameters)[1:]
            if tuple(parameters) == passed:
                settings = inspect.signature(kind).parameters.values()
                shown = ", ".join(f"`{p.replace(annotation=p.empty)}`" for p in settings)
                rows.append((f"`{_path(kind)}`", shown, _text(_first_paragraph(kind))))
    return rows


def _passed(parameters) -> tuple[str, ...]:
    return tuple(name for name in parameters if name in PASSED)


def field_comments(kind: type) -> dict[str, str]:
    """The comment on the line of each field, or above it, by the field's name; no entry: none.

    Fields that the class has from another one have their comments there.
    """
    found = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            found |= _own_field_comments(base)
    return found


def file_comments(file: Path) -> dict[str, str]:
    """The comment after each key of a YAML file, or above it, by the last name of the key."""
    found, above = {}, []
    for line in file.read_text().splitlines():
        text = line.strip()
        if text.startswith("#"):
            above.append(text.lstrip("# "))
            continue
        key, _, rest = text.partition(":")
        if comment := rest.partition("  # ")[2] or " ".join(above):
            found.setdefault(key, comment)
        above = []
    return found


def _own_field_comments(kind: type) -> dict[str, str]:
    """The same of the fields that stand in the class itself, or in the file that it names."""
    source = inspect.cleandoc("\n" + inspect.getsource(kind))
    lines = source.splitlines()
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for node in ast.parse(source).body[0].body:
        if not isinstance(node, ast.AnnAssign):
            continue
        above = []
        line = node.lineno - 1
        while line in comments and lines[line - 1].lstrip().startswith("#"):
            above.insert(0, comments[line])
            line -= 1
        if above:
            found[node.target.id] = " ".join(above)
        if node.end_lineno in comments:
            found[node.target.id] = comments[node.end_lineno]
    named = EXPLAINED_IN.search(source)
    return found | (file_comments(conf_dir() / named[1]) if named else {})


def _type(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if hint == MeshShape:
        return "`[[int, …], [str, …]]`"
    if origin in (types.UnionType, Union) and dataclasses.is_dataclass(args[0]):
        return "group"
    if origin in (types.UnionType, Union):
        return f"{_type(args[0])} or null"
    if hint is Any or dataclasses.is_dataclass(hint):
        return "group"
    if hint is Callable or origin is Callable:
        return "function"
    if origin is dict:
        return "groups by name"
    if origin is tuple:
        return f"list of {_type(args[0])}"
    return hint.__name__


def _default(f: dataclasses.Field, used: Any) -> str:
    """What a run without overrides has; otherwise what the class has; otherwise it must be
    given."""
    if used is not None:
        value = getattr(used, f.name)
    elif f.default is not dataclasses.MISSING:
        value = f.default
    else:
        return "must be given"
    if dataclasses.is_dataclass(value) or isinstance(value, dict):
        return "see below"
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, partial):
        return (
            f"{_path(value.func)}({', '.join(f'{k}={v}' for k, v in value.keywords.items())})"
        )
    if callable(value):
        return _path(value)
    return as_text(value) if isinstance(value, tuple) else str(value)


def _path(function: Callable) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _first_paragraph(thing: Any) -> str:
    """Of its docstring, on one line; nothing for what has none of its own."""
    own = inspect.isfunction(thing) or dataclasses.is_dataclass(thing)
    return (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ") if own else ""


def _text(plain: str) -> str:
    """Plain text with `code` in it, as Markdown: nothing else in it is markup."""
    pieces = CODE.split(plain)
    return "".join(
        p if i % 2 else re.sub(r"([\\*_<>\[\]])", r"\\\1", p) for i, p in enumerate(pieces)
    )


def as_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [head, ("---",) * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells
    )
