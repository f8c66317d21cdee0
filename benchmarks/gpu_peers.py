"""What transformers and TRL take for work of the same size: a part of benchmarks/gpu.py, where they are installed.

A model of Gemma 3 1B's shape with random weights in bfloat16: completions of 64 prompts, an update of 8 sequences of
1,024 tokens with gradient checkpointing and AdamW, and a step of TRL's GRPOTrainer of 512 sequences of at most 512
tokens. Nothing is read from the network. It runs on the first GPU that torch sees, and in toy sizes on a CPU.
"""

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

from tunix_lite.models.architecture import Architecture


def peers(cfg: Architecture, tiny: bool, has: Callable[[float], bool]) -> Iterator[dict]:
    """Results of both, as lines. has(seconds): whether so much time is left."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        yield {"name": "transformers and TRL", "skipped": f"{' and '.join(missing)} not installed"}
        return
    import torch

    if not torch.cuda.is_available() and not tiny:
        yield {"name": "transformers and TRL", "skipped": f"torch {torch.__version__} sees no GPU"}
        return
    where = "cuda" if torch.cuda.is_available() else "cpu"
    yield {"name": "versions", "torch": torch.__version__, "transformers": version("transformers"), "on": where}
    yield from of_transformers(cfg, tiny, where, has)
    if importlib.util.find_spec("trl") is None:
        yield {"name": "TRL, a step", "skipped": "trl is not installed"}
    elif not has(5 if tiny else 40):
        yield {"name": "TRL, a step", "skipped": "no time was left"}
    else:
        yield trl_step(cfg, tiny, where)


def model_of(cfg: Architecture) -> Any:
    """Gemma 3 in transformers with the sizes of cfg and random weights."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.embed_dim,
        intermediate_size=cfg.mlp_dim,
        num_hidden_layers=cfg.num_layers,
        num_attention_heads=cfg.num_heads,
        num_key_value_heads=cfg.num_kv_heads,
        head_dim=cfg.head_dim,
        query_pre_attn_scalar=cfg.query_scale,
        sliding_window=cfg.window,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    return Gemma3ForCausalLM(config)


def of_transformers(cfg: Architecture, tiny: bool, where: str, has: Callable[[float], bool]) -> Iterator[dict]:
    """Decoding and an update of transformers."""
    import torch

    torch.manual_seed(0)
    model = model_of(cfg).to(where, torch.bfloat16)
    slots, prompt, new = (4, 16, 8) if tiny else (64, 512, 64)
    tokens = torch.randint(3, cfg.vocab_size, (slots, prompt), device=where)

    def generate(count: int) -> None:
        mask = torch.ones_like(tokens)
        model.generate(tokens, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=True)

    def seconds_of(call: Callable[[], object]) -> float:
        synchronise(where)
        began = time.perf_counter()
        call()
        synchronise(where)
        return time.perf_counter() - began

    # The difference of two lengths leaves the prompts out.
    generate(2)
    step = (seconds_of(lambda: generate(new)) - seconds_of(lambda: generate(new // 2))) / (new - new // 2)
    yield {
        "name": f"transformers, decode, {slots} slots",
        "ms a token": round(1e3 * step, 3),
        "tokens/s": round(slots / step),
    }

    if not has(5 if tiny else 20):
        yield {"name": "transformers, update", "skipped": "no time was left"}
        return
    rows, width = (2, 32) if tiny else (8, 1024)
    batch = torch.randint(3, cfg.vocab_size, (rows, width), device=where)
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def update() -> None:
        # Sequence by sequence: the logits of all eight at once would take 17 GB in float32.
        for row in batch.split(1):
            (model(input_ids=row, labels=row).loss / rows).backward()
        optimizer.step()
        optimizer.zero_grad()

    update()
    seconds = seconds_of(update)
    yield {
        "name": f"transformers, update of {rows} x {width} with checkpointing",
        "ms": round(1e3 * seconds, 1),
        "tokens/s": round(rows * width / seconds),
    }


def synchronise(where: str) -> None:
    """Waits for the GPU."""
    if where == "cuda":
        import torch

        torch.cuda.synchronize()


def trl_step(cfg: Architecture, tiny: bool, where: str) -> dict:
    """The second of two steps of GRPOTrainer; the first one warms up."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    prompts, generations, prompt, new = (2, 2, 8, 8) if tiny else (64, 8, 128, 384)
    words = {f"t{token}": token for token in range(3, cfg.vocab_size)} | {"<pad>": 0, "<end>": 1, "<start>": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    reader = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            synchronise(where)
            ends.append(time.perf_counter())

    def rewards(completions: list[str], **columns: Any) -> list[float]:
        return [len(set(text.split())) / new for text in completions]

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            use_cpu=where == "cpu",
            bf16=where == "cuda",
            gradient_checkpointing=True,
            per_device_train_batch_size=min(8, prompts * generations),
            gradient_accumulation_steps=prompts * generations // min(8, prompts * generations),
            num_generations=generations,
            max_completion_length=new,
            beta=0.0,
            max_steps=2,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        text = [" ".join(f"t{3 + (i * 7 + j) % (cfg.vocab_size - 3)}" for j in range(prompt)) for i in range(prompts)]
        trainer = GRPOTrainer(
            model=model_of(cfg),
            reward_funcs=rewards,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": text * 4}),
            processing_class=reader,
            callbacks=[Clock()],
        )
        trainer.train()
    return {
        "name": f"TRL {version('trl')}, a step of {prompts * generations} sequences of at most {prompt + new}",
        "seconds": round(ends[1] - ends[0], 2),
    }
