"""The environments of a rollout: they answer its turns, and their answers become tokens, once. Each
process steps its share of them, and all processes get all answers at the same point."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, replace

import numpy as np

from tunix_lite.basics.types import Metrics, Prompts, Rollout, TurnReply
from tunix_lite.environments.environment import Turn
from tunix_lite.environments.pool import EnvironmentPool, Reply
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.tasks.processes import Processes
from tunix_lite.tasks.prompt_text import PromptText

# seconds between two looks whether another process has an answer, or the run is to end
LOOK_SECONDS = 0.05
# the reward that environments give, as reward/environment has it
ENVIRONMENT = "environment"


class EnvironmentPartner:
    """Answers the turns of all rows of a rollout: a rollout.conversations.Partner.
    Example: partner = EnvironmentPartner(text, examples, pool, settings, ALONE, 512);
    partner.prompts are those with which the environments begin."""

    def __init__(
        self,
        text: PromptText,
        examples: Sequence[dict],
        pool: EnvironmentPool,
        settings: ConversationConfig,
        processes: Processes,
        max_prompt_length: int,
    ):
        """examples: of each row. Resets the environments and waits. SharedError: one fails."""
        self.max_turns = settings.max_turns
        self.max_turn_tokens = settings.max_turn_tokens
        self._text = text
        self._examples = examples
        self._pool = pool
        self._processes = processes
        self._max_prompt_length = max_prompt_length
        self._stops = settings.on_error == "raise"
        # calls of this process, texts of turns, and whether they ended by themselves; by row
        self._futures: dict[int, Future] = {}
        self._completions: dict[int, str] = {}
        self._ended: dict[int, bool] = {}
        # rows of all processes that wait for an answer
        rows = range(len(examples))
        self._waiting = set(rows)
        for row in self._own(rows):
            self._futures[row] = pool.reset(row, examples[row])
        # how the environments began; what failed, and the seconds, belong to the first turn
        self._starts: dict[int, TurnReply] = {}
        while self._waiting:
            self._starts |= self._exchange(wait_for_one=True)
        starts = [self._starts[row] for row in rows]
        # what the model reads first, for display; None: the prompt of the task
        self.openings = [one.observation if one.tokens else None for one in starts]
        # None: all are those of the task
        self.prompts: Prompts | None = None
        if any(one.tokens for one in starts):
            self.prompts = [
                one.tokens or text.prompt(example) for one, example in zip(starts, examples)
            ]

    def submit(self, row: int, tokens: Sequence[int], ended: bool) -> None:
        """Gives the environment of a row the next turn."""
        self._completions[row] = self._text.tokenizer.decode(tokens)
        self._ended[row] = ended
        self._waiting.add(row)
        start = self._starts.get(row)
        if row in self._own([row]) and start is not None and start.failure:
            self._futures[row] = Future()
            self._futures[row].set_result(Reply(None, start.failure, start.message))
        elif row in self._own([row]):
            self._futures[row] = self._pool.step(row, self._completions[row])

    def replies(self, wait: bool, patience: float = 0.0) -> dict[int, TurnReply]:
        """The answers that have come; with `wait`, at least one. patience: seconds in which others
        may still come. Raises SharedError if an environment fails and conversation.on_error=raise,
        and StopRun."""
        replies = self._exchange(wait, patience) if self._waiting else {}
        for row, reply in replies.items():
            start = self._starts.pop(row, TurnReply())
            seconds = reply.seconds + start.seconds
            replies[row] = replace(reply, completion=self._completions[row], seconds=seconds)
        return replies

    def close(self) -> None:
        """Ends the environments of all rows."""
        for row in self._own(range(len(self._examples))):
            self._pool.close(row)

    # ---- answers of all processes

    def _own(self, rows: Iterable[int]) -> list[int]:
        """Selects the rows whose environments this process steps."""
        return [row for row in rows if row % self._processes.count == self._processes.index]

    def _exchange(self, wait_for_one: bool, patience: float = 0.0) -> dict[int, TurnReply]:
        """Answers that have come in any process, by row; all processes get the same."""
        stopping = self._processes.stopping
        while True:
            own = []
            error = None
            try:
                own = self._own_replies(LOOK_SECONDS if wait_for_one else 0.0, patience)
            except ValueError as failed:
                # Not raised here: alone, this process would leave the others waiting.
                error = str(failed)
            stops = wait_for_one and stopping is not None and stopping.is_requested()
            everyone = self._processes.exchange(own, error, stops)
            arrived = {
                row: TurnReply(**reply) for replies in everyone for row, reply in replies
            }
            self._waiting -= set(arrived)
            if arrived or not wait_for_one:
                return arrived

    def _own_replies(self, seconds: float, patience: float) -> list[tuple[int, dict]]:
        """Answers of this process, by row, as JSON has them. It waits `seconds` for the first one,
        and from then on `patience` for the others. Raises ValueError if one fails, and that ends
        the run."""
        rows = {future: row for row, future in self._futures.items()}
        done = set()
        if rows:
            done, _ = wait(rows, timeout=seconds, return_when=FIRST_COMPLETED)
            if patience and (done or not seconds):
                done, _ = wait(rows, timeout=patience)
        else:
            # another process has those that are waited for
            time.sleep(seconds / 10)
        for future in done:
            del self._futures[rows[future]]
        return [(rows[one], asdict(self._read(rows[one], one.result()))) for one in done]

    def _read(self, row: int, reply: Reply) -> TurnReply:
        """The answer as the model reads it: its text becomes tokens."""
        turn = reply.turn or Turn("")
        is_start = row not in self._completions
        messages = turn.observation
        tokens = []
        try:
            if is_start and reply.turn is not None:
                example = self._examples[row]
                tokens = prompt_of(self._text, example, messages, self._max_prompt_length)
            elif not is_start and not turn.done and not reply.failure:
                tokens = self._text.turn_tokens.between(messages, self._ended[row])
        except ValueError as error:
            message = f"the environment returned what the model cannot read: {error}"
            if self._stops:
                raise ValueError(
                    f"{message}; conversation.on_error=zero or drop continues without it"
                ) from error
            return TurnReply(failure="not_a_turn", message=message)
        if not isinstance(messages, str):
            contents = [one["content"] for one in messages]
            # of several messages at the start the last one is shown
            messages = contents[-1] if is_start else "\n".join(contents)
        return TurnReply(
            tokens=tokens,
            done=turn.done,
            reward=turn.reward,
            observation=messages,
            failure=reply.failure,
            message=reply.message,
            seconds=reply.seconds,
            info=turn.info,
        )


def prompt_of(
    text: PromptText, example: dict, observation: str | list[dict], most: int
) -> list[int]:
    """The tokens with which an environment begins. ValueError for more than `most` of them."""
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    if text.template.system is not None and observation[0]["role"] != "system":
        begins = text.template.with_system([], example)
        observation = [{"role": "system", "content": begins[0].content}, *observation]
    is_text = len(observation) == 1 and observation[0]["role"] == "user"
    turns = replace(text.turn_tokens, variables=text.variables_of(example))
    prompt = turns.prompt(observation[0]["content"] if is_text else observation)
    if len(prompt) > most:
        raise ValueError(
            f"it begins with a prompt of {len(prompt)} tokens, more than "
            f"generation.max_prompt_length={most}; raise it to at least {len(prompt)}"
        )
    return prompt


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
    says_so = False
    won_B = np.zeros(len(rollout.conversations), bool)
    for row, one in enumerate(rollout.conversations):
        for turn in one.turns:
            says_so |= "won" in turn.reply.info
            won_B[row] |= bool(turn.reply.info.get("won"))
    return won_B if says_so else None


def conversation_metrics(rollout: Rollout) -> Metrics:
    """Turns and their lengths, how conversations ended, and what environments count and cost."""
    conversations = rollout.conversations
    total = len(conversations)
    turns = [turn for one in conversations for turn in one.turns]
    replies = [turn.reply for turn in turns]
    ended = Counter(one.ended for one in conversations)
    metrics = {
        "conversation/turns": len(turns) / total,
        "conversation/max_turns": max(len(one.turns) for one in conversations),
        "conversation/turn_tokens": sum(one.end - one.begin for one in turns) / len(turns),
        "conversation/answer_tokens": sum(len(one.tokens) for one in replies) / len(turns),
        "time/environments": sum(one.seconds for one in replies),
    }
    for why in ("done", "tokens", "turns", "failed"):
        metrics[f"conversation/ended_by_{why}"] = ended[why] / total
    failures = Counter(one.failure for one in replies if one.failure)
    for kind, count in sorted(failures.items()):
        metrics[f"conversation/failed_by_{kind}"] = count / total

    # What environments count, such as calls of tools: means over conversations.
    totals = Counter()
    for reply in replies:
        totals.update({name: float(value) for name, value in reply.info.items()})
    ours = {*metrics, "conversation/tool_success"}
    for name in sorted(totals):
        # `turns` is counted here already
        key = f"conversation/{name}"
        if key in ours:
            key = f"conversation/info_{name}"
        metrics[key] = totals[name] / total
    if totals["tool_calls"] and "tool_errors" in totals:
        metrics["conversation/tool_success"] = 1 - totals["tool_errors"] / totals["tool_calls"]
    return metrics
