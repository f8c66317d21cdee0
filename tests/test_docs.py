"""What README and docs say is true of the code: commands compose, quoted files exist, settings and metrics are named."""

import ast
import dataclasses
import functools
import importlib
import itertools
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from tunix_lite.algorithms.groups import Groups
from tunix_lite.basics.types import TokenScores
from tunix_lite.commands import program
from tunix_lite.commands.check import Check
from tunix_lite.commands.doctor import Doctor
from tunix_lite.commands.evaluate import EvaluateConfig
from tunix_lite.commands.export import ExportConfig
from tunix_lite.commands.generate import GenerateConfig
from tunix_lite.commands.plan import PlanConfig, make_plans
from tunix_lite.commands.serve import ServeConfig
from tunix_lite.commands.tokenizer import TokenizerConfig
from tunix_lite.inference.export import KINDS
from tunix_lite.models import decoder
from tunix_lite.models.source import BUNDLED
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.parallel.mesh import resolve_mesh_shape
from tunix_lite.settings import compose as composing
from tunix_lite.settings.batch_size import plan_batch
from tunix_lite.settings.config import RunConfig, build
from tunix_lite.settings.resolved_run import _check_model_divides, check_generation
from tunix_lite.tasks.task import Task
from tunix_lite.tracking.console import OUR_PARTS

ROOT = Path(__file__).parent.parent
DOCS, EXAMPLE = ROOT / "docs", ROOT / "docs" / "extend" / "example"
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    + [page for page in DOCS.rglob("*.md") if "_build" not in page.parts]
)
HISTORY = {ROOT / "CHANGELOG.md", DOCS / "log.md", *DOCS.glob("decisions/*.md")}
LIVING = [page for page in PAGES if page not in HISTORY]  # the others say what was true on their day
IDS = [str(page.relative_to(ROOT)) for page in PAGES]

