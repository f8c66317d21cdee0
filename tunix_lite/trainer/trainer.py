"""A base model on a mesh, and clients beside it that train: the primitives of a training loop that
you write yourself.

  trainer = Trainer("model=bundled")
  client = trainer.adapter(rank=8)
  client.forward_backward([Datum([5, 6, 7], [6, 7, 1])], loss="cross_entropy")
  client.optim_step(learning_rate=1e-3)
  client.sample([[5, 6]], settings={"max_tokens": 16})
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.config import RunConfig
from tunix_lite.errors import ConfigError, error_context
from tunix_lite.inference.language_model import LanguageModel
from tunix_lite.learner.policy import DTYPES, STORED
from tunix_lite.models import attention, decoder, source, weights
from tunix_lite.models.lora import LoraConfig, adapter_weights
from tunix_lite.models.quantize import STORAGE, stored_table
from tunix_lite.models.weights import Table
from tunix_lite.parallel.compiler_options import update_options
from tunix_lite.parallel.mesh import make_mesh, set_rules
from tunix_lite.resolved.run import with_defaults
from tunix_lite.seeds import check_seed
from tunix_lite.settings.compose import compose
from tunix_lite.trainer.batches import Collecting
from tunix_lite.trainer.client import TrainingClient, Weights
from tunix_lite.trainer.programs import TrainerPrograms, target_scores
from tunix_lite.trainer.sampling import SamplingEngine
from tunix_lite.trainer.saved import kind_of, load_trained, read_kind
from tunix_lite.types import Params


class Trainer:
    """One base on one mesh, loaded once, and the clients that train beside it.

    Calls may come from several threads: one runs at a time. Adapters share the base; each has its
    own gradients and optimizer.

    Example: Trainer("model=bundled", 'model.mesh_shape=[[2,2],[fsdp,tp]]').adapter(rank=8).
    """

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
        if len(settings) == 1 and isinstance(settings[0], RunConfig):
            self.run = settings[0]
        else:
            self.run = compose(list(settings))
        if jax.process_count() > 1:
            raise ConfigError("Trainer runs in one process; run_training.py spans several")
        with error_context(""):
            self.found = source.download(source.locate(self.run.model))
        with error_context("model.mesh_shape"):
            self.mesh = make_mesh(self.run.model.mesh_shape)
            set_rules(self.run.sharding)
            source.check_mesh(self.found, self.mesh)
        self.cfg = self.found.cfg
        platform = self.mesh.devices.flat[0].platform
        self.run, _ = with_defaults(self.run, self.cfg, self.found.lora, platform)
        self.tokenizer = self.found.tokenizer
        self.dtype = DTYPES[self.run.training.mixed_precision]
        self._lock = threading.RLock()
        self._worker: ThreadPoolExecutor | None = None
        self._full: TrainingClient | None = None
        model = LanguageModel(self.found, None, self.mesh, self.dtype)
        self.engine = SamplingEngine(model, self.run.rollout, max_prompt_length, max_new_tokens)
        training = self.run.training
        options = update_options(training.scan_layers)
        scores = partial(target_scores, cfg=self.cfg, dtype=self.dtype, **self.forward_settings)
        policy = Policy(None, scores)
        self.programs = TrainerPrograms(policy, self.run.seed, training.max_steps, options)

    @cached_property
    def forward_settings(self) -> dict[str, Any]:
        """What decoder.forward takes beside weights, architecture and dtype."""
        training = self.run.training
        platform = self.mesh.devices.flat[0].platform
        with error_context("training"):
            name, _ = attention.choose(
                training.attention, self.cfg, platform, self.dtype, self.cfg.max_positions, False
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

    # ---- clients

    def adapter(
        self,
        rank: int | None = None,
        seed: int | None = None,
        alpha: float | None = None,
        targets: str | None = None,
    ) -> TrainingClient:
        """A client that trains new adapters beside the base.

        What is None is that of model.lora and seed in the settings. Raises ValueError for a rank
        below 1, or targets that match nothing.
        """
        settings = {"rank": rank, "alpha": alpha, "targets": targets}
        settings = {name: value for name, value in settings.items() if value is not None}
        lora = replace(self.run.model.lora, **settings)
        if lora.rank < 1:
            raise ValueError("rank=0: give adapter(rank=8), or train all weights with full()")
        adapter_weights(decoder.weights(self.cfg), lora)
        seed = self.run.seed if seed is None else check_seed(seed)
        with self.on_mesh():
            params = source.load_new_adapters(replace(self.found, lora=lora), seed)
            stored = STORAGE[STORED[self.run.training.mixed_precision]]
            params = jax.tree.map(lambda x: x.astype(stored), params)
            return self._client(params, lora, seed)

    def full(self) -> TrainingClient:
        """The client that trains all weights: a copy of them, and its optimizer.

        Raises ValueError while there is one already.
        """
        with self.on_mesh():
            if self._full is not None:
                raise ValueError("there is a client of all weights already; close it first")
            storage = STORED[self.run.training.mixed_precision]
            found = replace(self.found, lora=None)
            params = source.load_base(found, self.run.seed, storage)
            self._full = self._client(params, None, self.run.seed)
            return self._full

    def sampler(self, path: str | Path | None = None) -> Weights:
        """A sampler with the weights that a client has saved there: adapters, or all weights. None:
        the base alone.

        Raises ValueError if the folder is damaged, or of another model.
        """
        with self.on_mesh():
            if path is None:
                return Weights(self, self.base, None, self.run.seed)
            folder = Path(path).absolute()
            kind = read_kind(folder)
            lora = None
            if kind.rank:
                adapters = {name: getattr(kind, name) for name in ("rank", "alpha", "targets")}
                lora = replace(self.run.model.lora, **adapters)
            storage = STORED[self.run.training.mixed_precision]
            if lora is None:
                shapes = weights.shapes(stored_table(decoder.weights(self.cfg), storage))
            else:
                shapes = weights.shapes(self.trained_table(lora), STORAGE[storage])
            _, params = load_trained(folder, shapes, kind_of(self.model_name, lora, False))
            return Weights(self, params, lora, self.run.seed)

    def _client(self, params: Params, lora: LoraConfig | None, seed: int) -> TrainingClient:
        return TrainingClient(self, params, lora, seed, self.run.optimizer)

    def forget(self, client: TrainingClient) -> None:
        """What `client.close()` calls: another client of all weights may follow."""
        if self._full is client:
            self._full = None

    # ---- what clients share

    @cached_property
    def base(self) -> Params:
        """The frozen weights under adapters, stored as model.lora.base says."""
        return source.load_base(self.found, self.run.seed, self.run.model.lora.base)

    def is_base(self, params: Params) -> bool:
        """Whether these are the frozen weights themselves."""
        return params is self.__dict__.get("base")

    @cached_property
    def collecting(self) -> Collecting:
        """What samples and grades as run_training.py does."""
        return Collecting(self)

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

    def in_worker(self, call: Callable, *arguments: Any, **settings: Any) -> asyncio.Future:
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
            if "collecting" in self.__dict__:
                self.collecting.close()
                del self.collecting

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
