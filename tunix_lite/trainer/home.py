"""What the clients of a trainer share, declared below them so that no import goes back."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax

from tunix_lite.config import RunConfig
from tunix_lite.models.decoder import Architecture
from tunix_lite.models.lora import LoraConfig
from tunix_lite.models.source import FoundModel
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.models.weights import Table
from tunix_lite.trainer.programs import TrainerPrograms
from tunix_lite.trainer.sampling import SamplingEngine
from tunix_lite.types import Batch, Graded, Metrics, Params


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


class TrainerHome(Protocol):
    """A base model on a mesh, with what its clients share."""

    run: RunConfig
    found: FoundModel
    mesh: jax.sharding.Mesh
    cfg: Architecture
    tokenizer: Tokenizer
    dtype: type
    engine: SamplingEngine
    programs: TrainerPrograms
    base: Params
    collecting: Collector
    forward_settings: dict[str, Any]
    max_length: int

    def is_base(self, params: Params) -> bool:
        """Whether these are the frozen weights themselves."""

    def trained_table(self, lora: LoraConfig | None) -> Table:
        """The declared weights that a client with these adapters trains."""

    def on_mesh(self) -> AbstractContextManager[None]:
        """Inside, the trainer's mesh and rules are the current ones, and no other call runs."""

    def in_worker(self, call: Callable, *arguments: Any, **settings: Any) -> asyncio.Future:
        """Calls it in the trainer's worker thread, after all calls before."""

    def forget(self, client: TrainedWeights) -> None:
        """What a client says when it closes."""
