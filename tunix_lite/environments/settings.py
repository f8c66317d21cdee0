"""Settings of conversations: their limits, their credit, and what becomes of one that fails."""

from dataclasses import dataclass

from tunix_lite.workers.pool import check_workers

_ON_LIMIT = ("keep", "penalise", "mask")
_CREDIT = ("end", "turn", "discount")


@dataclass(frozen=True)
class ConversationConfig:
    """The settings of conversations. They have no effect without task.environment.
    Example: ConversationConfig(max_turns=3) ends a conversation after three completions."""

    # Completions of the model in one conversation, at most.
    max_turns: int = 8
    # Tokens of one completion in a conversation, at most. null has only generation.max_new_tokens,
    # which bounds the whole conversation after its prompt.
    max_turn_tokens: int | None = None
    # A conversation that reaches a limit before its end: keep learns from its rewards, penalise
    # gives it limit_reward instead, mask learns nothing from it.
    on_limit: str = "keep"
    # Reward of a conversation that reached a limit, with on_limit=penalise.
    limit_reward: float = 0.0
    # Which turns a reward counts for: end (the sum of all, for every turn), turn (what followed the
    # turn), or discount (as turn, times `discount` for each turn between).
    credit: str = "end"
    # Factor for each turn between a completion and a reward, from 0 to 1, with credit=discount.
    discount: float = 1.0
    # When an environment fails: raise stops the run, zero counts the conversation as 0, drop learns
    # nothing from it.
    on_error: str = "raise"
    # Seconds that one call of an environment may take. A longer call has failed.
    timeout: float = 10.0
    # Processes that run environments. 0 uses the training process, without a timeout, for
    # debugging.
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
