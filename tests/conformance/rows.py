"""What a row of the table is, and how it names settings of ours."""

from dataclasses import dataclass
from typing import Any

from conformance.formulas import Loss

# the state of each framework's code that was read
READ = {
    "paper": "the formula of the paper that is named",
    "trl": "TRL f2cd5771 (2026-07)",
    "verl": "verl 1dda039b (2026-08)",
    "nemo_rl": "NeMo-RL 7ea279ab (2026-08)",
    "prime_rl": "prime-rl 559b4477 (2026-08)",
    "skyrl": "SkyRL a956457e (2026-08)",
    "openrlhf": "OpenRLHF 3c3be623 (2026-08)",
    "areal": "AReaL 4aef98d8 (2026-05)",
    "slime": "slime 624b824a (2026-08)",
    "tunix": "google-tunix 0.1.7, and c7d8950f (2026-08)",
    "tinker": "tinker-cookbook, and SkyRL's server for its clients (2026-08)",
}
GRPO = "tunix_lite.algorithms.grpo.GRPO"
ADVANTAGES = "tunix_lite.algorithms.advantages."
RATIOS = "tunix_lite.algorithms.ratios."
SURROGATES = "tunix_lite.algorithms.surrogates."
WEIGHTING = "tunix_lite.algorithms.weighting."
CORRECTIONS = "tunix_lite.algorithms.corrections."
# stands for the fixture's own constant
LONGEST = "max_length"


@dataclass(frozen=True)
class Variant:
    """An objective as one framework defines it.

    Example: VARIANTS["cispo@trl"].formula is "- sg[min(rho, eps_high)] A lp; ...".
    """

    objective: str
    by: str  # a name of READ
    formula: str
    # in numpy; None: it is compared with nothing, as no settings of ours give it
    loss: Loss | None
    # settings of ours that give the same numbers, as YAML has them; None: there are none
    ours: dict[str, Any] | None = None
    why: str = ""  # where it departs from the paper, or why we do not offer it
    binary: bool = False  # only for rewards of 0 and 1
    # which log-probabilities the sampler gave, as far as our algorithm is concerned
    sampled: str = "old"
    # the value of the loss has no meaning here, and only its gradient is compared
    gradient_only: bool = False

    @property
    def name(self) -> str:
        return f"{self.objective}@{self.by}"


def grpo(**settings: Any) -> dict[str, Any]:
    """Settings of our GRPO, from the plainest: token mean, centred advantages, nothing clipped."""
    plain = {"_target_": GRPO, "advantages": advantage("centre"), "weighting": weighting("per_token")}
    return plain | settings


def advantage(name: str, **settings: Any) -> dict[str, Any]:
    return {"_target_": ADVANTAGES + name} | settings


def surrogate(name: str, **settings: Any) -> dict[str, Any]:
    return {"_target_": SURROGATES + name} | settings


def ratio(name: str) -> dict[str, Any]:
    return {"_target_": RATIOS + name}


def weighting(name: str, **settings: Any) -> dict[str, Any]:
    return {"_target_": WEIGHTING + name} | settings


def correction(name: str, **settings: Any) -> dict[str, Any]:
    return {"_target_": CORRECTIONS + name} | settings
