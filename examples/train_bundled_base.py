"""Makes the bundled base model: a tokenizer, then supervised fine-tuning from random weights.

    python examples/train_bundled_base.py FOLDER [key=value ...]

The model learns from demonstrations of which most give the answer at once and some show every step.
It ends up answering at once, and often wrong; reinforcement learning can then find out that showing
the steps pays. Writes a folder in Hugging Face layout. What it took, and what came out, is in
docs/log.md.
"""

import json
import shutil
import sys
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tunix_lite.distributed.host_memory import keep_freed_memory
from tunix_lite.models import hf
from tunix_lite.models.families import GEMMA3, config_json
from tunix_lite.settings.compose import compose
from tunix_lite.tasks.sources import Arithmetic
from tunix_lite.train import train

RECIPE = [
    "algorithm=sft",
    "model=random",
    "task.source.min_terms=3",
    "task.source.max_terms=4",
    "task.source.max_value=29",
    "task.source.worked=0.45",
    "generation.max_prompt_length=32",
    "generation.max_new_tokens=48",
    "project_name=bundled_base",
    "training.prompts_per_step=64",
    "training.max_steps=1800",
    "training.log_interval_steps=100",
    "training.save_interval_steps=0",
    "optimizer.learning_rate=2e-3",
    "optimizer.schedule=cosine",
    "optimizer.warmup_steps=50",
    "optimizer.weight_decay=0.01",
    "evaluation.interval_steps=300",
]
# The ids of the two turn tokens are Gemma 3's own.
SPECIAL = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    *(f"<unused{i}>" for i in range(101)),
    "<start_of_turn>",
    "<end_of_turn>",
]
CHAT_TEMPLATE = """{{ bos_token }}{% for message in messages %}\
{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}\
{{ message['content'] | trim }}{{ '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""


def make_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE, so that any text can be said; digits stay apart, words of the task become
    single tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    problems = Arithmetic(min_terms=3, max_terms=4, max_value=29, worked=0.5).train
    corpus = [
        f"user\nWhat is {problems[i]['question']}?\nmodel\n{problems[i]['completion']}"
        for i in range(1000)
    ]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A",
        pair="<bos> $A <bos> $B",
        special_tokens=[("<bos>", SPECIAL.index("<bos>"))],
    )
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    special = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", **special},
    )
    ids = {
        "bos_token_id": 2,
        "eos_token_id": [1, SPECIAL.index("<end_of_turn>")],
        "pad_token_id": 0,
    }
    _write(folder / "generation_config.json", ids)


def main() -> None:
    keep_freed_memory()
    folder = Path(sys.argv[1])
    write_tokenizer(folder)
    run = compose([*RECIPE, f"model.tokenizer={folder}", *sys.argv[2:]])
    outputs = Path("outputs/bundled_base")
    shutil.rmtree(outputs, ignore_errors=True)
    state = train(run, outputs)
    hf.save_params(state.params, run.model.architecture, GEMMA3, folder, "BF16")
    ids = {
        "bos_token_id": 2,
        "eos_token_id": [1, SPECIAL.index("<end_of_turn>")],
        "pad_token_id": 0,
    }
    _write(
        folder / "config.json",
        config_json(run.model.architecture, GEMMA3, dtype="bfloat16", **ids),
    )


def _write(file: Path, values: dict) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    main()
