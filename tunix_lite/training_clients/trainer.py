"""A base model on a mesh, and clients beside it that train: the primitives of a training loop that
you write yourself.

  trainer = Trainer("model=bundled")
  client = trainer.adapter(rank=8)
  client.forward_backward([Datum([5, 6, 7], [6, 7, 1])], loss="cross_entropy")
  client.optim_step(learning_rate=1e-3)
  client.sample([[5, 6]], settings={"max_tokens": 16})
"""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tunix_lite.algorithms.algorithm import Needs, Policy
from tunix_lite.basics.errors import ConfigError, error_context
from tunix_lite.basics.types import (
    Metrics,
    Params,
    RowBatch,
    TrainState,
    check_seed,
    seed_of_call,
)
from tunix_lite.inference.language_model import LanguageModel
from tunix_lite.learner.optim import Optimizer, OptimizerConfig, init_opt_state, scaled_for
from tunix_lite.learner.policy import DTYPES, STORED, batch_scores
from tunix_lite.models import attention, decoder, source, weights
from tunix_lite.models.lora import LoraConfig, adapter_weights
from tunix_lite.models.quantize import STORAGE, stored_table
from tunix_lite.models.weights import Table
from tunix_lite.parallel.compiler_options import for_updates
from tunix_lite.parallel.mesh import make_mesh, put, set_rules
from tunix_lite.settings.compose import compose
from tunix_lite.settings.config import RunConfig
from tunix_lite.settings.resolved_run import trained_architecture, with_defaults
from tunix_lite.training_clients.data import Datum, check_data, check_tokens, parts_of_data
from tunix_lite.training_clients.losses import TokenLoss, token_loss
from tunix_lite.training_clients.programs import (
    TrainerPrograms,
    add_gradients,
    optimizer_of_client,
)
from tunix_lite.training_clients.sampling import (
    Sample,
    SampleSettings,
    SamplingEngine,
    as_settings,
)
from tunix_lite.training_clients.saved import (
    kind_of,
    load_state,
    load_trained,
    read_kind,
    save_state,
)


@dataclass(frozen=True)
class LossOutput:
    """What a forward pass gives.
    Example: LossOutput(2.5, [[-1.0, -1.5]], {"train/loss": 2.5}) of one datum with two targets."""

    loss: float  # the sum over all tokens
    # of each datum, the log-probability of each of its targets
    logprobs: list[list[float]] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)


P = ParamSpec("P")
R = TypeVar("R")


def _locked(method: Callable[P, R]) -> Callable[P, R]:
    """The method on the trainer's mesh, one call at a time."""

    @functools.wraps(method)
    def alone(self: "Weights", *arguments: P.args, **settings: P.kwargs) -> R:
        with self.trainer.on_mesh():
            self.check_open()
            return method(self, *arguments, **settings)

    return alone


