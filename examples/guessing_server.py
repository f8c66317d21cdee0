"""A guessing game as a server of OpenEnv, which runs apart from the training:

    uvicorn examples.guessing_server:app --port 8000
    python run_training.py task=openenv task.environment.observation_field=text

A model that says the last digit of the seed wins.
"""

from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """What the model sends."""

    message: str


class Hint(Observation):
    """What it reads."""

    text: str = ""
    guesses: int = 0


class GuessingGame(Environment):
    """One episode, of one conversation."""

    # every conversation has a session of its own
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.secret = 0
        self.guesses = 0

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> Hint:
        """Begins with a secret that depends on the seed alone."""
        self.secret = (seed or 0) % 10
        self.guesses = 0
        return Hint(text="Guess a digit.")

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Hint:
        """Says whether the secret is higher or lower than the guess, four times at most."""
        self.guesses += 1
        digits = [
            word.strip(".") for word in action.message.split() if word.strip(".").isdigit()
        ]
        guess = int(digits[-1]) if digits else -1
        if guess == self.secret:
            return Hint(text="right", guesses=self.guesses, reward=1.0, done=True)
        text = "higher" if guess < self.secret else "lower"
        return Hint(text=text, guesses=self.guesses, reward=0.0, done=self.guesses == 4)

    @property
    def state(self) -> State:
        """What OpenEnv shows of an episode."""
        return State(step_count=self.guesses)


app = create_fastapi_app(GuessingGame, Guess, Hint, max_concurrent_envs=256)