SHELL = {"bash", "sh", "shell", "console"}
DIRECTIVES = {"{literalinclude}", "{include}", "{toctree}", "{eval-rst}", "{note}", "{warning}", "{figure}", "{image}"}
LANGUAGES = SHELL | DIRECTIVES | {"python", "yaml", "json", "text"}
PROGRAMS = {
    "generate": GenerateConfig,
    "serve": ServeConfig,
    "export": ExportConfig,
    "plan": PlanConfig,
    "check": Check,
    "doctor": Doctor,
    "evaluate": EvaluateConfig,
    "tokenizer": TokenizerConfig,
}
OPTIONS = {"--help": 0, "--cfg": 1, "--config-dir": 1}  # of all our programs, and how many words follow each
RUN_OPTIONS = OPTIONS | {"--multirun": 0}
VARIABLES = {"XLA_FLAGS", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"}
VARIABLES |= {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "HOSTS"}
LAUNCHERS = {  # what starts a program several times, and its options
    "tunix-lite launch": {"--nprocs"},
    "python -m tunix_lite.launch": {"--nprocs"},
    "torchrun": {"--nproc_per_node", "--nnodes", "--node_rank", "--master_addr", "--master_port"},
}
SCRIPTS = ("sbatch", "bash", "kubectl apply -f")  # what runs a file of examples/launch
MAKE_VARIABLES = {"PYTHON", "EXTRA", "ARGS", "VENV"}
# Commands that are neither ours nor checked: nothing in them can go stale with the code.
ALLOWED = {
    "python3 -m venv .venv",
    "source .venv/bin/activate",
    "pip install tensorboard",
    "tensorboard --logdir outputs/",
    "tail -f outputs/latest/train.log",
    "cat outputs/latest/status.json",
    "tail -n 1 outputs/latest/metrics.jsonl",
    'python -c "import jax; print(jax.devices())"',
    # Packages that the tests do not install, and a script that needs them.
    "pip install tinker==0.38.0 'tinker-cookbook[math-rl]==0.5.8'",
    "python examples/tinker_loops.py outputs/cookbook rl_loop base_url=http://127.0.0.1:8000 batch_size=16 group_size=8"
    "    learning_rate=5e-4 max_tokens=48 max_steps=60",
}
# Examples that take other settings than those of a run.
NO_RUNS = ("tinker_loops.py",)


# ---- reading pages


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(language, argument, body) of every fenced block of a page."""
    found, fence, body = [], None, []
    for line in page.read_text().splitlines():
        mark = re.match(r"\s*(`{3,}|:{3,})\s*(\S*)\s*(.*)$", line)
        if fence is None and mark:
            fence, body = mark, []
        elif fence is not None and line.strip() == fence[1]:
            found.append((fence[2], fence[3], "\n".join(body)))
            fence = None
        elif fence is not None:
            body.append(line)
    assert fence is None, f"{page.name}: a block is not closed"
    return found


def not_run(page: Path) -> dict[str, str]:
    """{body: reason} of the shell blocks that stand under `<!-- not run: reason -->`."""
    marked = r"^<!-- not run: (.*?) -->\n```(?:bash|sh|shell|console)\n(.*?)\n```$"
    return {body: reason for reason, body in re.findall(marked, page.read_text(), re.MULTILINE | re.DOTALL)}


def commands(page: Path) -> list[str]:
    """The lines of a page's shell blocks, and what in its text is a command of ours, `make` or `pip install`.

    Blocks that are marked as not run are left out.
    """
    bodies = [body for language, _, body in blocks(page) if language in SHELL and body not in not_run(page)]
    lines = "\n".join(bodies).replace("\\\n", " ").splitlines()
    lines = [line.strip().removeprefix("$ ") for line in lines]
    prose = re.sub(r"^(```|:::).*?^\1", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`((?:make|pip install|python run_training\.py) [^`|]+)`", prose)
    inline += re.findall(r"`((?:tunix-lite|python -m tunix_lite) \w+ [^`|]*=[^`|]*)`", prose)  # others only name them
    return [line for line in lines + inline if line and not line.startswith("#")]


ALL_COMMANDS = {command: page for page in LIVING for command in commands(page)}  # each once, with a page that has it


# ---- commands


def of_readme(language: str) -> str:
    """The README's only block of a language."""
    [body] = [body for name, _, body in blocks(ROOT / "README.md") if name == language]
    return body


@pytest.fixture(scope="module")
def example_conf(tmp_path_factory):
    """conf/ with the YAML of docs/extend and of the README in it."""
    folder = tmp_path_factory.mktemp("example") / "conf"
    shutil.copytree(composing.conf_dir(), folder)
    shutil.copytree(EXAMPLE / "conf", folder, dirs_exist_ok=True)
    (folder / "model" / "deep.yaml").write_text(of_readme("yaml"))
    return folder


@pytest.fixture
def with_the_example(monkeypatch, example_conf):
    """What a reader of docs/extend has: its files next to run_training.py and its YAML in conf/."""
    for module in (composing, program):
        monkeypatch.setattr(module, "conf_dir", lambda: example_conf)
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.chdir(EXAMPLE)


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_every_command_in_the_docs_can_be_given(command, with_the_example):
    words = shlex.split(command.removeprefix("export "))
    given = dict(word.split("=", 1) for word in itertools.takewhile(lambda w: re.match(r"[A-Z_]+=", w), words))
    assert given.keys() <= VARIABLES, f"unknown variable in: {command}"
    words = without_launcher(words[len(given) :])
    if not words and command.startswith("export "):
        return
    overrides = of_a_run(words)
    asked = of_a_program(words) if overrides is None else None
    simulated = re.search(r"--xla_force_host_platform_device_count=(\d+)", given.get("XLA_FLAGS", ""))
    devices = int(simulated[1]) if simulated else None
    if overrides is not None:
        for combination in combinations(overrides):
            check_run(composing.compose(combination), devices)
    elif asked is not None:
        check_program(*asked, devices)
    elif words[0] == "make":
        check_make(words[1:])
    elif words[:2] == ["pip", "install"] and command not in ALLOWED:
        check_pip(words[2:])
    else:
        assert command in ALLOWED, f"{ALL_COMMANDS[command]}: neither composed nor allowed"


def of_a_run(words: list[str]) -> list[str] | None:
    """The overrides of a command that trains, its options taken out; None for any other command."""
    starts = [["python", "run_training.py"], ["tunix-lite", "train"], ["python", "-m", "tunix_lite", "train"]]
    starts += [
        ["python", str(script.relative_to(ROOT))]
        for script in (ROOT / "examples").glob("*.py")
        if script.name not in NO_RUNS
    ]
    start = next((s for s in starts if words[: len(s)] == s), None)
    return None if start is None else without_options(words[len(start) :], RUN_OPTIONS)


def without_launcher(words: list[str]) -> list[str]:
    """The command that a launcher, or a file of examples/launch, runs; others as they are."""
    for launcher, options in LAUNCHERS.items():
        start = launcher.split()
        if words[: len(start)] == start:
            flags = list(itertools.takewhile(lambda word: word.startswith("--"), words[len(start) :]))
            assert {flag.partition("=")[0] for flag in flags} <= options, f"unknown option in {flags}"
            rest = words[len(start) + len(flags) :]
            for command in ("check", "evaluate"):
                if command in (*rest[:1], *rest[2:3]):  # check, or -m tunix_lite check
                    return ["tunix-lite", *rest[rest.index(command) :]]
            return ["python", *rest] if rest and rest[0].endswith(".py") else ["tunix-lite", "train", *rest]
    start = next((s.split() for s in SCRIPTS if words[: len(s.split())] == s.split()), None)
    if start is None:
        return words
    file, *settings = words[len(start) :]
    assert (ROOT / file).parent == ROOT / "examples" / "launch" and (ROOT / file).is_file(), f"there is no {file}"
    return ["python", "run_training.py", *settings]


def of_a_program(words: list[str]) -> tuple[str, list[str] | None] | None:
    """(name, overrides) of a command beside training; None for any other. Overrides None: it only shows its help."""
    start = next((s for s in (["tunix-lite"], ["python", "-m", "tunix_lite"]) if words[: len(s)] == s), None)
    if start is None:
        return None
    name, *rest = words[len(start) :]
    assert name in PROGRAMS, f"there is no command {name}"
    overrides = without_options(rest, OPTIONS)
    if name == "doctor":
        folders = [word for word in overrides if "=" not in word]
        overrides = [f"folders={json.dumps(folders)}"] * bool(folders) + [w for w in overrides if "=" in w]
    return name, None if "--help" in rest else overrides


def without_options(words: list[str], options: dict[str, int]) -> list[str]:
    overrides, rest = [], iter(words)
    for word in rest:
        if word.startswith("-"):
            assert word in options, f"unknown option {word}"
            values = list(itertools.islice(rest, options[word]))
            assert word != "--config-dir" or (ROOT / values[0]).is_dir(), f"{values} is not a folder of the checkout"
        else:
            overrides.append(word)
    return overrides


def combinations(overrides: list[str]) -> list[list[str]]:
    """Every run of a sweep: `a=1,2 b=3` -> [[a=1, b=3], [a=2, b=3]]. Commas in brackets or quotes do not count."""
    choices = []
    for override in overrides:
        key, _, value = override.partition("=")
        parts = re.findall(r"(?:\[(?:[^\[\]]|\[[^\[\]]*\])*\]|\{.*\}|\"[^\"]*\"|[^,])+", value) or [""]
        choices.append([f"{key}={part}" if "=" in override else key for part in parts])
    return [list(combination) for combination in itertools.product(*choices)]


CHECKED = set()  # tasks whose prompts were made


def check_run(run: RunConfig, devices: int | None) -> None:
    """The mesh fits the devices, the batch divides, the mesh divides the model, and prompts and lengths fit."""
    mesh = check_model(run, devices)
    plan_batch(run, mesh["fsdp"])
    if (cfg := architecture(run)) is not None:
        check_generation(run, cfg)
    # rows of a reader's own file, or of the hub, are not here
    is_there = Path(getattr(run.task, "train", None) or ".").exists()
    if is_there and run.model.weights in ("bundled", "random"):
        lengths = run.generation.max_prompt_length, run.generation.max_new_tokens
        if (key := repr((run.task, lengths, run.seed))) in CHECKED:
            return
        CHECKED.add(key)
        task = Task(run.task, bundled_tokenizer(), *lengths)
        # a few stand for all: making every held-out example of every command is half of this file's time
        examples = [*task.held_out(min(8, run.evaluation.num_examples)), *task.batch(4, run.seed, 0)]
        task.prompts(examples)


@functools.cache
def of_the_bundled_model() -> decoder.Architecture:
    return composing.compose(["model=random"]).model.architecture


@functools.cache
def bundled_tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED)