class Weights:
    """Weights that sample and score: those of a client now, or a snapshot of them.
    Example: client.snapshot().sample([[5, 6]], settings={"max_tokens": 8})."""

    def __init__(self, trainer: "Trainer", params: Params, lora: LoraConfig | None, seed: int):
        self.trainer = trainer
        self.lora = lora
        self.seed = seed
        self._take(TrainState(put(np.int32(0)), params, {}))
        self._calls = 0

    def _take(self, state: TrainState) -> None:
        self._state: TrainState | None = state
        # Stands for these weights: by it the sampler sees that it has others.
        self._owner = object()

    @property
    def state(self) -> TrainState:
        """The step, the weights that train and the optimizer's state. An update donates it."""
        self.check_open()
        return self._state

    @property
    def params(self) -> Params:
        """What trains, on the mesh: adapters, or all weights. The next update donates it."""
        return self.state.params

    @property
    def frozen(self) -> Params | None:
        """The base under adapters, which all clients share; None: all weights train."""
        return None if self.lora is None else self.trainer.base

    def check_open(self) -> None:
        """Raises ValueError after `close`."""
        if self._state is None:
            raise ValueError("this client was closed")

    @_locked
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int = 1,
        settings: SampleSettings | Mapping | Sequence | None = None,
    ) -> list[Sample]:
        """num_samples completions of each prompt, a list of token ids; all of prompt 0 come first.
        settings: SampleSettings or their names and values; or a list of them, one per prompt.
        Without a seed the client's seed decides. Raises ValueError, naming the prompt or the
        setting."""
        if not isinstance(num_samples, int) or num_samples < 1:
            raise ValueError(f"num_samples={num_samples}; it is 1 or more")
        if isinstance(settings, Sequence):
            each = [as_settings(one) for one in settings]
        else:
            each = [as_settings(settings)] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(
                f"{len(each)} settings for {len(prompts)} prompts; give one of each"
            )
        if not len(prompts):
            raise ValueError("there are no prompts to continue")
        # Two calls without a seed draw other completions.
        self._calls += 1
        engine = self.trainer.engine
        # the base of the trainer, if it is there, which sampling reads as it is
        if self.params is self.trainer.__dict__.get("base"):
            engine.use(self._owner, self.params, None, None)
        else:
            engine.use(self._owner, self.frozen, self.params, self.lora)
        for p, how in enumerate(each):
            if how.seed is None:
                each[p] = replace(how, seed=seed_of_call(self.seed, self._calls, p))
        return engine.sample(prompts, num_samples, each)

    @_locked
    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float | None]]:
        """log p of each token given those before it, in nats; None for the first of a sequence.
        Raises ValueError."""
        cfg = self.trainer.cfg
        for i, tokens in enumerate(sequences):
            # One more, as the last token is scored and not read.
            check_tokens(f"sequence {i}", tokens, cfg.vocab_size, cfg.max_positions + 1)
        data = [Datum(tokens[:-1], tokens[1:]) for tokens in sequences if len(tokens) > 1]
        loss = token_loss("cross_entropy", {})
        scored = iter(self._over_parts(data, loss).logprobs if data else [])
        logprobs = []
        for tokens in sequences:
            after_first = next(scored) if len(tokens) > 1 else []
            logprobs.append([None, *after_first])
        return logprobs

    def _over_parts(
        self,
        data: Sequence[Datum],
        loss: TokenLoss,
        run: Callable[[RowBatch], Metrics] | None = None,
    ) -> LossOutput:
        """Runs each part of the data, and puts together what they give. run: None: the losses."""
        if run is None:
            program = self.trainer.programs.losses(loss, self.lora)
            run = partial(program, self.params, self.frozen)
        cfg = self.trainer.cfg
        check_data(data, loss.needs, cfg.vocab_size, cfg.max_positions)
        totals = {"train/loss": 0.0, "train/entropy": 0.0}
        logprobs = [[] for _ in data]
        shards = self.trainer.mesh.shape["fsdp"]
        for indices, rows in parts_of_data(data, shards, cfg.max_positions):
            metrics = jax.device_get(run(rows))
            for row, i in enumerate(indices):
                logprobs[i] = metrics["logprobs"][row, : len(data[i].tokens)].tolist()
            for name in totals:
                totals[name] += float(metrics[name])
        # a mean over tokens, as in a run
        totals["train/entropy"] /= sum(len(datum.tokens) for datum in data)
        return LossOutput(totals["train/loss"], logprobs, totals)

    def close(self) -> None:
        """Frees the weights. A second call does nothing."""
        self._state = None


