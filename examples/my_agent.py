"""An agent trained without changing it: sums, and a second attempt where the first is wrong.

    python examples/my_agent.py [key=value ...]

`agent` knows nothing of training. It asks any endpoint of the OpenAI API with the openai package,
and says how well it went.
"""

import sys

from openai import OpenAI

from tunix_lite.api import correct, train_agent


def agent(client: OpenAI, example: dict) -> float:
    """1 for a right answer, 0.5 for one at the second attempt, else 0."""
    messages = [{"role": "user", "content": f"What is {example['question']}?"}]
    for reward in (1.0, 0.5):
        answer = client.chat.completions.create(
            model="tutor", messages=messages, temperature=0
        )
        text = answer.choices[0].message.content
        if correct(text, example):
            return reward
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": "That is not right. Try again."})
    return 0.0


if __name__ == "__main__":
    settings = ["task=arithmetic", "generation.max_prompt_length=128", "training.max_steps=40"]
    train_agent(agent, *settings, *sys.argv[1:], folder="outputs/my_agent")
