"""A base model on a mesh, with what the clients of a trainer share."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, ParamSpec, Protocol, TypeVar

import jax
import jax.numpy as jnp

from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.config import RunConfig
from tunix_lite.errors import ConfigError, error_context
from tunix_lite.inference.language_model import LanguageModel
from tunix_lite.learner.policy import DTYPES
from tunix_lite.models import attention, decoder, source
from tunix_lite.models.lora import LoraConfig, adapter_weights
from tunix_lite.models.weights import Table
from tunix_lite.parallel.compiler_options import update_options
from tunix_lite.parallel.mesh import make_mesh, set_rules
from tunix_lite.resolved.run import with_defaults
from tunix_lite.settings.compose import compose
from tunix_lite.trainer.programs import TrainerPrograms, target_scores
from tunix_lite.trainer.sampling import SamplingEngine
from tunix_lite.types import Batch, Graded, Metrics, Params

P = ParamSpec("P")
R = TypeVar("R")


class TrainedWeights(Protocol):
    """The weights of a client: adapters with their base, or all of them."""

    lora: LoraConfig | None
    # what trains, on the mesh
    params: Params
    # the base under adapters; None: all weights train
    frozen: Params | None


class Collector(Protocol):
    """Samples and grades as a run does."""

    def collect(self, client: TrainedWeights, step: int) -> tuple[Batch, Metrics, Graded | None]:
        """What update number `step` of a run would learn from."""


class TrainerHome:
    """The base, its mesh, the sampler and the compiled programs. One call at a time uses them."""

    # of the trainer that has this home
    collecting: Collector

    def __init__(
        self,
        *settings: str | RunConfig,
        max_prompt_length: int = 2048,
        max_new_tokens: int = 2048,
    ):
        """settings: as on the command line of run_training.py, or one RunConfig (`compose`).

        Read are model, training.mixed_precision, remat, scan_layers, attention, reduce_dtype and
        tp_reduce_dtype, rollout, sharding, optimizer and seed. max_prompt_length, max_new_tokens:
        of samples, at most. Raises ConfigError.
        """
        is_whole = len(settings) == 1 and isinstance(settings[0], RunConfig)
        run = settings[0] if is_whole else compose(list(settings))
        if jax.process_count() > 1:
            raise ConfigError("Trainer runs in one process; run_training.py spans several")
        with error_context(""):
            self.found = source.download(source.locate(run.model))
        with error_context("model.mesh_shape"):
            self.mesh = make_mesh(run.model.mesh_shape)
            set_rules(run.sharding)
            source.check_mesh(self.found, self.mesh)
        self.cfg = self.found.cfg
        self._platform = self.mesh.devices.flat[0].platform
        self.run, _ = with_defaults(run, self.cfg, self.found.lora, self._platform)
        self.tokenizer = self.found.tokenizer
        training = self.run.training
        self.dtype = DTYPES[training.mixed_precision]
        self._lock = threading.RLock()
        self._worker: ThreadPoolExecutor | None = None
        # of which there is one at a time
        self.client_of_all_weights: TrainedWeights | None = None
        model = LanguageModel(self.found, None, self.mesh, self.dtype)
        self.engine = SamplingEngine(model, self.run.rollout, max_prompt_length, max_new_tokens)
        options = update_options(training.scan_layers)
        scores = partial(target_scores, cfg=self.cfg, dtype=self.dtype, **self.forward_settings)
        policy = Policy(None, scores)
        self.programs = TrainerPrograms(policy, self.run.seed, training.max_steps, options)

    @cached_property
    def forward_settings(self) -> dict[str, Any]:
        """The settings of decoder.forward besides weights, architecture and dtype."""
        training = self.run.training
        with error_context("training"):
            longest = self.cfg.max_positions
            name, _ = attention.choose(
                training.attention, self.cfg, self._platform, self.dtype, longest, False
            )
        return {
            "remat": training.remat,
            "attend": attention.IMPLEMENTATIONS[name],
            "reduce_dtype": jnp.dtype(training.reduce_dtype),
            "tp_reduce_dtype": jnp.dtype(training.tp_reduce_dtype),
            "scan_layers": training.scan_layers,
        }

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence, prompt and completion together."""
        return self.cfg.max_positions

    @property
    def model_name(self) -> str:
        """model.weights in the settings."""
        return self.run.model.weights

    @cached_property
    def base(self) -> Params:
        """The frozen weights under adapters, stored as model.lora.base says."""
        return source.load_base(self.found, self.run.seed, self.run.model.lora.base)

    def is_base(self, params: Params) -> bool:
        """Whether these are the frozen weights themselves."""
        return params is self.__dict__.get("base")

    def trained_table(self, lora: LoraConfig | None) -> Table:
        """The declared weights that a client with these adapters trains."""
        table = decoder.weights(self.cfg)
        return table if lora is None else adapter_weights(table, lora)

    @contextlib.contextmanager
    def on_mesh(self) -> Iterator[None]:
        """Inside, the trainer's mesh and rules are the current ones, and no other call runs."""
        with self._lock, jax.set_mesh(self.mesh):
            set_rules(self.run.sharding)
            yield

    def in_worker(
        self, call: Callable[P, R], *arguments: P.args, **settings: P.kwargs
    ) -> asyncio.Future[R]:
        """Calls it in the trainer's worker thread, after all calls before. Needs a running event
        loop."""
        with self._lock:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "trainer")
        return asyncio.wrap_future(self._worker.submit(call, *arguments, **settings))

    def close(self) -> None:
        """Ends the sampler and the worker. Clients keep their weights, and can be saved."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
        with self._lock:
            self.engine.close()
