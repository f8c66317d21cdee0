"""One set of weights that trains: its gradients, its optimizer, its samples, its checkpoints."""

import asyncio
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

import jax
import numpy as np

from tunix_lite.algorithms.algorithm import Algorithm
from tunix_lite.learner.apart import add_gradients, optimizer_of_client
from tunix_lite.learner.optim import Optimizer, OptimizerConfig, init_opt_state, scaled_for
from tunix_lite.models.lora import LoraConfig
from tunix_lite.parallel.mesh import put
from tunix_lite.seeds import seed_of_call
from tunix_lite.trainer.batches import gradient_of_batch
from tunix_lite.trainer.data import Datum, check_data, check_tokens, parts_of_data
from tunix_lite.trainer.home import TrainerHome
from tunix_lite.trainer.losses import TokenLoss, token_loss
from tunix_lite.trainer.sampling import Sample, SampleSettings, as_settings
from tunix_lite.trainer.saved import kind_of, load_state, save_state
from tunix_lite.types import Batch, Graded, Metrics, Params, RowBatch, TrainState


@dataclass(frozen=True)
class LossOutput:
    """What a forward pass gives.

    Example: LossOutput(2.5, [[-1.0, -1.5]], {"train/loss": 2.5}) of one datum with two targets.
    """

    # the sum over all tokens
    loss: float
    # of each datum, the log-probability of each of its targets; of a Batch: []
    logprobs: list[list[float]] = field(default_factory=list)
    metrics: Metrics = field(default_factory=dict)


P = ParamSpec("P")
R = TypeVar("R")


def locked(method: Callable[P, R]) -> Callable[P, R]:
    """The method on the trainer's mesh, one call at a time."""

    @functools.wraps(method)
    def alone(self: "Weights", *arguments: P.args, **settings: P.kwargs) -> R:
        with self.trainer.on_mesh():
            self.check_open()
            return method(self, *arguments, **settings)

    return alone


def in_worker(method: Callable[P, R]) -> Callable[P, asyncio.Future[R]]:
    """The method in the trainer's worker thread, in the order of the calls; it returns at once."""

    @functools.wraps(method)
    def later(self: "Weights", *arguments: P.args, **settings: P.kwargs) -> asyncio.Future[R]:
        return self.trainer.in_worker(method, self, *arguments, **settings)

    later.__name__ = f"{method.__name__}_async"
    later.__doc__ = (
        f"`{method.__name__}`, in the trainer's worker thread, in the order of the calls."
    )
    return later


