"""The environments of a rollout: they answer its turns, and their answers become tokens.

An environment gets the text of a turn; what it answers becomes tokens once, here, and nothing that
was sampled is made into tokens again. Of several processes each one steps its share of the
environments, and all of them get all answers at the same point.
"""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any

import numpy as np

from tunix_lite.environments.pool import EnvironmentPool
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.tasks.processes import Processes, SharedError
from tunix_lite.tasks.prompt_text import PromptText
from tunix_lite.types import Metrics, Prompts, Rollout, TurnReply

# seconds between two looks whether another process has an answer, or the run is to end
LOOK_SECONDS = 0.05
# the reward that environments give, as reward/environment has it
ENVIRONMENT = "environment"

# an answer as processes share it: observation (a text, messages, or None), reward, done, failure,
# message, seconds, info
Answer = list[Any]


class EnvironmentPartner:
    """Answers the turns of all rows of a rollout: a rollout.conversations.Partner.

    Example: partner = EnvironmentPartner(text, examples, pool, settings, ALONE, 512);
    partner.prompts are those with which the environments begin.
    """

    def __init__(
        self,
        text: PromptText,
        examples: Sequence[dict],
        pool: EnvironmentPool,
        settings: ConversationConfig,
        processes: Processes,
        max_prompt_length: int,
    ):
        """examples: of each row. Resets the environments, and waits for them.

        Raises SharedError if one fails and conversation.on_error=raise.
        """
        self.max_turns = settings.max_turns
        self.max_turn_tokens = settings.max_turn_tokens
        self._text = text
        self._examples = examples
        self._pool = pool
        self._processes = processes
        self._turns = text.turn_tokens
        self._stops = settings.on_error == "raise"
        # calls of this process, texts of turns, and whether they ended by themselves; by row
        self._futures: dict[int, Future] = {}
        self._completions: dict[int, str] = {}
        self._ended: dict[int, bool] = {}
        # rows of all processes that wait for an answer
        self._waiting: set[int] = set()
        self._failed_at_start: dict[int, Answer] = {}
        # until they are counted with the first turn
        self._reset_seconds: dict[int, float] = {}
        self.openings: list[str | None] = [None] * len(examples)
        # None: all are those of the task
        self.prompts: Prompts | None = None

        rows = range(len(examples))
        for row in self._own(rows):
            self._futures[row] = pool.reset(row, examples[row])
        self._waiting = set(rows)
        answers: dict[int, Answer] = {}
        while self._waiting:
            answers |= self._exchange(wait_for_one=True)
        self._failed_at_start = {row: one for row, one in answers.items() if one[3]}
        self._reset_seconds = {row: one[5] for row, one in answers.items() if not one[3]}
        observations = [answers[row][0] for row in rows]
        if all(observation is None for observation in observations):
            return
        # what the model reads first, for display: the last message; None: the prompt of the task
        self.openings = [
            one if one is None or isinstance(one, str) else one[-1]["content"]
            for one in observations
        ]
        self.prompts = []
        for row, observation in enumerate(observations):
            # the task's own prompt, if the environment has none or one that cannot be read
            prompt = None
            if observation is not None:
                try:
                    prompt = prompt_of(text, examples[row], observation)
                    check_length(prompt, max_prompt_length)
                except ValueError as error:
                    prompt = None
                    self._failed_at_start[row] = self._refused(str(error))
                    self.openings[row] = None
            self.prompts.append(text.prompt(examples[row]) if prompt is None else prompt)

    def _refused(self, why: str) -> Answer:
        """Replaces an answer that the model cannot read, or raises SharedError on all processes."""
        message = f"the environment returned what the model cannot read: {why}"
        if self._stops:
            raise SharedError(
                f"{message}; conversation.on_error=zero or drop continues without it"
            )
        return [None, 0.0, False, "not_a_turn", message, 0.0, {}]

    def submit(self, row: int, tokens: Sequence[int], ended: bool) -> None:
        """Gives the environment of a row the next turn."""
        self._completions[row] = self._text.tokenizer.decode(tokens)
        self._ended[row] = ended
        self._waiting.add(row)
        if row not in self._failed_at_start and row in self._own([row]):
            self._futures[row] = self._pool.step(row, self._completions[row])

    def replies(self, wait: bool, patience: float = 0.0) -> dict[int, TurnReply]:
        """The answers that have come; with `wait`, at least one. patience: seconds in which the
        others may still come.

        Raises SharedError if an environment fails and conversation.on_error=raise; StopRun if the
        run was asked to stop while it waited.
        """
        answers = {
            row: self._failed_at_start[row] for row in self._waiting & set(self._failed_at_start)
        }
        self._waiting -= set(answers)
        if self._waiting:
            answers |= self._exchange(wait_for_one=wait and not answers, patience=patience)
        replies = {}
        for row, answer in answers.items():
            tokens = []
            observation, _, done, failure, *_ = answer
            if not done and not failure:
                try:
                    tokens = self._turns.between(observation, self._ended[row])
                except ValueError as error:
                    answer = self._refused(str(error))
            observation, reward, done, failure, message, seconds, info = answer
            if not isinstance(observation, str):
                observation = "\n".join(one["content"] for one in observation or ())
            replies[row] = TurnReply(
                tokens=tokens,
                done=done,
                reward=reward,
                observation=observation,
                failure=failure,
                message=message,
                seconds=seconds + self._reset_seconds.pop(row, 0.0),
                info=info,
                completion=self._completions[row],
            )
        return replies

    def close(self) -> None:
        """Ends the environments of all rows."""
        for row in self._own(range(len(self._examples))):
            self._pool.close(row)

    # ---- answers of all processes

    def _own(self, rows: Iterable[int]) -> list[int]:
        """Selects the rows whose environments this process steps."""
        return [row for row in rows if row % self._processes.count == self._processes.index]

    def _exchange(self, wait_for_one: bool, patience: float = 0.0) -> dict[int, Answer]:
        """Answers that have come in any process, by row; all processes get the same."""
        while True:
            own, error = self._own_answers(LOOK_SECONDS if wait_for_one else 0.0, patience)
            stopping = self._processes.stopping
            stops = stopping is not None and stopping.is_requested()
            everyone = self._processes.share([list(own.items()), error, stops])
            if stopping is not None and wait_for_one:
                stopping.stop_if(any(stops for *_, stops in everyone))
            errors = [error for _, error, _ in everyone if error is not None]
            if errors:
                raise SharedError(errors[0])
            arrived = {row: answer for answers, *_ in everyone for row, answer in answers}
            self._waiting -= set(arrived)
            if arrived or not wait_for_one:
                return arrived

    def _own_answers(
        self, seconds: float, patience: float
    ) -> tuple[dict[int, Answer], str | None]:
        """Answers of this process, or what went wrong. It waits `seconds` for the first one, and
        from then on `patience` for the others."""
        futures = {future: row for row, future in self._futures.items()}
        if futures:
            done, _ = wait(futures, timeout=seconds, return_when=FIRST_COMPLETED)
            if patience and (done or not seconds):
                done, _ = wait(futures, timeout=patience)
        else:
            # another process has those that are waited for
            done = ()
            time.sleep(seconds / 10)
        answers = {}
        for future in done:
            row = futures[future]
            del self._futures[row]
            try:
                reply = future.result()
            except ValueError as error:
                return {}, str(error)
            turn = reply.turn
            known: list = [None, 0.0, False]
            info: dict = {}
            if turn is not None:
                known = [turn.observation, float(turn.reward), bool(turn.done)]
                info = dict(getattr(turn, "info", {}) or {})
            answers[row] = [*known, reply.failure, reply.message, reply.seconds, info]
        return answers, None


