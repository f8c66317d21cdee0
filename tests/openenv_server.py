"""The server of the examples, and words at which it misbehaves: python openenv_server.py PORT SESSIONS."""

import os
import sys
import time
from pathlib import Path

import uvicorn
from openenv.core.env_server import create_fastapi_app

sys.path.insert(0, str(Path(__file__).parent.parent))
from examples.guessing_server import Guess, GuessingGame, Hint


class Misbehaves(GuessingGame):
    def step(self, action, timeout_s=None, **options):
        word = action.message.strip()
        if word == "sleep":
            time.sleep(60)
        if word == "exit":
            os._exit(3)
        if word == "raise":
            raise KeyError("secret")
        if word == "nonsense":
            return Hint(text="a" * 100_000, reward=0.0)
        return super().step(action)


if __name__ == "__main__":
    app = create_fastapi_app(Misbehaves, Guess, Hint, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
