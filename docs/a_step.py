"""Writes docs/guide/a_step.md: one tiny batch on its way from prompt to gradient, with its values.

    python docs/a_step.py            # write the page
    python docs/a_step.py --check    # exit with 1 if its text is not what this code gives

Values are rounded to three digits, so that the page is the same on every machine.
"""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"

import jax
import numpy as np
import optax

from tunix_lite.algorithms.grpo import GRPO
from tunix_lite.algorithms.sampling import sample_groups
from tunix_lite.basics.types import Batch, Graded, Rollout, TrainState
from tunix_lite.learner.optim import OptimizerConfig, init_opt_state, make_optimizer
from tunix_lite.learner.policy import make_policy
from tunix_lite.learner.rows import RowLayout
from tunix_lite.learner.update import TrainStep
from tunix_lite.models import source
from tunix_lite.parallel.mesh import make_mesh, put
from tunix_lite.rewards.math import correct
from tunix_lite.rollout.generate import make_generate
from tunix_lite.rollout.settings import GenerationConfig
from tunix_lite.tasks.sources import Arithmetic
from tunix_lite.tasks.task import Reward, Task, TaskConfig

PAGE = Path(__file__).parent / "guide" / "a_step.md"
TEMPLATE = Path(__file__).parent / "a_step_template.txt"
EXAMPLES = [
    {"question": "3 + 4", "answer": "7"},
    {"question": "21 - 8 + 5 - 2", "answer": "16"},
]
GENERATIONS = 4
GENERATION = GenerationConfig(max_prompt_length=24, max_new_tokens=48)
SEED = 2


def text() -> str:
    """The page."""
    jax.set_mesh(make_mesh(((1, 1), ("fsdp", "tp"))))
    model = source.locate(source.ModelConfig())
    tokenizer = model.tokenizer
    _, params = source.load_weights(model)
    settings = TaskConfig(Arithmetic(), "What is {question}?", {"correct": Reward(correct)})
    widths = GENERATION.max_prompt_length, GENERATION.max_new_tokens
    task = Task(settings, tokenizer, *widths)
    generate = make_generate(model.cfg, GENERATION, tokenizer.eos_ids, tokenizer.pad_id)
    seen: dict[str, Rollout] = {}

    def keep_rollout(*arguments: object, **options: object) -> Rollout:
        seen["rollout"] = generate(*arguments, **options)
        return seen["rollout"]

    # Collect, lay out, score and update, as a run does.
    policy = make_policy(model.cfg, keep_rollout, temperature=1.0)
    algorithm = GRPO(num_generations=GENERATIONS)
    key = jax.random.key(SEED)
    groups = sample_groups(policy, task, params, EXAMPLES, key, GENERATIONS)
    batch, _ = algorithm.batch_of(policy, task, params, EXAMPLES, groups)
    graded = groups.graded
    rows, _ = RowLayout(num_scored=GENERATION.max_new_tokens).lay_out(batch)
    scores = jax.jit(policy.scores)(params, rows)
    loss, metrics = algorithm.loss(scores, rows)
    grads = jax.grad(lambda params: algorithm.loss(policy.scores(params, rows), rows)[0])(
        params
    )
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3), 10)
    state = TrainState(put(np.int32(0)), params, init_opt_state(optimizer, params))
    _, learned = TrainStep(policy, algorithm, optimizer)(state, None, rows)

    # The values, by the names that the template has for them.
    gap = float(metrics["train/sampler_gap_max"].value)
    assert gap < 1e-4, "the page says so"
    row = shortest_that_teaches(batch)
    values = {
        "prompts": block(prompt_lines(task, tokenizer)),
        "completions": completions(graded, batch),
        "advantages": advantages(graded, batch),
        "tokens": token_table(tokenizer, batch, seen["rollout"], scores, row),
        "row": str(row),
        "shape": " x ".join(map(str, batch.tokens.shape)),
        "scored": str(GENERATION.max_new_tokens),
        "counted": str(int((np.asarray(batch.loss_weight) != 0).sum())),
        "loss": number(loss),
        "norm": number(optax.tree.norm(grads)),
        "learned_norm": number(learned["train/grad_norm"]),
        "grads": gradients(grads),
    }
    page = TEMPLATE.read_text()
    for name, value in values.items():
        page = page.replace("{{" + name + "}}", value)
    return page


