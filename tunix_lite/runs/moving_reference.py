"""A reference that follows the policy: every `algorithm.reference_every` steps it becomes a mean of
itself and the policy.

Each one is kept in the run's folder, `reference/<step>/`, before anything is learned with it. So a
run that resumes has the one of its checkpoint: the newest that is not of a later step.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np

from tunix_lite.algorithms.algorithm import Policy
from tunix_lite.checkpoint import Checkpoints
from tunix_lite.distributed.allgather import allgather_values
from tunix_lite.models import decoder
from tunix_lite.parallel.mesh import put
from tunix_lite.runs.session import Session
from tunix_lite.tracking.rundir import RunDir
from tunix_lite.types import Params, TrainState


@dataclass
class MovingReference:
    """Moves the reference of a policy when its step has come.

    Example: with every=20, `follow(policy, 20, params)` returns a policy with another reference,
    and `follow(policy, 21, params)` the same policy.
    """

    run_dir: RunDir
    # steps between two moves; 0: it never moves
    every: int
    # share of the policy
    mix: float
    # params of the policy -> a copy in the type that the reference is kept in
    copied: Callable[[Params], Params]
    # the step of the newest move
    last: int

    def follow(self, policy: Policy, step: int, params: Params) -> Policy:
        """The policy with the reference that is due at this step. Raises OSError if the folder
        cannot be written."""
        if not self.every or step % self.every or step <= self.last:
            return policy
        timed = policy.scorers["reference"]
        before = timed.scorer.params
        moved = self.copied(params)
        if self.mix < 1:
            moved = jax.tree.map(lambda old, new: old + self.mix * (new - old), before, moved)
        jax.block_until_ready(moved)

        # others still hold the policy as it was; the memory is wanted back
        for leaf in jax.tree.leaves(before):
            leaf.delete()
        self._keep(step, moved)
        self.last = step
        scorer = replace(timed, scorer=replace(timed.scorer, params=moved))
        return replace(policy, scorers={**policy.scorers, "reference": scorer})

    def _keep(self, step: int, params: Params) -> None:
        """Writes the reference, over the files of a start that went further."""
        folder = self.run_dir.kept_reference
        if self.run_dir.is_first:
            for later in Checkpoints(folder).steps():
                if later >= step:
                    shutil.rmtree(folder / str(later))
        allgather_values(None)
        checkpoints = Checkpoints(folder)
        checkpoints.save(TrainState(put(np.int32(step)), params, {}))
        checkpoints.close()
        description = f"the policy of step {step}"
        if self.mix < 1:
            description = f"a mean of the policies until step {step}"
        self.run_dir.write_json(self.run_dir.reference, {"reference": description, "kept": step})


def moving_reference(session: Session) -> MovingReference:
    """Builds the moving reference of a run. It does nothing without a reference, or if the
    reference stays."""
    every = session.run.algorithm.needs.reference_every
    if not every:
        return MovingReference(session.run_dir, 0, 1.0, lambda params: params, 0)
    resolved = session.parts.resolved
    return MovingReference(
        run_dir=session.run_dir,
        every=every,
        mix=session.run.algorithm.reference_mix,
        copied=partial(decoder.copy_to_score, cfg=resolved.cfg, dtype=resolved.reference_dtype),
        last=session.parts.reference.kept or 0,
    )
