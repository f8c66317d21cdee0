"""tunix_lite's side of the races on real weights, a step a turn: `python ours.py`, started by race.py."""

import os
import sys
import time
from pathlib import Path

BEGAN = time.perf_counter()

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from dataclasses import replace
from importlib.metadata import version

from tunix_lite.distributed.host_memory import keep_freed_memory

# as the commands of tunix_lite do
keep_freed_memory()

import jax
import numpy as np

from tunix_lite import api
from tunix_lite.models.source import FoundModel
from tunix_lite.parallel.compiling import keep_programs
from tunix_lite.runs.experience import ExperienceSource, TaskExperience
from tunix_lite.runs.learner import Learner
from tunix_lite.runs.session import Session
from tunix_lite.runs.setup import find_parts
from tunix_lite.settings.resolved_parts import policy_of

IMPORTED = time.perf_counter()

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

from turns import Turns, share_of_e

# the one of this process, once it has begun
TURNS: list[Turns] = []


def ready(prompt_tokens: int) -> None:
    TURNS[0].ready(
        import_seconds=IMPORTED - BEGAN,
        setup_seconds=time.perf_counter() - IMPORTED,
        versions={name: version(name) for name in ("tunix_lite", "jax")},
        prompt_tokens=prompt_tokens,
    )


def sample() -> None:
    """The sampler as a run makes it: all requests at once, each until its end."""
    turns = TURNS[0]
    work = turns.work
    model = api.load(work["model"])
    generation = api.GenerationConfig(work["prompt_length"], work["new_tokens"])
    generate = api.make_generate(model.cfg, generation, model.tokenizer.eos_ids, model.tokenizer.pad_id)
    ready(sum(map(len, work["ids"])))
    number = 0
    while turns.wait():
        with jax.set_mesh(model.mesh):
            rollout = generate(model.params, work["ids"], jax.random.key(number))
        turns.lengths = np.asarray(rollout.completion_mask).sum(axis=1).tolist()
        turns.done()
        number += 1


def settings_of(work: dict) -> api.RunConfig:
    """A run of the command line with defaults, but for what is the same for all sides."""
    file = work["rows_file"]
    data = [
        "task=gsm8k",
        f"task.train={file}",
        f"task.held_out={file}",
        f"task.prompt='{work['template']}'",
        f"generation.max_prompt_length={work['prompt_length']}",
        f"generation.max_new_tokens={work['new_tokens']}",
    ]
    if work["race"] == "text":
        # TRL cuts joined documents into rows, too, and a token sees all before it in its row
        rows = ["task.attention=across", "task.held_out_every=0", f"task.row_tokens={work['peer_width']}"]
        data = ["task=text", f"task.train={file}", f"task.cache={work['folder']}/tokens", *rows]
    return api.compose(
        [
            f"model.weights={work['model']}",
            f"model.lora.rank={work['lora_rank']}",
            *data,
            *(["algorithm=sft"] if work["race"] != "grpo" else [f"algorithm.num_generations={work['generations']}"]),
            f"training.prompts_per_step={work['prompts']}",
            f"optimizer.learning_rate={work['learning_rate']}",
            "training.max_steps=1000",
            "training.save_interval_steps=0",
            "evaluation.num_examples=0",
            "tracking.console=quiet",
            *work["settings"],
        ]
    )


def score() -> None:
    """The pass with which a run scores 32 rows, such as those of a reference."""
    turns = TURNS[0]
    work = turns.work
    # the settings need rows that fit; the tokens that are scored are those of the race
    settings = [*work["settings"], "generation.long_prompts=truncate"]
    parts = find_parts(settings_of(work | {"settings": settings}))
    jax.set_mesh(parts.mesh)
    model: FoundModel = parts.model
    _, params = api.load_weights(model, 0, "fp32")
    policy = policy_of(parts.resolved)
    prompt, new = work["prompt_length"], work["new_tokens"]
    tokens = np.zeros((len(work["ids"]), prompt + new), np.int32)
    token_mask = np.zeros(tokens.shape, bool)
    for row, (ids, completion) in enumerate(zip(work["ids"], work["completions"], strict=True)):
        tokens[row, prompt - len(ids) :] = ids + completion
        token_mask[row, prompt - len(ids) :] = True
    counts = token_mask & (np.arange(prompt + new) >= prompt)
    batch = api.Batch(tokens, token_mask, counts.astype(np.float32))
    ready(sum(map(len, work["ids"])))
    while turns.wait():
        logprobs = policy.rescore(params, batch)
        turns.lengths = token_mask.sum(axis=1).tolist()
        turns.done(mean_logprob=float(logprobs[counts].mean()))


def step_done(done: api.StepDone) -> dict:
    """After each update: ends the turn and waits for the next one."""
    turns = TURNS[0]
    batch = done.experience.batch
    is_sampled = done.experience.graded is not None
    if is_sampled:
        turns.seconds["rollout"] = float(done.experience.metrics["time/rollout"])
    counted = np.asarray(batch.loss_weight) != 0 if is_sampled else np.asarray(batch.token_mask)
    turns.lengths = counted.sum(axis=1).tolist()
    turns.done()
    turns.wait()
    return {}


def source_of(session: Session, learner: Learner) -> ExperienceSource:
    """The model is loaded; what compiles from here on belongs to the first step."""
    task = session.parts.task
    examples = task.batch(session.parts.resolved.batch.prompts, 0, 0)
    ready(0 if TURNS[0].work["race"] == "text" else sum(map(len, task.prompts(examples))))
    TURNS[0].wait()
    return TaskExperience(session, learner)


def learn() -> None:
    """`train`, as run_training.py calls it."""
    work = TURNS[0].work
    run = settings_of(work)
    task = run.task
    if work["race"] != "text":
        task = replace(task, rewards={"e": api.Reward(share_of_e)})
    tracking = replace(run.tracking, observers={"turns": step_done})
    api.train(replace(run, task=task, tracking=tracking), Path(work["folder"]) / "run", make_source=source_of)


def main() -> None:
    turns = Turns()
    TURNS.append(turns)
    keep_programs(turns.work["programs"])
    {"sampling": sample, "scoring": score, "grpo": learn, "sft": learn, "text": learn}[turns.work["race"]]()


if __name__ == "__main__":
    main()