class TrainingClient(Weights):
    """Weights that train: adapters on the shared base, or all weights.
    Example: client = trainer.adapter(rank=8); client.forward_backward(data);
    client.optim_step()."""

    def __init__(self, trainer: "Trainer", params: Params, lora: LoraConfig | None, seed: int):
        super().__init__(trainer, params, lora, seed)
        # of the kind in the trainer's settings; each step says its numbers
        self._optimizer = trainer.run.optimizer
        self._table = trainer.trained_table(lora)
        fresh = optimizer_of_client(self._optimizer, self._table)
        # its first step may come with other numbers: of the same kind, their states are alike
        self._take(self.state.replace(opt_state=init_opt_state(fresh, params)))
        self._grads: Params | None = None
        self._loss = 0.0

    @property
    def step(self) -> int:
        """Calls of optim_step so far, those of a loaded checkpoint included."""
        return int(self.state.step)

    @_locked
    def forward(
        self,
        data: Sequence[Datum],
        loss: str = "cross_entropy",
        settings: Mapping | None = None,
    ) -> LossOutput:
        """The loss and the log-probabilities of the targets, in nats; no gradient. As
        `forward_backward`."""
        return self._over_parts(data, token_loss(loss, settings or {}))

    @_locked
    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: str = "cross_entropy",
        settings: Mapping | None = None,
    ) -> LossOutput:
        """Adds the gradient of the loss to those of the calls before; `optim_step` takes the sum.
        loss: one of training_clients/losses.py, a sum over tokens. settings: of the loss, such as
        {"clip_high_threshold": 1.28}. Raises ValueError, naming datum and token."""
        # Dropout takes a key for each sequence of a batch, and calls of a client add up to none.
        if self.lora is not None and self.lora.dropout:
            raise ValueError(f"lora.dropout={self.lora.dropout} is for runs; set it to 0")
        loss_of_tokens = token_loss(loss, settings or {})
        program = self.trainer.programs.gradients(loss_of_tokens, self.lora, self.params)

        def run(rows: RowBatch) -> Metrics:
            grads, metrics = program(self.params, self.frozen, self.state.step, rows)
            sums.append(grads if not sums else add_gradients(sums.pop(), grads))
            return metrics

        # the sum is taken when all of this call is in it
        sums = [] if self._grads is None else [self._grads]
        output = self._over_parts(data, loss_of_tokens, run)
        self._grads = sums.pop()
        self._loss += output.loss
        return output

    @_locked
    def optim_step(
        self,
        learning_rate: float = 1e-4,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
        *,
        optimizer: Optimizer | None = None,
    ) -> Metrics:
        """One update with the gradients since the last; returns their norm, and that of the update.
        The first six are those of AdamW; grad_clip_norm=0 does not clip. optimizer: settings as of
        a run in place of them. An update that is not finite is not made: train/skipped is 1. Raises
        ValueError."""
        if self._grads is None:
            raise ValueError("there are no gradients: call forward_backward before optim_step")
        if optimizer is None:
            numbers = {
                "beta1": beta1,
                "beta2": beta2,
                "eps": eps,
                "weight_decay": weight_decay,
            }
            for name, value in {"learning_rate": learning_rate, **numbers}.items():
                if not (isinstance(value, int | float) and math.isfinite(value)):
                    raise ValueError(f"{name}={value}; it must be a finite number")
                numbers[name] = float(value)
            if (rate := numbers.pop("learning_rate")) < 0:
                raise ValueError(f"learning_rate={learning_rate}; it is 0 or more")
            optimizer = OptimizerConfig(max_grad_norm=grad_clip_norm, **numbers)
            # As an array, so that another rate compiles no other program.
            rate = put(np.float32(rate))
        else:
            optimizer = scaled_for(optimizer, self.trainer.mesh.shape["fsdp"])
            # its schedule says the rate
            rate = None
        # The state of another kind of optimizer has another form.
        if type(optimizer) is not type(self._optimizer):
            raise ValueError(
                f"this client's optimizer is {type(self._optimizer).__name__}, and these are "
                f"settings of {type(optimizer).__name__}"
            )
        program = self.trainer.programs.optimizer(optimizer, self._table, self.state)
        loss = put(np.float32(self._loss))
        grads = self._grads
        self._grads = None
        self._loss = 0.0
        # The old state is donated: from here on only the new one is there.
        state, metrics = program(self.state, grads, loss, rate)
        self._take(state)
        return {name: float(value) for name, value in jax.device_get(metrics).items()}

    @_locked
    def snapshot(self) -> Weights:
        """A sampler with a copy of what trains as it is now."""
        # a copy, as the next update donates what trains
        params = jax.tree.map(lambda x: x.copy(), self.params)
        return Weights(self.trainer, params, self.lora, self.seed)

    @_locked
    def save(self, path: str | Path, optimizer: bool = True) -> Path:
        """Saves into this folder, as its checkpoint number `step`, perhaps without the optimizer;
        gradients are not saved. Raises ValueError if the folder holds something else, or this step;
        OSError."""
        folder = Path(path).absolute()
        save_state(folder, self.state, kind_of(self.trainer.model_name, self.lora, optimizer))
        return folder

    @_locked
    def load(self, path: str | Path, optimizer: bool = True) -> int:
        """Takes the newest checkpoint of this folder, and forgets gradients; returns its step.
        optimizer: False begins with a new one. Raises ValueError if the checkpoint is damaged, or
        of other weights."""
        kind = kind_of(self.trainer.model_name, self.lora, optimizer)
        state = load_state(Path(path).absolute(), self.state, kind)
        if not optimizer:
            fresh = optimizer_of_client(self._optimizer, self._table)
            state = state.replace(opt_state=init_opt_state(fresh, state.params))
        self._grads = None
        self._loss = 0.0
        self._take(state)
        return self.step

    def close(self) -> None:
        """Frees weights, gradients and the optimizer's state. A second call does nothing."""
        super().close()
        self._grads = None
        if self.trainer.client_of_all_weights is self:
            self.trainer.client_of_all_weights = None