class Weights:
    """Weights that sample and score: those of a client now, or a snapshot of them.

    Example: client.snapshot().sample([[5, 6]], settings={"max_tokens": 8}).
    """

    def __init__(self, trainer: TrainerHome, params: Params, lora: LoraConfig | None, seed: int):
        self.trainer = trainer
        self.lora = lora
        self.seed = seed
        self._params: Params | None = params
        # stands for the weights as they are now, for the sampler
        self._owner = object()
        self._calls = 0

    @property
    def params(self) -> Params:
        """What trains, on the mesh: adapters, or all weights. The next update donates it."""
        self.check_open()
        return self._params

    @property
    def frozen(self) -> Params | None:
        """The base that adapters are attached to, which all clients share; None: all weights
        train."""
        return None if self.lora is None else self.trainer.base

    def check_open(self) -> None:
        """Raises ValueError after `close`."""
        if self._params is None:
            raise ValueError("this client was closed")

    @locked
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int = 1,
        settings: SampleSettings | Mapping | Sequence | None = None,
    ) -> list[Sample]:
        """num_samples completions of each prompt, a list of token ids; all of prompt 0 come first.

        settings: SampleSettings or their names and values; or a list of them, one per prompt.
        Without a seed each call draws others, which the client's seed decides. Raises ValueError,
        naming the prompt or the setting.
        """
        if not isinstance(num_samples, int) or num_samples < 1:
            raise ValueError(f"num_samples={num_samples}; it is 1 or more")
        if isinstance(settings, Sequence):
            each = [as_settings(one) for one in settings]
        else:
            each = [as_settings(settings)] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} settings for {len(prompts)} prompts; give one of each")
        if not len(prompts):
            raise ValueError("there are no prompts to continue")
        self._calls += 1
        engine = self.trainer.engine
        if self.trainer.is_base(self._params):
            engine.use(self._owner, self._params, None, None)
        else:
            engine.use(self._owner, self.frozen, self._params, self.lora)
        for p, how in enumerate(each):
            if how.seed is None:
                each[p] = replace(how, seed=seed_of_call(self.seed, self._calls, p))
        return engine.sample(prompts, num_samples, each)

    @locked
    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float | None]]:
        """log p of each token given those before it, in nats; None for the first of a sequence.

        Raises ValueError, naming the sequence.
        """
        cfg = self.trainer.cfg
        for i, tokens in enumerate(sequences):
            check_tokens(f"sequence {i}", tokens, cfg.vocab_size, cfg.max_positions + 1)
        data = [Datum(tokens[:-1], tokens[1:]) for tokens in sequences if len(tokens) > 1]
        scored = iter(self._forward(data, token_loss("cross_entropy", {})).logprobs if data else [])
        return [[None, *(next(scored) if len(tokens) > 1 else [])] for tokens in sequences]

    def _forward(self, data: Sequence[Datum], loss: TokenLoss) -> LossOutput:
        program = self.trainer.programs.losses(loss, self.lora)
        return self._over_parts(data, loss, lambda rows: program(self._params, self.frozen, rows))

    def _over_parts(
        self, data: Sequence[Datum], loss: TokenLoss, run: Callable[[RowBatch], Metrics]
    ) -> LossOutput:
        """Runs each part of the data, and puts together what they give."""
        cfg = self.trainer.cfg
        check_data(data, loss.needs, cfg.vocab_size, cfg.max_positions)
        totals = {"train/loss": 0.0, "train/entropy": 0.0}
        logprobs: list[list[float]] = [[] for _ in data]
        for part in parts_of_data(data, self.trainer.mesh.shape["fsdp"], cfg.max_positions):
            metrics = jax.device_get(run(part.rows))
            for row, i in enumerate(part.indices):
                logprobs[i] = metrics["logprobs"][row, : len(data[i].tokens)].tolist()
            for name in totals:
                totals[name] += float(metrics[name])
        # a mean over tokens, as in a run
        totals["train/entropy"] /= sum(len(datum.tokens) for datum in data)
        return LossOutput(totals["train/loss"], logprobs, totals)

    def close(self) -> None:
        """Frees the weights. A second call does nothing."""
        self._params = None

    # the same in the trainer's worker
    sample_async = in_worker(sample)
    logprobs_async = in_worker(logprobs)