def architecture(run: RunConfig) -> decoder.Architecture | None:
    """Of the run's model; None for a folder or a hub name of which the page says no more."""
    if run.model.weights == "bundled":
        return of_the_bundled_model()
    return run.model.architecture


def check_model(run: RunConfig, devices: int | None) -> dict[str, int]:
    """The mesh fits the devices and divides the model, and adapters have something to adapt. The mesh's sizes."""
    sizes = [size for size in run.model.mesh_shape[0] if size != -1]
    mesh = resolve_mesh_shape(run.model.mesh_shape, devices or int(np.prod(sizes)))
    if (cfg := architecture(run)) is None:
        return mesh
    lora = run.model.lora if run.model.lora.rank else None
    _check_model_divides(run, cfg, lora, mesh)
    return mesh


def check_program(name: str, overrides: list[str] | None, devices: int | None) -> None:
    """Its own settings and those of a run can be built. The folder of a run need not exist."""
    if overrides is None:
        return
    values = composing.compose_values(overrides, of=(f"+command={name}",))
    settings = build(PROGRAMS[name], {f.name: values.pop(f.name) for f in dataclasses.fields(PROGRAMS[name])})
    run = build(RunConfig, values)
    if name == "plan":
        make_plans(run, dataclasses.replace(settings, analytic=True, verify=None), overrides)
        return
    if getattr(settings, "checkpoint", None) is not None:
        assert not any(word.startswith("model=") for word in overrides), "the run says which model it is"
    check_model(run, devices)
    if name == "export" and settings.kind != "auto":
        assert settings.kind in KINDS
        has_adapters = bool(run.model.lora.rank or run.model.lora.adapter)
        fits = settings.kind == "gguf" or (settings.kind == "full") != has_adapters
        assert settings.checkpoint or fits, f"kind={settings.kind} does not fit"


