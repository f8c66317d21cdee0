"""transformers' and TRL's side of the races on real weights: `python torch_peers.py`, started by race.py in the
interpreter that --peer-python names."""

import sys
import time
from pathlib import Path

BEGAN = time.perf_counter()

from importlib.metadata import version

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

from turns import Turns, share_of_e


def ready(turns: Turns, began: float, prompt_tokens: int | None, *packages: str) -> None:
    turns.ready(
        import_seconds=began - BEGAN,
        setup_seconds=time.perf_counter() - began,
        versions={name: version(name) for name in ("torch", "transformers", *packages)},
        prompt_tokens=prompt_tokens,
    )


def left_padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask [B, T]."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def sample(turns: Turns, began: float) -> None:
    """`generate` with its cache, all requests at once."""
    work = turns.work
    model = load_model(work)
    inputs = left_padded(work["ids"])
    ends = model.generation_config.eos_token_id
    ends = torch.tensor(ends if isinstance(ends, list) else [ends])
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "use_cache": True}
    settings |= {"max_new_tokens": work["new_tokens"], "pad_token_id": 0}
    ready(turns, began, sum(map(len, work["ids"])))
    while turns.wait():
        with torch.inference_mode():
            new = model.generate(**inputs, **settings)[:, inputs["input_ids"].shape[1] :]
        # all tokens until the first end, which counts
        before_end = (torch.isin(new, ends).cumsum(dim=1) - torch.isin(new, ends).int()) == 0
        turns.lengths = before_end.sum(dim=1).tolist()
        turns.done()


def score(turns: Turns, began: float) -> None:
    """A forward pass that makes logits of the scored tokens alone, `peer_batch` rows at a time, short rows first, so
    that little is padded."""
    work = turns.work
    model = load_model(work)
    new = work["new_tokens"]
    rows = sorted((a + b for a, b in zip(work["ids"], work["completions"], strict=True)), key=len)
    ready(turns, began, sum(map(len, work["ids"])))
    while turns.wait():
        scores = []
        for start in range(0, len(rows), work["peer_batch"]):
            inputs = left_padded(rows[start : start + work["peer_batch"]])
            with torch.inference_mode():
                logits = model(**inputs, logits_to_keep=new + 1, use_cache=False).logits[:, :-1]
                chosen = logits.gather(2, inputs["input_ids"][:, -new:, None])[..., 0]
                scores.append(chosen - logits.logsumexp(dim=-1))
        turns.lengths = list(map(len, rows))
        turns.done(mean_logprob=float(torch.cat(scores).mean()))


def load_model(work: dict) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        work["model"], dtype=getattr(torch, work["peer_dtype"]), attn_implementation="sdpa"
    )


def as_prompt(work: dict, example: dict, tokenizer: AutoTokenizer) -> str | list[dict]:
    """The user's message: a conversation where the model has a chat template, else text."""
    text = work["template"].format(**example)
    return [{"role": "user", "content": text}] if tokenizer.chat_template else text


def common_settings(work: dict) -> dict:
    """Of both trainers: no checkpointing of gradients, nothing written, AdamW at a constant rate as ours."""
    return {
        "output_dir": work["folder"],
        "use_cpu": True,
        "bf16": work["peer_dtype"] == "bfloat16",
        "gradient_checkpointing": False,
        "learning_rate": work["learning_rate"],
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.99,
        "max_grad_norm": 1.0,
        "max_steps": 1000,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }


def learn_from_samples(turns: Turns, began: float) -> None:
    """GRPOTrainer, `peer_batch` completions at a time. Its `generate` is timed as the rollout."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer
    from trl_worker import LAYERS, TakeTurns

    work = turns.work
    rank = work["lora_rank"]
    lora = LoraConfig(r=rank, lora_alpha=32, target_modules=LAYERS, task_type="CAUSAL_LM") if rank else None
    model = load_model(work)
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    generate = model.generate

    def timed(*args: object, **settings: object) -> torch.Tensor:
        with turns.phase("rollout"):
            return generate(*args, **settings)

    def rewards(completions: list, completion_ids: list[list[int]], **columns: object) -> list[float]:
        turns.lengths = list(map(len, completion_ids))
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        return [share_of_e(text, {}) for text in texts]

    model.generate = timed
    prompts = [as_prompt(work, example, tokenizer) for example in work["examples"]]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=GRPOConfig(
            **common_settings(work),
            per_device_train_batch_size=work["peer_batch"],
            gradient_accumulation_steps=work["prompts"] * work["generations"] // work["peer_batch"],
            num_generations=work["generations"],
            max_completion_length=work["new_tokens"],
            temperature=1.0,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            shuffle_dataset=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts * 1000}),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[TakeTurns(turns)],
    )
    lengths = [len(ids) for ids in trainer._tokenize_prompts(prompts)[0]]
    ready(turns, began, sum(lengths), "trl", "peft")
    trainer.train()


def learn_from_demonstrations(turns: Turns, began: float) -> None:
    """SFTTrainer with packed rows of `peer_width` tokens, or, where that is 0, with padded ones."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    from trl_worker import TakeTurns

    class CountingTrainer(SFTTrainer):
        """The trainer, which counts the real tokens of a step."""

        def training_step(self, model: torch.nn.Module, inputs: dict, *args: object) -> torch.Tensor:
            mask = inputs.get("attention_mask")
            turns.lengths.append(int(inputs["input_ids"].numel() if mask is None else mask.sum()))
            return super().training_step(model, inputs, *args)

    work = turns.work
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    rows = [{"text": text} for text in work.get("texts", ())]
    for example in () if rows else work["examples"]:
        prompt = as_prompt(work, example, tokenizer)
        text = example["completion"]
        completion = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        rows.append({"prompt": prompt, "completion": completion})
    width = work["peer_width"]
    trainer = CountingTrainer(
        model=load_model(work),
        args=SFTConfig(
            **common_settings(work),
            packing=width > 0,
            packing_strategy="wrapped" if work["race"] == "text" else "bfd",
            max_length=width or work["prompt_length"] + work["new_tokens"],
            per_device_train_batch_size=work["peer_batch"],
            gradient_accumulation_steps=work["peer_passes"],
        ),
        train_dataset=Dataset.from_list(rows * 16),
        processing_class=tokenizer,
        callbacks=[TakeTurns(turns)],
    )
    ready(turns, began, None, "trl")
    trainer.train()


def main() -> None:
    turns = Turns()
    torch.set_num_threads(turns.work["training"]["threads"])
    torch.manual_seed(0)
    logging.set_verbosity_error()
    races = {"sampling": sample, "scoring": score, "grpo": learn_from_samples, "sft": learn_from_demonstrations}
    races["text"] = learn_from_demonstrations
    races[turns.work["race"]](turns, time.perf_counter())


if __name__ == "__main__":
    main()
