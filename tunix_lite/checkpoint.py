"""Checkpoints of the TrainState with orbax: saved in the background, kept whole, restored onto any mesh."""

from pathlib import Path

import jax
import orbax.checkpoint as ocp

from tunix_lite.types import Params, TrainState


def _accuracy(metrics: dict) -> float:
    return metrics["accuracy"]


class Checkpoints:
    """The checkpoints of one run, `checkpoints/<step>/`: the newest `keep`, and the `keep_best` that did best."""

    def __init__(self, folder: str | Path, keep: int = 2, keep_best: int = 0):
        self.folder = Path(folder).absolute()
        self._keep, self._keep_best = keep, keep_best
        self._opened = None

    @property
    def _manager(self) -> ocp.CheckpointManager:
        if self._opened is None:
            policies = ocp.checkpoint_managers
            best = policies.BestN(get_metric_fn=_accuracy, n=self._keep_best, keep_checkpoints_without_metrics=False)
            options = ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(self._keep), best]),
                enable_async_checkpointing=True,
                cleanup_tmp_directories=True,  # of a run that was killed while it saved
            )
            self._opened = ocp.CheckpointManager(self.folder, options=options)
        return self._opened

    def steps(self) -> list[int]:
        """The steps of all whole checkpoints, in order. Makes no folder."""
        return sorted(self._manager.all_steps()) if self.folder.is_dir() else []

    def latest_step(self) -> int | None:
        """The step of the newest whole checkpoint, or None. Makes no folder."""
        return self._manager.latest_step() if self.folder.is_dir() else None

    def save(self, state: TrainState, accuracy: float | None = None) -> None:
        """Copies the state off the devices and writes it in the background; the state may be donated afterwards.

        accuracy: held-out, of this very state, if it was measured.
        """
        metrics = None if accuracy is None else {"accuracy": accuracy}
        saved = self._manager.save(int(state.step), args=ocp.args.StandardSave(state), metrics=metrics)
        assert saved, f"orbax skipped step {int(state.step)}: {self.folder} holds a later one"

    def restore(self, like: TrainState) -> TrainState:
        """The newest checkpoint, with the shapes and shardings of `like`.

        Raises ValueError if there is none, or if it holds something else than `like`.
        """
        step = self.latest_step()
        if step is None:
            raise ValueError(f"{self.folder} holds no checkpoint")
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def restore_params(self, like: Params, step: int | None = None) -> tuple[int, Params]:
        """(step, params) of a checkpoint, the newest if `step` is None, without the optimizer's state.

        `like` are ShapeDtypeStructs that say shapes and places. Raises ValueError if there is no such checkpoint, or
        if it holds something else.
        """
        steps = self.steps()
        if not steps or step not in (None, *steps):
            there = f"; there is {', '.join(map(str, steps))}" if steps else ""
            raise ValueError(f"{self.folder} holds no checkpoint{'' if step is None else f' of step {step}'}{there}")
        step = max(steps) if step is None else step
        wanted = {"params": like}
        restore = jax.tree.map(lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape), wanted)
        args = ocp.args.PyTreeRestore(item=wanted, restore_args=restore, partial_restore=True)
        with ocp.CheckpointManager(self.folder, item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
            try:
                return step, manager.restore(step, args=args)["params"]
            except (ValueError, TypeError, KeyError) as error:
                first_line = str(error).strip().splitlines()[0][:300]
                raise ValueError(f"{self.folder} does not hold weights of this model: {first_line}") from error

    def close(self) -> None:
        """Waits until everything is on disk."""
        if self._opened is not None:
            self._opened.wait_until_finished()
            self._opened.close()
            self._opened = None
