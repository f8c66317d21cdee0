"""`${auto:NAME}` in conf/: defaults that follow other settings.

Hydra fills them in when it composes the settings, so that other settings can refer to the number.
What depends on the model's files or on the devices is chosen later, by resolved/run.py.
"""

from collections.abc import Mapping
from typing import Any

# Enough for the sums of the bundled model, chat template included.
OF_BUNDLED = {"max_prompt_length": 32, "max_new_tokens": 48}
# For data of the user's and a model by its name, such as model=qwen3_0.6b.
OF_NAMED = {"max_prompt_length": 512, "max_new_tokens": 512}
# Of chats, and where `tunix-lite generate` makes several completions of a prompt, which are to
# differ.
TEMPERATURE = 0.7


def auto(name: str, *, _root_: Mapping[str, Any]) -> int | float:
    """The value of the setting `name`. _root_: all settings, as OmegaConf gives them.

    Example: with task=gsm8k, `auto("max_new_tokens")` is 512.
    """
    if name == "temperature":
        return 0.0 if _root_.get("num_generations") == 1 else TEMPERATURE
    lengths = _root_["task"].get("lengths")
    if lengths is not None:
        return lengths[name]
    model = _root_["model"]
    architecture = model.get("architecture")
    if architecture is None or model["weights"] == "random":
        return OF_BUNDLED[name]
    # both together must fit
    return min(OF_NAMED[name], architecture["max_positions"] // 2)