def shortest_that_teaches(batch: Batch) -> int:
    """The sequence with the fewest tokens of those whose advantage is not 0."""
    lengths = (np.asarray(batch.loss_weight) != 0).sum(axis=1)
    teaches = np.asarray(batch.advantages)[:, 0] != 0
    return int(np.argmin(np.where(teaches, lengths, np.inf)))


def number(x: object) -> str:
    text = f"{float(x):.3f}"
    return "0.000" if text == "-0.000" else text


def block(lines: list[str]) -> str:
    return "\n".join(["```text", *lines, "```"])


def prompt_lines(task: Task, tokenizer: object) -> list[str]:
    lines = []
    for tokens in task.prompts(EXAMPLES):
        lines.append(f"{len(tokens):2d} tokens  {shown(tokenizer, tokens)}")
    return lines


def shown(tokenizer: object, tokens: object) -> str:
    return "|".join(
        tokenizer.decode([int(token)], skip_special=False).replace("\n", "⏎")
        for token in tokens
    )


def completions(graded: Graded, batch: Batch) -> str:
    lines = ["| b | prompt | completion | tokens | reward |", "|---|---|---|---|---|"]
    lengths = (np.asarray(batch.loss_weight) != 0).sum(axis=1)
    for b, completion in enumerate(graded.completions):
        flat = completion.strip().replace("\n", " ⏎ ")
        p = b // GENERATIONS
        lines.append(f"| {b} | {p} | {flat} | {lengths[b]} | {graded.rewards[b]:.0f} |")
    return "\n".join(lines)


def advantages(graded: Graded, batch: Batch) -> str:
    lines = ["| group | rewards | mean | advantages |", "|---|---|---|---|"]
    for p, rewards in enumerate(graded.rewards.reshape(-1, GENERATIONS)):
        first = p * GENERATIONS
        group = np.asarray(batch.advantages)[first : first + GENERATIONS, 0]
        as_text = ", ".join(f"{x:+.2f}" for x in group)
        numbers = ", ".join(f"{x:.0f}" for x in rewards)
        lines.append(f"| {p} | {numbers} | {rewards.mean():.2f} | {as_text} |")
    return "\n".join(lines)


def token_table(
    tokenizer: object, batch: Batch, rollout: Rollout, scores: object, row: int
) -> str:
    """Sequence `row`, a line for its prompt and one for each token of its completion."""
    logprobs = np.asarray(scores.logprobs)[row]
    first, *_ = learned = np.flatnonzero(np.asarray(batch.loss_weight)[row])
    lines = [
        "| t | token | token_mask | loss_weight | advantages | old_logprobs | logprobs | ratio |",
        "|---|---|---|---|---|---|---|---|",
        f"| 0 to {first - 1} | the prompt | 1 | 0 | | | | |",
    ]
    for t in learned:
        token = tokenizer.decode([int(batch.tokens[row, t])], skip_special=False)
        token = token.replace("\n", "⏎").replace("|", "¦")
        old = float(rollout.full_logprobs[row, t])
        cells = [str(t), f"`{token}`", "1", f"{float(batch.loss_weight[row, t]):.4f}"]
        cells += [number(batch.advantages[row, t]), number(old), number(logprobs[t])]
        cells.append(number(np.exp(logprobs[t] - old)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gradients(grads: dict) -> str:
    lines = ["| weight | shape | norm of its gradient |", "|---|---|---|"]
    chosen = {"embed": grads["embed"], "layers/q": grads["layers"]["q"]}
    chosen |= {"layers/down": grads["layers"]["down"], "final_norm": grads["final_norm"]}
    for name, x in chosen.items():
        shape = " x ".join(map(str, x.shape))
        lines.append(f"| `{name}` | {shape} | {number(optax.tree.norm(x))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text() != text())
    PAGE.write_text(text())
    print(f"wrote {PAGE}")
