"""TRL's GRPOTrainer, a step a turn. Runs in the venv of TRL: `python trl_worker.py`, started by run.py."""

import time

BEGAN = time.perf_counter()

import tempfile
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

IMPORTED = time.perf_counter()

from turns import Turns, reward_of_text, words

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class EndAt(LogitsProcessor):
    """Forces the end-of-sequence token where a row has its length, and forbids it before."""

    def __init__(self, lengths: list[int], prompt_length: int, eos_id: int):
        self.lengths = torch.tensor(lengths)
        self.prompt_length = prompt_length
        self.eos_id = eos_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_last = input_ids.shape[1] - self.prompt_length + 1 >= self.lengths
        scores[:, self.eos_id] = torch.where(is_last, 1e9, -1e9)
        return scores


class TimedGemma(Gemma3ForCausalLM):
    """The model, whose `generate` is timed and ends rows where the workload says."""

    turns: Turns = None

    def generate(self, *args: Any, **settings: Any) -> torch.Tensor:
        work = self.turns.work
        if work["lengths"]:
            settings["logits_processor"] = [EndAt(work["lengths"], work["prompt_length"], work["eos_id"])]
        with self.turns.phase("rollout"):
            return super().generate(*args, **settings)


class TimedTrainer(GRPOTrainer):
    """The trainer, whose scoring by the reference is timed: it is the call without gradients."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **settings: Any) -> Any:
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*args, **settings)
        with TimedGemma.turns.phase("reference"):
            return super()._get_per_token_logps_and_entropies(*args, **settings)


class TakeTurns(TrainerCallback):
    """A step begins when the runner says so, and all that follows it until then is counted to it."""

    def __init__(self, turns: Turns):
        self.turns = turns

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        control.should_training_stop = not self.turns.wait()
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        self.turns.done()
        control.should_training_stop = not self.turns.wait()
        return control


def make_tokenizer(work: dict) -> PreTrainedTokenizerFast:
    """One word a token. Padding and end have names that are not a part of other words."""
    vocabulary = {f"t{token}": token for token in range(work["vocab_size"])}
    for name, token in (("<pad>", work["pad_id"]), ("<end>", work["eos_id"])):
        vocabulary.pop(f"t{token}", None)
        vocabulary[name] = token
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )
    for tokens in work["prompt_tokens"]:
        assert found(words(tokens))["input_ids"] == tokens, "the tokenizer reads other tokens than it was given"
    return found


def make_model(work: dict, folder: str) -> TimedGemma:
    """Random weights, by way of a folder: from there the trainer loads the reference."""
    size = work["model"]
    torch.manual_seed(work["training"]["seed"])
    config = Gemma3TextConfig(
        vocab_size=work["vocab_size"],
        hidden_size=size["embed_dim"],
        intermediate_size=size["mlp_dim"],
        num_hidden_layers=size["num_layers"],
        num_attention_heads=size["num_heads"],
        num_key_value_heads=size["num_kv_heads"],
        head_dim=size["head_dim"],
        query_pre_attn_scalar=size["head_dim"],
        sliding_window=size["window"],
        pad_token_id=work["pad_id"],
        eos_token_id=work["eos_id"],
        bos_token_id=None,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return TimedGemma.from_pretrained(folder, dtype=torch.float32)


def settings_of(work: dict, folder: str) -> GRPOConfig:
    training = work["training"]
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=work["prompts"] * work["generations"],
        gradient_accumulation_steps=1,
        num_generations=work["generations"],
        max_completion_length=work["new_tokens"],
        temperature=1.0,
        beta=training["kl_coef"],
        epsilon=training["clip"],
        loss_type="bnpo",
        learning_rate=training["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=training["beta1"],
        adam_beta2=training["beta2"],
        adam_epsilon=training["eps"],
        max_grad_norm=training["max_grad_norm"],
        max_steps=1000,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        shuffle_dataset=False,
        disable_tqdm=True,
        seed=training["seed"],
    )


def rewards(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    TimedGemma.turns.lengths = [len(tokens) for tokens in completion_ids]
    return [reward_of_text(text) for text in completions]


def main() -> None:
    turns = Turns()
    work = turns.work
    torch.set_num_threads(work["training"]["threads"])
    logging.set_verbosity_error()
    TimedGemma.turns = turns
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rank = work["lora_rank"]
        adapters = LoraConfig(r=rank, lora_alpha=32, target_modules=LAYERS, task_type="CAUSAL_LM") if rank else None
        trainer = TimedTrainer(
            model=make_model(work, folder),
            reward_funcs=rewards,
            args=settings_of(work, folder),
            train_dataset=Dataset.from_dict({"prompt": [words(tokens) for tokens in work["prompt_tokens"]] * 1000}),
            processing_class=make_tokenizer(work),
            peft_config=adapters,
            callbacks=[TakeTurns(turns)],
        )
        trained = sum(x.numel() for x in trainer.model.parameters() if x.requires_grad)
        turns.ready(
            import_seconds=IMPORTED - BEGAN,
            setup_seconds=time.perf_counter() - began,
            versions={name: version(name) for name in ("trl", "transformers", "torch", "peft")},
            trained_parameters=trained,
        )
        trainer.train()


if __name__ == "__main__":
    main()