def prompt_of(text: PromptText, example: dict, observation: str | list[dict]) -> list[int]:
    """The tokens with which an environment begins, after the task's system message."""
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    system = text.template.system
    if system is not None and observation[0]["role"] != "system":
        begins = text.template.with_system([], example)
        observation = [{"role": "system", "content": begins[0].content}, *observation]
    is_text = len(observation) == 1 and observation[0]["role"] == "user"
    turns = replace(text.turn_tokens, variables=text.variables_of(example))
    return turns.prompt(observation[0]["content"] if is_text else observation)


def check_length(prompt: list[int], max_prompt_length: int) -> None:
    """Raises ValueError for a prompt of an environment that is too long."""
    if len(prompt) > max_prompt_length:
        raise ValueError(
            f"it begins with a prompt of {len(prompt)} tokens, more than "
            f"generation.max_prompt_length={max_prompt_length}; raise it to at least {len(prompt)}"
        )


# ---- what conversations are worth, and what is logged of them


def turn_rewards(rollout: Rollout, settings: ConversationConfig) -> list[list[float]]:
    """Returns the rewards that the environment gave the turns of each row. A row that failed gets
    none; one that reached a limit gets limit_reward in all, with on_limit=penalise."""
    row_rewards = []
    for one in rollout.conversations:
        rewards = list(one.rewards)
        if one.ended == "failed":
            rewards = [0.0] * len(rewards)
        elif one.reached_limit and settings.on_limit == "penalise":
            rewards = [*[0.0] * (len(rewards) - 1), settings.limit_reward]
        row_rewards.append(rewards)
    return row_rewards


