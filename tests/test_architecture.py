"""Which way the arrows go (docs/decisions, DESIGN), read from the imports."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tunix_lite"
ROOMS = {  # library -> the one file that may import it
    "orbax": {"checkpoint.py"},
    "tensorboardX": {"tracking/tracker.py"},
    "safetensors": {"models/hf.py"},
    "huggingface_hub": {"models/hub.py"},
    "grain": {"tasks/sources.py"},
    "hydra": {"commands/program.py"},
    "omegaconf": {"commands/program.py"},
}
HEAVY = {"torch", "transformers", "huggingface_hub", "matplotlib", "wandb"}
MAY_IMPORT = {  # a room -> the rooms of ours that it may use
    "types.py": set(),
    "addresses.py": set(),
    "plain_text.py": set(),
    "seeds.py": set(),
    "strangers.py": {"plain_text"},
    "rewards": {"rewards", "guard"},
    "parallel": {"parallel"},
    "launch.py": {"parallel.place", "supervisor", "addresses"},  # starts at once: nothing of jax
    "supervisor.py": {"parallel.claim", "parallel.distributed"},
    "guard.py": set(),
    "algorithms": {"types", "algorithms"},
    "models": {"addresses", "models", "parallel", "plain_text", "strangers", "types"},
    "rollout": {"rollout", "models", "parallel", "plain_text", "types"},
    "tasks": {"tasks", "rewards", "types", "models.tokenizer", "plain_text"},
    "tracking": {"plain_text", "strangers", "tracking", "types"},
    "packing.py": {"types"},
    "micro_batches.py": {"packing", "parallel", "types"},
    "step.py": {"micro_batches", "models.lora", "optim", "parallel"},
    "batching.py": {"config", "micro_batches", "packing"},
    "policy.py": {"micro_batches", "models", "parallel", "types"},
    "planning": {
        "planning",
        "models",
        "parallel",
        "rollout",
        "types",
        "step",
        "policy",
        "micro_batches",
        "optim",
        "batching",
        "config",
    },
    "optim.py": {"types"},
    "checkpoint.py": {"digests", "parallel", "plain_text", "strangers", "types"},
    "digests.py": {"plain_text", "strangers"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(file: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("library", ROOMS)
def test_each_outside_library_is_imported_in_one_room(library):
    users = {f.relative_to(PACKAGE).as_posix() for f in FILES if any(i.split(".")[0] == library for i in imports(f))}
    assert users == ROOMS[library]


def test_heavy_packages_are_not_imported_by_the_core():
    for file in FILES:
        top = [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)]
        names = {a.name.split(".")[0] for n in top for a in n.names} | {getattr(n, "module", "") or "" for n in top}
        assert not HEAVY & {name.split(".")[0] for name in names}, file


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_arrows_between_rooms_go_one_way(room):
    files = [PACKAGE / room] if room.endswith(".py") else sorted((PACKAGE / room).rglob("*.py"))
    for file in files:
        for name in imports(file):
            if name.startswith("tunix_lite."):
                inner = name.removeprefix("tunix_lite.")
                assert any(inner == ok or inner.startswith(f"{ok}.") for ok in MAY_IMPORT[room]), f"{file}: {name}"


def test_json_from_a_folder_is_read_with_limits_and_nowhere_else():
    """Files of strangers go through strangers.read_object; here is who else parses JSON, and what it is."""
    own = {
        "strangers.py": "where the limits are",
        "prepare.py": "values of this process",
        "models/confined.py": "what the process that starts a worker gives it",
        "models/hf.py": "the header of a file of weights, of which the length is checked first",
        "models/tokenizer.py": "what the library writes",
        "parallel/meeting.py": "lines of the meeting port, of bounded length",
        "parallel/sharing.py": "what our processes share",
        "rewards/pool.py": "lines of our own workers",
        "tasks/sources.py": "lines of the user's data",
    }
    users = {file.relative_to(PACKAGE).as_posix() for file in FILES if "json.load" in file.read_text()}
    assert users == {*own}


def test_private_and_deprecated_jax_is_not_used():
    for file in FILES:
        text = file.read_text()
        for word in ("jax._src", "pmap", "with mesh:", "jax.experimental.shard_map", "tree_map(lambda x"):
            assert word not in text, f"{file}: {word}"


def test_from_the_entry_point_to_the_gradient_is_one_sitting():
    path = ["../run_training.py", "commands/train.py", "train.py", "step.py"]
    assert sum(len((PACKAGE / f).read_text().splitlines()) for f in path) < 500
