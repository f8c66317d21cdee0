"""Models that only score. Reward models: conversations -> their tokens -> batches -> numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tunix_lite.basics.types import Batch, left_padded
from tunix_lite.models.architecture import Architecture
from tunix_lite.models.gguf_metadata import small_object
from tunix_lite.models.source import FoundModel, TeacherConfig
from tunix_lite.models.tokenizer import read_until
from tunix_lite.rewards.model import RewardModel
from tunix_lite.rewards.scores import Score
from tunix_lite.tasks.messages import Message
from tunix_lite.tasks.prompt_text import PromptText
from tunix_lite.workers.process import Outcome

# the narrowest rows of a batch; others are twice as wide, and so on, so that few are compiled
NARROWEST = 32


@dataclass(frozen=True)
class ScoringModel:
    """A model of a run that only scores: a teacher of the algorithm, or a reward model.
    Example: run.scoring_models["reward_rm"].reward is task.rewards.rm."""

    where: str  # the setting that names it
    settings: TeacherConfig
    longest: int  # tokens of what a teacher reads
    reward: RewardModel | None = None  # None: it is a teacher

    def architecture(self, cfg: Architecture) -> Architecture:
        """Its architecture, given that of its folder. ValueError: it is made for shorter texts."""
        most = cfg.max_positions
        made = f"weights={self.settings.weights} was made for {most} tokens, and"
        if self.reward is None:
            if self.longest > most:
                of = "max_prompt_length + generation.max_new_tokens"
                raise ValueError(f"{made} {of} is {self.longest}")
            return cfg
        if (longest := self.reward.longest(most)) > most:
            raise ValueError(f"{made} max_length is {longest}; write max_length: {most}")
        # whether the folder holds a reward model is seen when its weights are there
        if cfg.output == "logits":
            return replace(cfg, output="score")
        return cfg


@dataclass(frozen=True)
class RewardScorer:
    """A loaded reward model. All processes of a run call it with the same completions.
    Example: `scorer([example], ["12"])` -> [Outcome("", 0.7)]."""

    # of the task, with the tokenizer and the template of the reward model
    text: PromptText
    # a batch -> the number of each token that counts, [B, T] float32 (algorithms.algorithm.Scorer)
    scorer: Callable[[Batch], np.ndarray]
    num_rows: int  # conversations of one call of it
    longest: int  # tokens of a conversation
    # token after which nothing is read, at the end of a conversation; None: all is read
    pad_id: int | None
    # subtracted from a number, which is then divided by the other
    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def of(
        cls,
        settings: RewardModel,
        text: PromptText,
        model: FoundModel,
        scorer: Callable[[Batch], np.ndarray],
        num_rows: int,
    ) -> "RewardScorer":
        """The scorer of a reward model. text: of the task. ValueError: config.json has no mean."""
        config = small_object(model.folder, "config.json")
        # of a larger model, its text part
        config = config.get("text_config") or config
        numbers = []
        if settings.normalize:
            numbers = [config.get("mean"), config.get("std")]
        are_numbers = all(isinstance(x, int | float) for x in numbers)
        if not are_numbers or not all(std > 0 for std in numbers[1:]):
            raise ValueError(
                f"normalize=true: config.json has mean={numbers[0]} and std={numbers[1]}; they "
                "must be numbers, std above 0; leave normalize out"
            )
        text = replace(text, tokenizer=model.tokenizer)
        longest = settings.longest(model.cfg.max_positions)
        return cls(text, scorer, num_rows, longest, config.get("pad_token_id"), *numbers)

    def row(self, example: dict, completion: str) -> tuple[list[int], int]:
        """The tokens of a conversation, up to the one at which transformers reads the number, and
        how many it had before it was cut. Raises ValueError for a conversation that the tokenizer
        or the template cannot write."""
        ids = self.text.conversation(example, [Message("assistant", completion)])
        cuts_left = self.text.tokenizer.cuts_left
        part = ids[-self.longest :] if cuts_left else ids[: self.longest]
        return read_until(part, self.pad_id), len(ids)

    def __call__(self, examples: Sequence[dict], completions: Sequence[str]) -> list[Outcome]:
        """The number of each conversation, or why there is none."""
        outcomes = [Outcome("error", "")] * len(completions)
        rows = []
        for i, (example, completion) in enumerate(zip(examples, completions, strict=True)):
            try:
                rows.append((*self.row(example, completion), i))
            except ValueError as error:
                outcomes[i] = Outcome("error", f"failed with ValueError: {error}")

        # Conversations of about one length stand in one batch.
        rows.sort(key=lambda one: len(one[0]))
        for begin in range(0, len(rows), self.num_rows):
            part = rows[begin : begin + self.num_rows]
            width = NARROWEST
            while width < len(part[-1][0]):
                width *= 2
            tokens, mask = left_padded([ids for ids, *_ in part], min(width, self.longest))
            last = np.zeros(tokens.shape, np.float32)
            last[:, -1] = 1
            scores = self.scorer(Batch(tokens=tokens, token_mask=mask, loss_weight=last))
            scores = (scores[:, -1] - self.mean) / self.std
            for (_, length, i), score in zip(part, scores.tolist()):
                outcomes[i] = Outcome("", score)
                if not np.isfinite(score):
                    outcomes[i] = Outcome("not_number", f"is {score}")
                elif length > self.longest:
                    why = f"{length} tokens, more than max_length={self.longest}"
                    outcomes[i] = Outcome("", Score(score, "cut", why))
        return outcomes