class Trainer:
    """One base on one mesh, loaded once, and the clients that train beside it. Calls may come from
    several threads: one runs at a time.
    Example: Trainer("model=bundled", 'model.mesh_shape=[[2,2],[fsdp,tp]]').adapter(rank=8)."""

    def __init__(
        self,
        *settings: str | RunConfig,
        max_prompt_length: int = 2048,
        max_new_tokens: int = 2048,
    ):
        """settings: as on the command line of run_training.py, or one RunConfig (`compose`).
        max_prompt_length, max_new_tokens: of samples, at most. Raises ConfigError."""
        is_whole = len(settings) == 1 and isinstance(settings[0], RunConfig)
        run = settings[0] if is_whole else compose(list(settings))
        if jax.process_count() > 1:
            raise ConfigError("Trainer runs in one process; run_training.py spans several")
        with error_context(""):
            self.found = source.download(source.locate(run.model))
            self.cfg = trained_architecture(run.model, self.found.cfg, Needs())
        with error_context("model.mesh_shape"):
            self.mesh = make_mesh(run.model.mesh_shape)
            set_rules(run.sharding)
            source.check_mesh(self.found, self.mesh)
        platform = self.mesh.devices.flat[0].platform
        self.run, _ = with_defaults(run, self.cfg, self.found.lora, platform)
        self.tokenizer = self.found.tokenizer
        training = self.run.training
        self.dtype = DTYPES[training.mixed_precision]
        # Reentrant, as a caller may hold it, by `on_mesh`, around calls of clients.
        self._lock = threading.RLock()
        # of which there is one at a time
        self.client_of_all_weights: TrainingClient | None = None
        model = LanguageModel(self.found, None, self.mesh, self.dtype)
        self.engine = SamplingEngine(
            model, self.run.rollout, max_prompt_length, max_new_tokens
        )
        with error_context("training"):
            # the widest row that a datum may make
            longest = self.cfg.max_positions
            name, _ = attention.choose(
                training.attention, self.cfg, platform, self.dtype, longest, False
            )
        scores = partial(
            batch_scores,
            cfg=self.cfg,
            temperature=1.0,
            dtype=self.dtype,
            before=0,
            remat=training.remat,
            attend=attention.IMPLEMENTATIONS[name],
            reduce_dtype=jnp.dtype(training.reduce_dtype),
            tp_reduce_dtype=jnp.dtype(training.tp_reduce_dtype),
            tokamax=training.expert_kernels == "tokamax",
            scan_layers=training.scan_layers,
        )
        policy = Policy(None, scores)
        options = for_updates(weights.num_params(decoder.weights(self.cfg)))
        self.programs = TrainerPrograms(policy, self.run.seed, training.max_steps, options)

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

    def trained_table(self, lora: LoraConfig | None) -> Table:
        """The declared weights that a client with these adapters trains."""
        table = decoder.weights(self.cfg)
        return table if lora is None else adapter_weights(table, lora)

    def adapter(
        self,
        rank: int | None = None,
        seed: int | None = None,
        alpha: float | None = None,
        targets: str | None = None,
    ) -> TrainingClient:
        """A client that trains new adapters beside the base. What is None is that of the settings.
        Raises ValueError for a rank below 1, or targets that match nothing."""
        settings = {"rank": rank, "alpha": alpha, "targets": targets}
        settings = {name: value for name, value in settings.items() if value is not None}
        lora = replace(self.run.model.lora, **settings)
        if lora.rank < 1:
            raise ValueError("rank=0: give adapter(rank=8), or train all weights with full()")
        # wrong targets are found here, before anything is made
        adapter_weights(decoder.weights(self.cfg), lora)
        seed = self.run.seed if seed is None else check_seed(seed)
        with self.on_mesh():
            params = source.load_new_adapters(replace(self.found, lora=lora), seed)
            # what trains is kept as in a run, whatever the adapters' files hold
            stored = STORAGE[STORED[self.run.training.mixed_precision]]
            params = jax.tree.map(lambda x: x.astype(stored), params)
            return TrainingClient(self, params, lora, seed)

    def full(self) -> TrainingClient:
        """The client that trains all weights. Raises ValueError while there is one already."""
        with self.on_mesh():
            if self.client_of_all_weights is not None:
                raise ValueError("there is a client of all weights already; close it first")
            storage = STORED[self.run.training.mixed_precision]
            found = replace(self.found, lora=None)
            params = source.load_base(found, self.run.seed, storage)
            self.client_of_all_weights = TrainingClient(self, params, None, self.run.seed)
            return self.client_of_all_weights

    def sampler(self, path: str | Path | None = None) -> Weights:
        """A sampler with the weights that a client has saved there; None: the base alone. Raises
        ValueError if the folder is damaged, or of another model."""
        with self.on_mesh():
            if path is None:
                return Weights(self, self.base, None, self.run.seed)
            folder = Path(path).absolute()
            kind = read_kind(folder)
            lora = None
            if kind["rank"]:
                adapters = {name: kind[name] for name in ("rank", "alpha", "targets")}
                lora = replace(self.run.model.lora, **adapters)
            storage = STORED[self.run.training.mixed_precision]
            if lora is None:
                shapes = weights.shapes(stored_table(decoder.weights(self.cfg), storage))
            else:
                # shapes alone: the file has the values
                shapes = weights.shapes(self.trained_table(lora), STORAGE[storage])
            _, params = load_trained(folder, shapes, kind_of(self.model_name, lora, False))
            return Weights(self, params, lora, self.run.seed)

    @contextlib.contextmanager
    def on_mesh(self) -> Iterator[None]:
        """Inside, the trainer's mesh and rules are the current ones, and no other call runs."""
        with self._lock, jax.set_mesh(self.mesh):
            # Rules are global to the process, and another trainer may have set its own.
            set_rules(self.run.sharding)
            yield

    def close(self) -> None:
        """Ends the sampler and the worker. Clients keep their weights, and can be saved."""
        with self._lock:
            self.engine.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
