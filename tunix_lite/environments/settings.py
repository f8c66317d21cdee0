"""Settings of conversations: their limits, their credit, and what becomes of one that fails."""

from dataclasses import dataclass

from tunix_lite.workers.pool import check_workers

_ON_LIMIT = ("keep", "penalise", "mask")
_CREDIT = ("end", "turn", "discount")


@dataclass(frozen=True)
class ConversationConfig:
    """The settings of conversations. They have no effect without task.environment.
    Example: ConversationConfig(max_turns=3) ends a conversation after three completions."""

    # conf/conversation/default.yaml explains each setting
    max_turns: int = 8
    max_turn_tokens: int | None = None
    on_limit: str = "keep"
    limit_reward: float = 0.0
    credit: str = "end"
    discount: float = 1.0
    on_error: str = "raise"
    timeout: float = 10.0
    workers: int = 1

    def __post_init__(self):
        if self.max_turns < 1:
            raise ValueError(f"max_turns={self.max_turns} must be at least 1")
        if self.max_turn_tokens is not None and self.max_turn_tokens < 1:
            raise ValueError(
                f"max_turn_tokens={self.max_turn_tokens} must be at least 1, or null"
            )
        if self.on_limit not in _ON_LIMIT:
            raise ValueError(f"on_limit={self.on_limit!r}; it is keep, penalise or mask")
        if self.credit not in _CREDIT:
            raise ValueError(f"credit={self.credit!r}; it is end, turn or discount")
        if not 0 <= self.discount <= 1:
            raise ValueError(f"discount={self.discount} must be from 0 to 1")
        if self.discount != 1 and self.credit != "discount":
            raise ValueError(
                f"discount={self.discount} counts with credit=discount alone; this is "
                f"credit={self.credit}"
            )
        if self.limit_reward != 0 and self.on_limit != "penalise":
            raise ValueError(
                f"limit_reward={self.limit_reward} counts with on_limit=penalise alone; this is "
                f"on_limit={self.on_limit}"
            )
        check_workers(self.on_error, self.timeout, self.workers)

    @property
    def turn_discount(self) -> float | None:
        """Factor of a reward for each turn between it and the turn that gets it; None: every turn
        has the whole."""
        if self.credit == "end":
            return None
        return self.discount if self.credit == "discount" else 0.0
