"""A reward model as a reward: a network on the devices of the run, which reads the whole
conversation with a tokenizer and a chat template of its own, and gives it one number."""

from dataclasses import dataclass

# tokens of a conversation where the settings give no other limit
_LONGEST = 1024


@dataclass(frozen=True)
class RewardModel:
    """The number that a reward model gives a conversation, which the completion ends.
    Example: RewardModel("outputs/my_reward_model") for a folder that algorithm=reward_model and
    `tunix-lite export` have made; RewardModel("org/name", storage="int8") for one of the hub.

    It is no function: a run loads it beside its policy, frozen, and scores all completions of a
    step at once (tasks/reward_models.py)."""

    # Folder of a transformers AutoModelForSequenceClassification with one label, or a hub name.
    weights: str
    # Model family: llama, qwen3 or another of docs/guide/models. null reads it from config.json.
    family: str | None = None
    # Type in which its weights are stored: fp32, bf16, int8 or nf4.
    storage: str = "bf16"
    # Tokens of the longest conversation. A longer one loses its end, or its beginning where
    # tokenizer_config.json has truncation_side=left. null takes 1024, or what the model was made
    # for, if that is less.
    max_length: int | None = None
    # Conversations per fsdp shard in one forward pass.
    batch_size: int = 8
    # Devices along each axis of a mesh of its own, the first ones of the run: [[2,1],[fsdp,tp]].
    # null takes the mesh of the run.
    mesh_shape: tuple[tuple[int, ...], tuple[str, ...]] | None = None
    # true subtracts `mean` and divides by `std`, numbers that config.json must have then.
    normalize: bool = False

    def __post_init__(self):
        if self.longest(_LONGEST) < 2 or self.batch_size < 1:
            raise ValueError(
                f"max_length={self.max_length} must be at least 2, batch_size={self.batch_size} at "
                "least 1"
            )

    def longest(self, max_positions: int) -> int:
        """Returns the tokens of the longest conversation for a model of so many positions."""
        if self.max_length is not None:
            return self.max_length
        return min(_LONGEST, max_positions)