def of_conversations(
    rollout: Rollout,
    settings: ConversationConfig,
    total_B: np.ndarray,
    dropped_B: np.ndarray,
    by_turn: list[list[float]],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the total reward of each conversation, and which are dropped. A failed environment,
    or a limit with on_limit=penalise, overrides the total."""
    total_B = np.array(total_B, np.float64)
    dropped_B = dropped_B.copy()
    for row, one in enumerate(rollout.conversations):
        if one.ended == "failed":
            total_B[row] = 0.0
            dropped_B[row] |= settings.on_error == "drop"
        elif one.reached_limit and settings.on_limit == "penalise":
            total_B[row] = sum(by_turn[row])
    return total_B, dropped_B


def won(rollout: Rollout) -> np.ndarray | None:
    """[B] bool: which conversations an environment calls `won`; None: it says so of none."""
    if rollout.conversations is None:
        return None
    infos = [[turn.reply.info for turn in one.turns] for one in rollout.conversations]
    if not any("won" in info for one in infos for info in one):
        return None
    return np.array([any(info.get("won") for info in one) for one in infos], bool)


def failed_replies(rollout: Rollout) -> list[TurnReply]:
    """The replies of environments that failed, in the order of rows."""
    if rollout.conversations is None:
        return []
    replies = [turn.reply for one in rollout.conversations for turn in one.turns]
    return [reply for reply in replies if reply.failure]


def conversation_metrics(rollout: Rollout) -> Metrics:
    """Turns and their lengths, how conversations ended, and what environments count and cost."""
    conversations = list(rollout.conversations)
    turns = [turn for one in conversations for turn in one.turns]
    counts = [len(one.turns) for one in conversations]
    lengths = [turn.end - turn.begin for turn in turns]
    metrics = {
        "conversation/turns": sum(counts) / len(counts),
        "conversation/max_turns": max(counts),
        "conversation/turn_tokens": sum(lengths) / len(lengths),
        "conversation/answer_tokens": sum(len(turn.reply.tokens) for turn in turns) / len(turns),
        "time/environments": sum(turn.reply.seconds for turn in turns),
    }
    for why in ("done", "tokens", "turns", "failed"):
        share = sum(one.ended == why for one in conversations) / len(conversations)
        metrics[f"conversation/ended_by_{why}"] = share
    failures = [reply.failure for reply in failed_replies(rollout)]
    for kind in sorted(set(failures)):
        metrics[f"conversation/failed_by_{kind}"] = failures.count(kind) / len(conversations)

    # What environments count, such as calls of tools: means over conversations.
    names = sorted({name for turn in turns for name in turn.reply.info})
    totals = {name: sum(float(turn.reply.info.get(name, 0)) for turn in turns) for name in names}
    ours = {*metrics, "conversation/tool_success"}
    for name in names:
        # `turns` is counted here already
        key = f"conversation/{name}"
        key = f"conversation/info_{name}" if key in ours else key
        metrics[key] = totals[name] / len(conversations)
    if totals.get("tool_calls") and "tool_errors" in totals:
        metrics["conversation/tool_success"] = 1 - totals["tool_errors"] / totals["tool_calls"]
    return metrics
