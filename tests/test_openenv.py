"""A client of OpenEnv servers as an environment. Those that need the package run where it is installed."""

import importlib.util
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tunix_lite.environments.environment import Turn
from tunix_lite.environments.open_env import OpenEnv
from tunix_lite.environments.pool import EnvironmentPool, try_environment
from tunix_lite.environments.settings import ConversationConfig
from tunix_lite.errors import ConfigError
from tunix_lite.runs.setup import prepare
from tunix_lite.settings.compose import compose
from tunix_lite.tracking.rundir import RunDir

SERVER = Path(__file__).parent / "openenv_server.py"
INLINE = ConversationConfig(on_error="zero", workers=0)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def serving(sessions: int = 8):
    """The address of a server in a process of its own, which ends with the block."""
    port = free_port()
    process = subprocess.Popen([sys.executable, SERVER, str(port), str(sessions)])
    try:
        for _ in range(600):
            assert process.poll() is None, "the server ended"
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url():
    pytest.importorskip("openenv")
    with serving() as address:
        yield address


def text_of(observation):
    return f"{observation['text']} after {observation['guesses']}"


def as_guess(completion):
    return {"message": completion.split()[-1]}


# ---- without the package


def test_without_openenv_one_line_says_what_to_install(tmp_path):
    if importlib.util.find_spec("openenv"):
        pytest.skip("OpenEnv is installed")
    with pytest.raises(ConfigError, match=r"^task: task=openenv needs .*pip install -e '.\[openenv\]'"):
        prepare(compose(["task=openenv"]), RunDir(tmp_path))
    with pytest.raises(ValueError, match=r"pip install -e '.\[openenv\]'"):
        OpenEnv().reset({"seed": 7})


# ---- with it, and with a server in a process of its own


def test_an_episode_of_a_server_is_played(url):
    client = OpenEnv(url, observation_field="text")
    assert client.reset({"seed": 47}) == "Guess a digit."
    said = [client.step(guess) for guess in ("3", "9", "7")]
    assert said == [Turn("higher"), Turn("lower"), Turn("right", 1.0, True)]
    # the session is closed with the episode
    with pytest.raises(ValueError, match="the episode is over"):
        client.step("7")
    whole = OpenEnv(url, show=text_of, make_action=as_guess)
    assert whole.reset({"seed": 47}) == "Guess a digit. after 0"
    assert whole.step("The digit is 3") == Turn("higher after 1")
    whole.close()
    plain = OpenEnv(url)
    assert plain.reset({"seed": 1}) == '{"text": "Guess a digit.", "guesses": 0}'
    plain.close()


def test_a_server_that_is_not_there_is_one_message():
    pytest.importorskip("openenv")
    url = f"http://127.0.0.1:{free_port()}"
    failing = try_environment(OpenEnv(url), {"seed": 1}, INLINE).failing
    assert f"the OpenEnv server at task.environment.url={url} does not answer (" in failing
    assert "\n" not in failing


def test_what_a_server_does_wrong_is_one_message_and_one_conversation(url):
    with EnvironmentPool(OpenEnv(url, observation_field="text", answer_timeout=1), INLINE) as pool:
        for row in range(4):
            assert pool.reset(row, {"seed": 7}).result().turn.observation == "Guess a digit."
        failed = pool.step(0, "raise").result()
        assert failed.failure == "error" and "failed in step" in failed.message and "secret" in failed.message
        began = time.monotonic()
        failed = pool.step(1, "sleep").result()
        assert "did not answer step in 1 seconds (task.environment.answer_timeout)" in failed.message
        assert time.monotonic() - began < 20
        failed = pool.step(2, "nonsense").result()
        assert failed.failure == "not_a_turn" and "an observation of 100,000 characters" in failed.message
        assert pool.step(3, "7").result().turn == Turn("right", 1.0, True)
    for environment, message in (
        (OpenEnv(url, action_field="word"), "failed in step"),
        (OpenEnv(url, observation_field="board"), "have text, guesses"),
        (OpenEnv(url, reset_fields=("split",)), "reset_fields has 'split', which the example has not"),
    ):
        failing = try_environment(environment, {"seed": 7}, INLINE).failing
        assert message in failing and "\n" not in failing


def test_a_session_that_is_lost_between_turns_is_not_taken_for_another(url):
    client = OpenEnv(url)
    client.reset({"seed": 7})
    # what a server that was started again looks like to the client
    client._client.disconnect()
    with pytest.raises((ConnectionError, RuntimeError)):
        client.step("7")


def test_episodes_of_a_worker_that_died_go_on_in_the_next(url):
    settings = ConversationConfig(timeout=60)
    with EnvironmentPool(OpenEnv(url, observation_field="text"), settings) as pool:
        pool.reset(0, {"seed": 7}).result()
        assert pool.step(0, "3").result().turn == Turn("higher")
        worker = pool._pools[0]._workers[0].process
        worker.kill()
        worker.wait()
        assert pool.step(0, "9").result().turn == Turn("lower")