class TrainingClient(Weights):
    """Weights that train: adapters on the shared base, or all weights.

    Example: client = trainer.adapter(rank=8); client.forward_backward(data); client.optim_step().
    """

    def __init__(
        self,
        trainer: TrainerHome,
        params: Params,
        lora: LoraConfig | None,
        seed: int,
        optimizer: Optimizer,
    ):
        """optimizer: says which kind it is; each step says its numbers."""
        super().__init__(trainer, params, lora, seed)
        self._optimizer = optimizer
        self._table = trainer.trained_table(lora)
        opt_state = init_opt_state(optimizer_of_client(optimizer, self._table), params)
        self._step = put(np.int32(0))
        self._opt_state = opt_state
        self._grads: Params | None = None
        self._loss = 0.0

    @property
    def step(self) -> int:
        """Calls of optim_step so far, those of a loaded checkpoint included."""
        return int(self._step)

    @property
    def state(self) -> TrainState:
        """The step, the weights that train and the optimizer's state. The next update donates
        it."""
        self.check_open()
        return TrainState(self._step, self._params, self._opt_state)

    @locked
    def forward(
        self, data: Sequence[Datum], loss: str = "cross_entropy", settings: Mapping | None = None
    ) -> LossOutput:
        """The loss and the log-probabilities of the targets, in nats; no gradient. As
        `forward_backward`."""
        return self._forward(data, token_loss(loss, settings or {}))

    @locked
    def forward_backward(
        self,
        data: Sequence[Datum] | Batch,
        loss: str | Algorithm = "cross_entropy",
        settings: Mapping | None = None,
    ) -> LossOutput:
        """Adds the gradient of the loss to those of the calls before; `optim_step` takes the sum.

        data: Datums, for a loss of trainer/losses.py, a sum over their tokens; or a Batch, for the
        loss of an algorithm: one of conf/algorithm by name, or the object. settings: of the loss,
        such as {"clip_high_threshold": 1.28}; of an algorithm by name: its settings. Raises
        ValueError, naming datum and token, before anything is added.
        """
        if isinstance(data, Batch):
            return self._batch_gradient(data, loss, settings or {})
        if not isinstance(loss, str):
            raise ValueError(f"loss={type(loss).__name__}: an algorithm's loss wants a Batch")
        if self.lora is not None and self.lora.dropout:
            raise ValueError(f"lora.dropout={self.lora.dropout} is for a Batch; set it to 0")
        loss_of_tokens = token_loss(loss, settings or {})
        program = self.trainer.programs.gradients(loss_of_tokens, self.lora, self._params)

        def run(rows: RowBatch) -> Metrics:
            grads, metrics = program(self._params, self.frozen, self._step, rows)
            sums.append(grads if not sums else add_gradients(sums.pop(), grads))
            return metrics

        # the sum of this call is added when all of it is there
        sums: list[Params] = []
        output = self._over_parts(data, loss_of_tokens, run)
        self._add(sums.pop(), output.loss)
        return output

    @locked
    def collect(self, step: int) -> tuple[Batch, Metrics, Graded | None]:
        """What update number `step` (from 0) of a run with the trainer's settings would learn from:
        (batch, metrics, graded completions), sampled with this client's weights now.

        Prompts, sampling keys, rewards and advantages are those of run_training.py. Raises
        ConfigError for settings that need a run, such as rollout.overlap; RunFailed, naming the
        step, if data or a reward fails.
        """
        return self.trainer.collecting.collect(self, step)

    def _batch_gradient(self, batch: Batch, loss: str | Algorithm, settings: Mapping) -> LossOutput:
        program, rows = gradient_of_batch(self.trainer, self, loss, settings, batch)
        grads, metrics = program(self._params, self.frozen, self._step, rows)
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self._add(grads, metrics["train/loss"])
        return LossOutput(metrics["train/loss"], [], metrics)

    def _add(self, grads: Params, loss: float) -> None:
        self._grads = grads if self._grads is None else add_gradients(self._grads, grads)
        self._loss += loss

    @locked
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
        a run in place of them, with their schedule. An update that is not finite is not made, and
        train/skipped is 1. Raises ValueError where there is no gradient, or for a setting that
        cannot be right.
        """
        if self._grads is None:
            raise ValueError("there are no gradients: call forward_backward before optim_step")
        if optimizer is None:
            numbers = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
            for name, value in {"learning_rate": learning_rate, **numbers}.items():
                if not (isinstance(value, int | float) and math.isfinite(value)):
                    raise ValueError(f"{name}={value}; it must be a finite number")
            if learning_rate < 0:
                raise ValueError(f"learning_rate={learning_rate}; it is 0 or more")
            rate = put(np.float32(learning_rate))
            numbers = {name: float(value) for name, value in numbers.items()}
            optimizer = OptimizerConfig(max_grad_norm=grad_clip_norm, **numbers)
        else:
            optimizer = scaled_for(optimizer, self.trainer.mesh.shape["fsdp"])
            # its schedule says the rate
            rate = None
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
        state, metrics = program(self.state, grads, loss, rate)
        self._take(state)
        return {name: float(value) for name, value in jax.device_get(metrics).items()}

    def _take(self, state: TrainState) -> None:
        self._step = state.step
        self._params = state.params
        self._opt_state = state.opt_state
        self._owner = object()

    @locked
    def snapshot(self) -> Weights:
        """A sampler with the weights as they are now; later updates do not change it.

        It holds a copy of what trains: of adapters, not of their base.
        """
        params = jax.tree.map(lambda x: x.copy(), self._params)
        return Weights(self.trainer, params, self.lora, self.seed)

    @locked
    def save(self, path: str | Path, optimizer: bool = True) -> Path:
        """Saves into this folder, as its checkpoint number `step`; returns when it is on disk.

        optimizer: whether the state of the optimizer is saved, too. Gradients are not. Raises
        ValueError if the folder holds something else, or this step; OSError.
        """
        folder = Path(path).absolute()
        kind = kind_of(self.trainer.run.model.weights, self.lora, optimizer)
        save_state(folder, self.state, kind)
        return folder

    @locked
    def load(self, path: str | Path, optimizer: bool = True) -> int:
        """Takes the newest checkpoint of this folder, and forgets gradients; returns its step.

        optimizer: False leaves the optimizer of the checkpoint, and begins with a new one. Raises
        ValueError if the checkpoint is damaged, or of other weights: this client stays as it was.
        """
        kind = kind_of(self.trainer.run.model.weights, self.lora, optimizer)
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
        self._opt_state = None
        if self.trainer.client_of_all_weights is self:
            self.trainer.client_of_all_weights = None

    # the same in the trainer's worker
    collect_async = in_worker(collect)
    forward_async = in_worker(forward)
    forward_backward_async = in_worker(forward_backward)
    optim_step_async = in_worker(optim_step)
    snapshot_async = in_worker(snapshot)
    save_async = in_worker(save)
    load_async = in_worker(load)
