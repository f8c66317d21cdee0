"""The sampler of a run, and sampling on devices of its own (rollout.mesh_shape): before each
rollout the weights are copied from the mesh that learns."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from tunix_lite.basics.types import Params, Prompts, Rollout
from tunix_lite.models import source, weights
from tunix_lite.models.lora import acting_params
from tunix_lite.models.source import FoundModel
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.planning.estimate import MemoryEstimate
from tunix_lite.planning.hardware import attached_machine
from tunix_lite.rollout.generate import GenerateFunction, make_generate
from tunix_lite.runs.session import Session
from tunix_lite.settings.resolved_run import ResolvedRun


def arguments_of_sampler(resolved: ResolvedRun, tokenizer: Tokenizer) -> tuple:
    """Returns the arguments of make_generate and make_sampler for a run."""
    return (
        resolved.cfg,
        resolved.run.generation,
        tokenizer.eos_ids,
        tokenizer.pad_id,
        resolved.dtype,
        resolved.rollout,
        tokenizer,
        jnp.dtype(resolved.run.training.tp_reduce_dtype),
    )


@dataclass
class SeparateSampling:
    """Samples on a mesh of its own, whatever the current mesh is.
    Example: `SeparateSampling.of(session).steps(params, prompts, key, 8, grade)`."""

    mesh: jax.sharding.Mesh
    generate: GenerateFunction
    # shardings of acting parameters on the mesh
    shardings: Params
    # whether some of the weights never change: their copies stay
    has_frozen: bool
    between_chunks: Callable[[], None] | None = None
    # the arrays copied last, and their copies; empty where nothing is frozen
    _copied: tuple[list, list] = field(default=([], []), repr=False)

    @classmethod
    def of(cls, session: Session) -> "SeparateSampling | None":
        """The sampling on devices of its own, as rollout.mesh_shape asks; None without it."""
        parts = session.parts
        mesh = parts.rollout_mesh
        if mesh is None:
            return None
        model = parts.model
        capacity = attached_machine().capacity
        chosen = MemoryEstimate(parts.resolved).with_own_sampling_weights(capacity)
        devices = ", ".join(str(device.id) for device in mesh.devices.flat)
        session.console.say(
            f"sampling apart: {chosen.slots} slots, weights {chosen.sampling_weights}, on devices "
            f"{devices}"
        )
        generate = make_generate(*arguments_of_sampler(chosen, model.tokenizer))
        places = shardings_on(mesh, model)
        between_chunks = session.stopping.check_between_chunks
        return cls(mesh, generate, places, model.lora is not None, between_chunks)

    def steps(
        self,
        params: Params,
        prompts: Prompts,
        key: jax.Array,
        num_generations: int,
        **options: Any,
    ) -> Generator[None, None, Rollout]:
        """Samples like `generate` with stepwise=True. params: on the mesh that learns. They are
        copied when the first step has been made. options: others of `generate`."""
        with jax.set_mesh(self.mesh):
            inner = self.generate(
                self.copied(params),
                prompts,
                key,
                num_generations,
                between_chunks=self.between_chunks,
                stepwise=True,
                **options,
            )
        # the update donates them, and a name here would keep them alive
        del params
        while True:
            # The programs of each step find the mesh; in between, the mesh that learns is current.
            with jax.set_mesh(self.mesh):
                try:
                    next(inner)
                except StopIteration as end:
                    return end.value
            yield

    def compile_ahead(self, params: Params, *size: int, **about: Any) -> None:
        """Compiles the programs of `generate`."""
        with jax.set_mesh(self.mesh):
            self.generate.compile_ahead(self.copied(params), *size, **about)

    def copied(self, params: Params) -> Params:
        """The weights on the mesh. Those that have not changed since the last time are there."""
        leaves, treedef = jax.tree.flatten(params)
        shardings = treedef.flatten_up_to(self.shardings)
        before, copies = self._copied
        before = before or [None] * len(leaves)
        copies = [
            copies[i] if leaf is before[i] else jax.device_put(leaf, shardings[i])
            for i, leaf in enumerate(leaves)
        ]
        # Without a frozen part every array is new in each rollout, and keeping the last would only
        # take memory.
        if self.has_frozen:
            self._copied = leaves, copies
        return treedef.unflatten(copies)


def shardings_on(mesh: jax.sharding.Mesh, model: FoundModel) -> Params:
    """Returns the shardings of the model's acting parameters on this mesh."""
    with jax.set_mesh(mesh):
        frozen, trained = source.weight_tables(model)
        base = None if frozen is None else weights.shardings(frozen)
        return acting_params(base, weights.shardings(trained), model.lora)
