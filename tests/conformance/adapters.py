"""Other frameworks' own functions on the fixtures, where they are installed.

An adapter is (fixture) -> (value, gradient [B, T]) of a variant. What it needs is imported when it
runs; advantages are given to it where the framework computes them inside of a trainer.
"""

import importlib.util
import json
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from conformance import formulas as f
from conformance.fixtures import FIXTURES, Fixture

# framework -> the module that is imported, the distribution, and how it is installed
INSTALL = {
    "trl": ("trl", "trl", "pip install trl"),
    "tunix": ("tunix", "google-tunix", "pip install google-tunix==0.1.7"),
}
# what they gave when somebody ran them: {"trl": {"version": ..., "cells": {"grpo@trl": ""}}}
RECORDED = Path(__file__).with_name("recorded.json")
# float32 of another framework
TOLERANCE = 1e-3
SMALL = 1e-5

Numbers = tuple[float, np.ndarray]


def is_installed(framework: str) -> bool:
    return importlib.util.find_spec(INSTALL[framework][0]) is not None


def run_own_functions(framework: str) -> dict[str, Any]:
    """The version, and of each cell "" or on which fixtures its own function departs from the
    formula. The framework must be installed."""
    from conformance.variants import VARIANTS

    # every fixture that the formula is for
    cells = {}
    for name, own in ADAPTERS.items():
        variant = VARIANTS[name]
        if variant.by != framework:
            continue
        away = []
        for fixture in FIXTURES.values():
            if variant.binary and not fixture.is_binary:
                continue
            expected = f.value_and_gradient(variant.loss, fixture)
            if not _equal(own(fixture), expected):
                away.append(fixture.name)
        cells[name] = ", ".join(away)
    return {"version": version(INSTALL[framework][1]), "cells": cells}


def recorded() -> dict[str, Any]:
    """What RECORDED holds; nothing if it is not there."""
    return json.loads(RECORDED.read_text()) if RECORDED.is_file() else {}


def _equal(found: Numbers, expected: Numbers) -> bool:
    scale = SMALL + TOLERANCE * (abs(expected[0]) + np.abs(expected[1]).sum())
    is_close = np.allclose(found[1], expected[1], rtol=TOLERANCE, atol=SMALL)
    return bool(is_close and abs(found[0] - expected[0]) <= scale)


# ---- TRL: GRPOTrainer._compute_loss of a trainer that is only its settings


def _trl(advantages: Callable, **settings: Any) -> Callable[[Fixture], Numbers]:
    """The loss of TRL's GRPO with these settings; corrections as ours of the same formula."""
    factor = settings.pop("factor", None)

    def numbers(fixture: Fixture) -> Numbers:
        import torch
        from trl import GRPOConfig, GRPOTrainer

        def tensor(x: np.ndarray) -> Any:
            return torch.tensor(np.asarray(x), dtype=torch.float64)

        # float64 throughout, so that a difference is one of the formula
        logprobs = tensor(fixture.array("logprobs")).requires_grad_()
        mask = fixture.counted
        # of dropped completions TRL knows nothing: they are not in its batch
        kept = ~np.isnan(fixture.rewards).reshape(-1)
        rows = torch.tensor(np.flatnonzero(kept))
        # what _generate_and_score_completions hands to the loss
        A = np.reshape(advantages(fixture), (-1, 1))
        inputs = {
            "prompt_ids": torch.zeros((len(rows), 1), dtype=torch.long),
            "prompt_mask": torch.ones((len(rows), 1), dtype=torch.long),
            "completion_ids": torch.zeros((len(rows), mask.shape[1]), dtype=torch.long),
            "completion_mask": tensor(mask)[rows],
            "advantages": tensor(A[:, 0])[rows],
            "old_per_token_logps": tensor(fixture.array("old_logprobs"))[rows],
            "sampling_per_token_logps": tensor(fixture.array("sampler_logprobs"))[rows],
            "ref_per_token_logps": tensor(fixture.array("ref_logprobs"))[rows],
            "num_items_in_batch": tensor(mask.sum()),
        }
        # with vLLM the weights come with the batch
        if factor is not None:
            terms = f._terms(fixture, fixture.array("logprobs"), A)
            weight = np.broadcast_to(factor(terms), mask.shape)
            inputs["importance_sampling_ratio"] = tensor(weight)[rows]
        trainer = _trl_trainer(GRPOConfig, GRPOTrainer, fixture, settings, logprobs[rows], factor)
        loss = GRPOTrainer._compute_loss(trainer, None, inputs)
        loss.backward()
        return float(loss.detach()), logprobs.grad.numpy()

    return numbers