def check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for word in words:
        name, is_variable, value = word.partition("=")
        assert name in (MAKE_VARIABLES if is_variable else targets), f"make has no {name}"
        if name == "EXTRA":
            assert value in extras()


def check_pip(words: list[str]) -> None:
    match = re.fullmatch(r"-e \.(?:\[([a-z0-9,-]+)\])?", " ".join(words))
    assert match, f"pip install {' '.join(words)}: not an install of this package, and not allowed"
    assert set((match[1] or "").split(",")) - {""} <= extras()


def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def test_a_block_that_is_not_run_says_why_and_holds_no_command_of_ours():
    for page in LIVING:
        reasons = not_run(page)
        assert page.read_text().count("<!-- not run") == len(reasons), f"{page}: a mark stands right above its block"
        for body, reason in reasons.items():
            assert len(reason.split()) >= 3, f"{page.name}: {reason!r} is no reason"
            assert not re.search(r"^(?:python|tunix-lite|make) ", body, re.MULTILINE), f"{page.name}: {body}"


# ---- pages


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_block_says_its_language_and_reads_as_it(page):
    for language, _, body in blocks(page):
        assert language in LANGUAGES, f"{page.name}: a block of unknown language {language!r}"
        if language == "python":
            ast.parse(body)
        elif language == "yaml":
            yaml.safe_load(body)
        elif language == "json":
            json.loads(body)


def python_names(file: Path) -> set[str]:
    top = [node for node in ast.parse(file.read_text()).body if hasattr(node, "name")]
    inner = {f"{c.name}.{n.name}" for c in top if isinstance(c, ast.ClassDef) for n in c.body if hasattr(n, "name")}
    return {node.name for node in top} | inner


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_page_is_plain_to_read_names_no_machine_and_links_to_files_that_are_there(page):
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        assert len(line) <= 120, f"{page.name}:{number} has {len(line)} columns"
        assert not re.search(r"/(work|root|home|Users|tmp)/", line), f"{page.name}:{number} names a path of one machine"
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", line):
            assert (page.parent / target).exists(), f"{page.name}:{number} links to {target}"


