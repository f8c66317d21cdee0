"""`tunix-lite serve checkpoint=outputs/latest`: a model behind the OpenAI API or the Tinker API."""

import asyncio
import importlib.util
import os
import sqlite3
import time
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import jax

from tunix_lite.basics.errors import ConfigError, error_context
from tunix_lite.commands import program
from tunix_lite.commands.which_weights import WhichWeights
from tunix_lite.inference.live import live_engine
from tunix_lite.serving.app import EngineFailed, Server
from tunix_lite.serving.calls import Limits
from tunix_lite.serving.face import ServerSettings
from tunix_lite.serving.tinker.app import TinkerServer
from tunix_lite.serving.tinker.bodies import TinkerLimits
from tunix_lite.serving.tinker.store import Store, StoreDamaged
from tunix_lite.serving.tinker.work import WorkerFailed
from tunix_lite.settings.config import RunConfig
from tunix_lite.training_clients.trainer import Trainer


@dataclass(frozen=True)
class ServeConfig(WhichWeights):
    """Where the server listens, and what it lets clients do."""

    # conf/command/serve.yaml explains each setting
    api: str = "openai"
    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    api_key_variable: str | None = None
    max_waiting: int = 256
    max_body: int = 1048576
    request_seconds: float = 600.0
    stop_seconds: float = 30.0
    log_requests: bool = True
    state_folder: str = "outputs/tinker"
    max_models: int = 16

    def __post_init__(self):
        if self.api not in ("openai", "tinker"):
            raise ValueError(f"api={self.api}; there is openai and tinker")
        if self.api == "tinker" and self.checkpoint is not None:
            raise ValueError(
                "checkpoint= is for api=openai; api=tinker starts from model.weights"
            )
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port={self.port}; it is 0 to 65535")
        for name in (
            "max_waiting",
            "max_body",
            "request_seconds",
            "stop_seconds",
            "max_models",
        ):
            if getattr(self, name) < (0 if name in ("max_waiting", "stop_seconds") else 1):
                raise ValueError(f"{name}={getattr(self, name)} is too small")
        super().__post_init__()


def main() -> None:
    program.run_command("serve", ServeConfig, serve_model, positional="checkpoint")


def serve_model(run: RunConfig, settings: ServeConfig) -> None:
    """Loads the model and answers requests until a signal ends it. Raises ConfigError where the
    settings cannot be right, or the port is taken."""
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError("serve needs aiohttp: pip install -e '.[serve]'")
    # The key is in the environment; on the command line everybody on the machine would see it.
    name = settings.api_key_variable
    key = None if name is None else os.environ.get(name)
    if name is not None and not key:
        raise ConfigError(f"api_key_variable={name}: this environment variable is not set")
    if jax.process_count() > 1:
        raise ConfigError("serve runs in one process; start one server on each machine")
    shared = {field.name for field in fields(ServerSettings)} - {"api_key"}
    how = ServerSettings(api_key=key, **{name: getattr(settings, name) for name in shared})
    try:
        asyncio.run(how.check_port())
        if settings.api == "tinker":
            _serve_tinker(run, settings, how)
        else:
            _serve_openai(run, settings, how)
    except OSError as error:
        raise ConfigError(f"host={settings.host} port={settings.port}: {error}") from error
    except EngineFailed as error:
        raise SystemExit(f"error: {error}") from error


def _serve_openai(run: RunConfig, settings: ServeConfig, how: ServerSettings) -> None:
    model = settings.open(run)
    with error_context("serve"):
        engine = live_engine(model, run.generation, run.rollout, settings.max_waiting)
    # The engine has them layer by layer, and nothing needs the weights as they were loaded.
    model = replace(model, params={})
    generation = engine.spec.generation
    name = model.run.resolve().name if model.run is not None else model.source.name
    limits = Limits(
        settings.served_name or name,
        generation.max_prompt_length,
        generation.max_new_tokens,
        min(engine.spec.max_length, model.cfg.max_positions),
        max_sequences=engine.num_slots + settings.max_waiting,
    )
    server = Server(engine, model.tokenizer, limits, how)
    lines = [
        f"{engine.num_slots} slots, prompts of up to {limits.max_prompt_length} tokens, "
        f"completions of up to {limits.max_new_tokens}"
    ]
    try:
        # What most requests need is compiled before the server listens.
        program.say(
            "compiling, before it listens: seconds for a tiny model, minutes for a large one"
        )
        began = time.monotonic()
        engine.warm_up()
        program.say(f"compiled in {time.monotonic() - began:.0f} s")
        asyncio.run(server.run(partial(_say, limits.model_name, how, lines, "/v1")))
    finally:
        engine.close()


def _serve_tinker(run: RunConfig, settings: ServeConfig, how: ServerSettings) -> None:
    generation = run.generation
    folder = Path(settings.state_folder).expanduser()
    try:
        store = Store(folder)
    except (OSError, sqlite3.Error, StoreDamaged) as error:
        why = "" if isinstance(error, StoreDamaged) else "; or another server uses it"
        raise ConfigError(f"state_folder={folder}: {error}{why}") from error

    trainer = Trainer(
        run,
        max_prompt_length=generation.max_prompt_length,
        max_new_tokens=generation.max_new_tokens,
    )
    name = settings.served_name or trainer.model_name
    limits = TinkerLimits(name, trainer.max_length, settings.max_waiting, settings.max_models)
    waiting = len(store.waiting())
    server = TinkerServer(trainer, store, limits, how)
    lines = [f"sequences of up to {limits.max_length} tokens; state in {folder}"]
    if waiting:
        lines.append(f"{waiting} requests of the server before are done first")
    try:
        asyncio.run(server.run(partial(_say, name, how, lines, "")))
    except (WorkerFailed, sqlite3.Error) as error:
        hint = "what was accepted is in the journal, and the next server on the folder does it"
        raise SystemExit(f"error: state_folder={folder}: {error}; {hint}") from error
    finally:
        trainer.close()
        store.close()


def _say(name: str, how: ServerSettings, lines: list[str], path: str, address: str) -> None:
    """What the terminal shows once the server listens."""
    shown = [f"model {name}: {address}{path}", *lines]
    if how.api_key is None and how.host not in ("127.0.0.1", "localhost", "::1"):
        shown.append("no API key: everybody who reaches this address can use it")
    for line in shown:
        program.say(line)
