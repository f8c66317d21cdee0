r"""Runs rl_loop or sl_loop of the tinker-cookbook, unchanged and without a network, against

    tunix-lite serve api=tinker served_name=Qwen/Qwen3.5-9B-Base
    python examples/tinker_loops.py FOLDER rl_loop base_url=http://127.0.0.1:8000 [key=value ...]

It needs the packages tinker and tinker-cookbook[math-rl], and not tunix_lite. The loops fetch data
and a tokenizer. This script gives them others, in the ways that the cookbook has for it: sums as
the data set, the bundled tokenizer, and a renderer that writes the chat format of the bundled
model. That model knows one turn, and its own words for an answer. So the renderer leaves out the
example before the question and the words about \boxed{}, and reads `The answer is 5.` as \boxed{5}.
"""

import json
import os
import random
import re
import sys
from pathlib import Path

# A name that the cookbook knows. The server has it as served_name.
MODEL = "Qwen/Qwen3.5-9B-Base"
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
ANSWER = re.compile(r"The answer is (-?\d+)\.")
NUM_SUMS = 4096


def sums(seed: int) -> list[tuple[str, str, str]]:
    """Questions, steps and answers: four numbers up to 29, as the bundled model has seen them."""
    draw = random.Random(seed)
    found = []
    for _ in range(NUM_SUMS):
        total = draw.randint(1, 29)
        question = f"What is {total}"
        steps = []
        for _ in range(3):
            sign, number = draw.choice("+-"), draw.randint(1, 29)
            after = total + number if sign == "+" else total - number
            steps.append(f"{total} {sign} {number} = {after}")
            question += f" {sign} {number}"
            total = after
        found.append((f"{question}?", "\n".join(steps), str(total)))
    return found


def write_data(folder: Path) -> None:
    """The two data sets of the loops, in their columns, under the names that they ask for."""
    rows = sums(0)
    chats = [
        [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"{steps}\nThe answer is {answer}."},
        ]
        for question, steps, answer in rows
    ]
    sets = {
        ("openai/gsm8k", "main"): [
            {"question": q, "answer": f"{steps}\n#### {a}"} for q, steps, a in rows
        ],
        ("HuggingFaceH4/no_robots", "default"): [{"messages": chat} for chat in chats],
    }
    for (name, config), entries in sets.items():
        home = folder / name
        home.mkdir(parents=True, exist_ok=True)
        (home / "train.jsonl").write_text(
            "".join(json.dumps(entry) + "\n" for entry in entries)
        )
        files = "data_files:\n  - split: train\n    path: train.jsonl"
        (home / "README.md").write_text(
            f"---\nconfigs:\n- config_name: {config}\n  {files}\n---\n"
        )


def register() -> None:
    """The bundled tokenizer and chat format, in the cookbook's registers."""
    import tinker
    from tinker_cookbook import renderers, tokenizer_utils
    from tinker_cookbook.renderers.base import (
        Message,
        ParseTermination,
        RenderedMessage,
        Renderer,
    )
    from transformers import PreTrainedTokenizerFast

    bundled = Path(__file__).resolve().parents[1] / "tunix_lite" / "models" / "bundled"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(bundled)

    class BundledRenderer(Renderer):
        """<bos><start_of_turn>user ... <end_of_turn> <start_of_turn>model ... <end_of_turn>."""

        @property
        def _bos_tokens(self) -> list[int]:
            return [tokenizer.bos_token_id]

        def get_stop_sequences(self) -> list[int]:
            return [tokenizer.convert_tokens_to_ids("<end_of_turn>")]

        def render_message(self, message, ctx) -> RenderedMessage:
            role = "model" if message["role"] == "assistant" else message["role"]
            content = message["content"].removesuffix(SUFFIX)
            header, output = (
                tinker.types.EncodedTextChunk(
                    tokens=tokenizer.encode(text, add_special_tokens=False)
                )
                for text in (f"<start_of_turn>{role}\n", f"{content}<end_of_turn>\n")
            )
            return RenderedMessage(header=header, output=[output])

        def build_generation_prompt(self, messages, *settings, **named):
            return super().build_generation_prompt(messages[-1:], *settings, **named)

        def parse_response(self, response) -> tuple[Message, ParseTermination]:
            text = tokenizer.decode(response, skip_special_tokens=True)
            ended = bool(response) and response[-1] in self.get_stop_sequences()
            message = Message(role="assistant", content=ANSWER.sub(r"\\boxed{\1}", text))
            return (
                message,
                ParseTermination.STOP_SEQUENCE if ended else ParseTermination.MALFORMED,
            )

    for name in (MODEL, f"{MODEL}:full"):
        tokenizer_utils.register_tokenizer(name, lambda: tokenizer)
    renderers.register_renderer(
        "role_colon", lambda tokenizer, image_processor: BundledRenderer(tokenizer)
    )


def main() -> None:
    folder, recipe, *settings = sys.argv[1:]
    os.environ.setdefault("TINKER_API_KEY", "tml-none")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HOME"] = str(Path(folder).absolute() / "cache")
    write_data(Path(folder))
    # The loops look for a data set in the working folder first.
    os.chdir(folder)
    register()
    import chz
    from tinker_cookbook.recipes import rl_loop, sl_loop

    loop = {"rl_loop": rl_loop, "sl_loop": sl_loop}[recipe]
    sys.argv[1:] = [f"log_path={Path(recipe).absolute()}", *settings]
    chz.nested_entrypoint(loop.main)


if __name__ == "__main__":
    main()