def test_readme_quotes_its_reward_from_the_example(with_the_example):
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
    assert of_readme("python").strip() in (EXAMPLE / "my_rewards.py").read_text()
    [command] = [c for c in commands(ROOT / "README.md") if "my_rewards" in c]
    task = composing.compose(of_a_run(shlex.split(command))).task
    assert task.rewards["few_words"].fn("one two three", {}) == 1.0
    assert task.rewards["few_words"].fn("word " * 31, {}) == 0.0


def test_readme_shows_what_plan_prints(with_the_example):
    """Every line that README shows is a line of the command above it; `...` stands for what is left out."""
    [command] = [c for c in commands(ROOT / "README.md") if "tunix-lite plan" in c]
    [shown] = [body for language, _, body in blocks(ROOT / "README.md") if language == "text"]
    name, overrides = of_a_program(shlex.split(command))
    values = composing.compose_values(overrides, of=(f"+command={name}",))
    settings = build(PlanConfig, {f.name: values.pop(f.name) for f in dataclasses.fields(PlanConfig)})
    printed = [plain(line) for line in make_plans(build(RunConfig, values), settings, overrides).short_form()]
    for line in map(plain, shown.splitlines()):
        before, _, after = line.partition("... ")
        assert any(text.startswith(before) and text.endswith(after) for text in printed), line


def plain(line: str) -> str:
    return " ".join(line.split())


# ---- the configuration reference


@pytest.fixture
def reference(monkeypatch) -> str:
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("config_reference").render()


def classes_of(kind: type) -> set[type]:
    """The dataclass and those that its fields hold."""
    parts = [part for hint in get_type_hints(kind).values() for part in (hint, *get_args(hint))]
    return {kind}.union(*(classes_of(part) for part in parts if dataclasses.is_dataclass(part)))


def targets(value) -> set[str]:
    """Every `_target_` in a tree of plain values."""
    if not isinstance(value, dict):
        return set()
    own = {value["_target_"]} if "_target_" in value else set()
    return own.union(*(targets(item) for item in value.values()))


def test_the_reference_names_every_setting(reference):
    paths = {
        path for file in composing.conf_dir().rglob("*.yaml") for path in targets(yaml.safe_load(file.read_text()))
    }
    named = {path: getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in paths}
    for path in named:
        assert path in reference, f"{path} is named in conf/ and not in the reference"
    kinds = classes_of(RunConfig) | set(PROGRAMS.values())
    for kind in kinds | {thing for thing in named.values() if dataclasses.is_dataclass(thing)}:
        section = next(s for s in reference.split("\n## ") if f"Class: `{kind.__module__}.{kind.__qualname__}`" in s)
        for f in (f for f in dataclasses.fields(kind) if f.init):
            assert re.search(rf"^\| `([\w.<>]+\.)?{f.name}` \|", section, re.MULTILINE), f"{kind.__name__}.{f.name}"
    # the optimizer's group has a section for each of its kinds
    assert re.findall(r"^\| `(\S+)` .*\|  \|$", reference, re.MULTILINE) == ["optimizer"], "says what it means"


