"""Reinforcement learning by hand: the loop of tunix_lite.train with nothing around it.

    python examples/rl_loop.py [number of steps]

Letters in names: P prompts, G completions of each, B = P * G sequences, T tokens of a sequence.
It trains the bundled base model on arithmetic. What a run adds is in tunix_lite/runs: several
processes, checkpoints, evaluation, logs, memory plans. The numbers of both are the same.
"""

import sys

import jax
import numpy as np

from tunix_lite.api import (
    GRPO,
    Arithmetic,
    GenerationConfig,
    ModelConfig,
    OptimizerConfig,
    Reward,
    RowLayout,
    Task,
    TaskConfig,
    TrainState,
    TrainStep,
    correct,
    init_opt_state,
    load_weights,
    locate,
    make_generate,
    make_mesh,
    make_optimizer,
    make_policy,
    put,
    sample_groups,
)

PROMPTS = 16
GENERATIONS = 8
GENERATION = GenerationConfig(max_prompt_length=32, max_new_tokens=48)
SEED = 0


def main(num_steps: int) -> list[float]:
    """Make so many updates. Returns the mean reward of each step."""
    # Where arrays live: the batch divided over all devices, the weights too.
    jax.set_mesh(make_mesh(((-1, 1), ("fsdp", "tp"))))

    # A model, and a task: questions with answers, and a function that grades a completion.
    model = locate(ModelConfig())
    _, params = load_weights(model, SEED)
    rewards = {"correct": Reward(correct)}
    settings = TaskConfig(Arithmetic(), "What is {question}?", rewards)
    task = Task(
        settings, model.tokenizer, GENERATION.max_prompt_length, GENERATION.max_new_tokens
    )

    # The policy samples completions and scores their tokens; the algorithm makes a batch and a
    # loss of them; the train step is one compiled update.
    ends = model.tokenizer.eos_ids
    generate = make_generate(model.cfg, GENERATION, ends, model.tokenizer.pad_id)
    policy = make_policy(model.cfg, generate, temperature=1.0)
    algorithm = GRPO(num_generations=GENERATIONS)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=4e-5), num_steps)
    train_step = TrainStep(policy, algorithm, optimizer)
    state = TrainState(put(np.int32(0)), params, init_opt_state(optimizer, params))

    means = []
    for step in range(num_steps):
        # Experience: P prompts, G completions of each, their rewards, the advantages [B, T].
        examples = task.batch(PROMPTS, SEED, step)
        key = jax.random.fold_in(jax.random.key(SEED), step)
        groups = sample_groups(policy, task, state.params, examples, key, GENERATIONS)
        batch, _ = algorithm.batch_of(policy, task, state.params, examples, groups)

        # Update: the batch goes to the devices in rows; the old state is donated.
        rows, _ = RowLayout(num_scored=GENERATION.max_new_tokens).lay_out(batch)
        state, learned = train_step(state, None, rows)

        means.append(float(groups.graded.rewards.mean()))
        print(
            f"step {step + 1}: reward {means[-1]:.3f}, loss {float(learned['train/loss']):+.4f}"
        )
    return means


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