def _trl_trainer(Config: type, Trainer: type, fixture: Fixture, settings: dict, logprobs: Any, factor: Any) -> Any:
    """All that _compute_loss asks of `self`."""
    import torch

    given = {name: field.default for name, field in Config.__dataclass_fields__.items()} | settings
    # as __init__ of the trainer reads its settings
    low = given["epsilon"]
    high = given["epsilon_high"]
    own = SimpleNamespace(
        args=SimpleNamespace(**given | {"steps_per_generation": 1}),
        loss_type=given["loss_type"],
        importance_sampling_level=given["importance_sampling_level"],
        beta=given["beta"],
        epsilon_low=low,
        epsilon_high=low if high is None else high,
        off_policy_mask_threshold=given["off_policy_mask_threshold"],
        top_entropy_quantile=1.0,
        use_vllm=factor is not None,
        vllm_importance_sampling_correction=factor is not None,
        max_completion_length=fixture.max_length,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, sync_gradients=True),
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=Trainer.get_off_policy_mask,
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            logprobs,
            torch.zeros_like(logprobs).detach(),
            None,
        ),
    )
    return own


# ---- google-tunix: algo_core.grpo_loss_fn, with the log-probabilities put in


def _tunix(estimator: str, **settings: Any) -> Callable[[Fixture], Numbers]:
    """The loss of Tunix; advantages by its own estimator, of groups without dropped completions."""

    def numbers(fixture: Fixture) -> Numbers:
        import jax
        import jax.numpy as jnp
        from flax import nnx
        from tunix.rl import algo_core, common

        kept = ~np.isnan(fixture.rewards).reshape(-1)
        advantages = _tunix_advantages(getattr(algo_core, estimator), fixture)
        # settings of GRPOConfig, without its KL unless a row asks for it
        given = {
            "beta": 0.0,
            "epsilon": 0.2,
            "loss_algo": "grpo",
            "loss_agg_mode": "sequence-mean-token-mean",
            "kl_loss_mode": "kl",
            "kl_clamp_value": None,
            "temperature": 1.0,
        } | settings
        arrays = {name: jnp.asarray(fixture.array(f"{name}_logprobs")[kept]) for name in ("old", "ref")}
        mask = jnp.asarray(fixture.counted[kept])
        example = SimpleNamespace(
            prompt_ids=None,
            completion_ids=None,
            completion_mask=mask,
            advantages=jnp.asarray(advantages[kept]),
            old_per_token_logps=arrays["old"],
            ref_per_token_logps=arrays["ref"] if given["beta"] else None,
        )

        # the log-probabilities are put in where a model would give them
        def loss(here: Any) -> Any:
            before = common.compute_per_token_logps
            common.compute_per_token_logps = lambda *_, **__: (here, jnp.zeros((*here.shape, 2)))
            try:
                found = algo_core.grpo_loss_fn(nnx.Dict(), example, SimpleNamespace(**given), 0, 1)
            finally:
                common.compute_per_token_logps = before
            return found[0]

        # dropped completions have no gradient
        here = jnp.asarray(fixture.array("logprobs")[kept])
        value, slope = jax.value_and_grad(loss)(here)
        gradient = np.zeros(fixture.mask.shape)
        gradient[kept] = np.asarray(slope)
        return float(value), gradient

    return numbers