def test_every_setting_that_a_page_names_exists(reference):
    known = set(re.findall(r"^\| `([\w.<>]+)` \|", reference, re.MULTILINE))
    groups = {key.partition(".")[0] for key in known if "." in key} - {"tunix_lite"}
    for page in LIVING:
        prose = re.sub(r"^(```|:::).*?^\1", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for code in re.findall(r"`([^`]+)`", prose):
            for key in re.findall(rf"(?:^| )((?:{'|'.join(groups)})\.[a-z_.<>]+)(?==|$| )", code):
                is_a_file = key.endswith((".json", ".jsonl", ".safetensors"))
                assert key in known or is_a_file, f"{page.name}: there is no setting {key}"


def test_the_batch_arithmetic_of_the_docs_is_what_a_run_says():
    page = (DOCS / "advanced" / "distributed_training.md").read_text()
    cases = re.findall(r"^fsdp=(\d+), (.*)\n    (.* accumulation)$", page, re.MULTILINE)
    assert len(cases) >= 4
    for fsdp, given, said in cases:
        overrides = [] if given == "nothing given" else given.split()
        assert str(plan_batch(composing.compose(overrides), int(fsdp))) == said


# ---- metrics


def metrics_in_the_code() -> set[str]:
    """Every `part/name` that stands in the package as a string; the variable part of an f-string is <name>."""
    files = (ROOT / "tunix_lite").rglob("*.py")
    # these only read what runs have logged
    readers = {"findings.py", "console.py", "forecast.py"}
    trees = [ast.parse(file.read_text()) for file in files if file.name not in readers]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    # one that ends in _ is the beginning of an f-string
    plain = {text for text in texts if re.fullmatch(r"[a-z_]+/[a-z_0-9]*[a-z0-9]", text)}
    plain = {text for text in plain if text.partition("/")[0] in OUR_PARTS}
    parts = {text.partition("/")[0] for text in plain}
    made = {
        "".join(part.value if isinstance(part, ast.Constant) else "<name>" for part in node.values)
        for node in nodes
        if isinstance(node, ast.JoinedStr)
    }
    return plain | {text for text in made if re.fullmatch(rf"(?:{'|'.join(parts)})/[a-z_0-9]*<name>[a-z_0-9]*", text)}


def test_the_metrics_page_names_every_metric_and_no_other():
    page = (DOCS / "references" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `([a-z_]+/[a-z_0-9<>]+)` \|", page, re.MULTILINE))
    documented = {re.sub("<[a-z]+>", "<name>", key) for key in documented}
    # the held-out loss puts eval/ before the metrics of the update; the reference is one of time/<name>
    assert documented == metrics_in_the_code() - {"time/reference"} | {"eval/token_accuracy"}
    mentioned = {key for p in LIVING for key in re.findall(r"`([a-z_]+/[a-z_0-9<>]+)`", p.read_text())}
    parts = {key.partition("/")[0] for key in documented}
    names = [*reward_names(EXAMPLE / "conf" / "task" / "capitals.yaml"), "correct", "working"]  # of docs/extend, too
    of_the_example = {f"reward/{name}" for name in names}
    of_the_example |= {"time/teacher", "time/first"}  # scorers, which are time/<name>
    # what environments count, which are conversation/<name>
    counted = ("won", "tool_calls", "tool_errors", "called_a_tool", "invalid_move", "attempts")
    of_the_example |= {f"conversation/{name}" for name in counted}
    mentioned = {re.sub("<[a-z]+>|(?<=_at_)[0-9]+", "<name>", key) for key in mentioned}
    assert {key for key in mentioned if key.partition("/")[0] in parts} <= documented | of_the_example


def reward_names(task_file: Path) -> list[str]:
    """The names under which a task logs its rewards."""
    return list(yaml.safe_load(task_file.read_text())["rewards"])


# ---- the example of docs/extend


def test_the_algorithm_of_the_docs_learns_the_best_of_each_group(with_the_example):
    """Two prompts, two generations; the second group agrees, so only the better completion of the first counts."""
    algorithm = composing.compose(["algorithm=best_of_group", "algorithm.num_generations=2"]).algorithm
    mask = np.array([[0, 1, 1], [0, 1, 0], [0, 1, 1], [0, 1, 1]], bool)
    rollout = SimpleNamespace(tokens=np.ones((4, 3), np.int32), token_mask=np.ones((4, 3), bool), completion_mask=mask)
    rewards_PG = np.array([[0.0, 1.0], [1.0, 1.0]])
    graded = SimpleNamespace(turn_discount=None)
    groups = Groups(rollout, graded, rewards_PG, np.ones((2, 2), bool), {"reward/mean": 0.75})
    batch, metrics = algorithm.batch_of(None, None, None, [{}, {}], groups)
    np.testing.assert_array_equal(batch.loss_weight, [[0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]])
    assert metrics["reward/best_share"] == 0.25
    loss, _ = algorithm.loss(TokenScores(jnp.full((4, 3), -2.0), jnp.zeros((4, 3))), batch)
    assert loss == 2.0


def test_every_test_that_the_page_of_mistakes_names_is_there():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs/references/mistakes.md").read_text())
    assert len(named) > 40
    for file, test in named:
        assert test in python_names(ROOT / "tests" / file), f"{file}::{test}"
