"""A base model on a mesh, and clients beside it that train: the primitives of a training loop that
you write yourself.

  trainer = Trainer("model=bundled")
  client = trainer.adapter(rank=8)
  client.forward_backward([Datum([5, 6, 7], [6, 7, 1])], loss="cross_entropy")
  client.optim_step(learning_rate=1e-3)
  client.sample([[5, 6]], settings={"max_tokens": 16})
"""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from tunix_lite.learner.policy import STORED
from tunix_lite.models import decoder, source, weights
from tunix_lite.models.lora import LoraConfig, adapter_weights
from tunix_lite.models.quantize import STORAGE, stored_table
from tunix_lite.seeds import check_seed
from tunix_lite.trainer.batches import Collecting
from tunix_lite.trainer.client import TrainingClient, Weights
from tunix_lite.trainer.home import TrainerHome
from tunix_lite.trainer.saved import kind_of, load_trained, read_kind
from tunix_lite.types import Params


class Trainer(TrainerHome):
    """One base on one mesh, loaded once, and the clients that train beside it.

    Calls may come from several threads: one runs at a time. Adapters share the base; each has its
    own gradients and optimizer.

    Example: Trainer("model=bundled", 'model.mesh_shape=[[2,2],[fsdp,tp]]').adapter(rank=8).
    """

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
            if self.client_of_all_weights is not None:
                raise ValueError("there is a client of all weights already; close it first")
            storage = STORED[self.run.training.mixed_precision]
            found = replace(self.found, lora=None)
            params = source.load_base(found, self.run.seed, storage)
            self.client_of_all_weights = self._client(params, None, self.run.seed)
            return self.client_of_all_weights

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

    @cached_property
    def collecting(self) -> Collecting:
        """The part that samples and grades as run_training.py does."""
        return Collecting(self)

    def close(self) -> None:
        """Ends the sampler and the worker. Clients keep their weights, and can be saved."""
        super().close()
        with self._lock:
            if "collecting" in self.__dict__:
                self.collecting.close()
                del self.collecting

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