def _tunix_advantages(estimator: Callable, fixture: Fixture) -> np.ndarray:
    """[B]; dropped completions are not in a group, and a group may be smaller for that."""
    found = np.zeros(fixture.rewards.shape)
    for row, rewards in zip(found, fixture.rewards):
        kept = ~np.isnan(rewards)
        if kept.sum() >= 2:
            row[kept] = np.asarray(estimator(rewards[kept], int(kept.sum())))
    return found.reshape(-1)


_STD = f.group_std(1e-4)
ADAPTERS: dict[str, Callable[[Fixture], Numbers]] = {
    "grpo@trl": _trl(_STD, loss_type="grpo"),
    "grpo_default@trl": _trl(_STD),
    "dr_grpo@trl": _trl(f.less_group_mean, loss_type="dr_grpo"),
    "dapo@trl": _trl(_STD, loss_type="dapo", epsilon_high=0.28),
    "two_sided_clip@trl": _trl(_STD, loss_type="dapo", delta=4.0),
    "gspo@trl": _trl(
        _STD,
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
    ),
    "gspo_token_mean@trl": _trl(
        _STD,
        loss_type="dapo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
    ),
    "luspo@trl": _trl(
        _STD,
        loss_type="luspo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
    ),
    "cispo@trl": _trl(_STD, loss_type="cispo", epsilon_high=5.0),
    "cispo_default@trl": _trl(_STD, loss_type="cispo"),
    "sapo@trl": _trl(_STD, loss_type="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05),
    "batch_scaled@trl": _trl(f.batch_std(1e-4), loss_type="dapo"),
    "maxrl@trl": _trl(f.over_mean(1e-4), loss_type="dapo", epsilon=1e30),
    "gdpo@trl": _trl(f.each_reward(1e-4, 1e-4), loss_type="dapo"),
    "kl_k3@trl": _trl(f.less_group_mean, loss_type="dapo", beta=0.1, use_bias_correction_kl=False),
    "kl_k3_ratio@trl": _trl(f.less_group_mean, loss_type="dapo", beta=0.1, use_bias_correction_kl=True),
    "tis_token@trl": _trl(f.less_group_mean, loss_type="dapo", factor=f.truncate(3.0)),
    "icepop@trl": _trl(f.less_group_mean, loss_type="dapo", factor=f.mask_outside(0.0, 3.0)),
    "sequence_mask@trl": _trl(f.less_group_mean, loss_type="dapo", factor=f.mask_outside(0.0, 3.0, "sequence")),
    "off_policy_mask@trl": _trl(f.less_group_mean, loss_type="dapo", off_policy_mask_threshold=0.5),
    "grpo@tunix": _tunix("compute_advantages", beta=0.04),
    "dapo@tunix": _tunix("compute_advantages", epsilon_high=0.28, loss_agg_mode="token-mean"),
    "dr_grpo@tunix": _tunix("compute_drgrpo_advantages", loss_agg_mode="sequence-mean-token-scale"),
    "rloo@tunix": _tunix("compute_rloo_advantages"),
    "gspo@tunix": _tunix("compute_advantages", loss_algo="gspo-token", epsilon=3e-4, epsilon_high=4e-4),
    "kl_k1@tunix": _tunix("compute_drgrpo_advantages", beta=0.1, kl_loss_mode="kl", loss_agg_mode="token-mean"),
    "kl_k2@tunix": _tunix("compute_drgrpo_advantages", beta=0.1, kl_loss_mode="mse_kl", loss_agg_mode="token-mean"),
    "kl_k3@tunix": _tunix("compute_drgrpo_advantages", beta=0.1, kl_loss_mode="low_var_kl", loss_agg_mode="token-mean"),
}
