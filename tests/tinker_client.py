"""A client of the Tinker face with as little code as possible, and a loop of it beside the same loop in Python.

It needs no SDK. It asks again while the server is away, as the SDK does.
"""

import itertools
import json
import time
import urllib.error
import urllib.request
from http.client import HTTPException

import numpy as np

from tunix_lite.serving.tinker import wire
from tunix_lite.training_clients.data import Datum

PROTOBUF = "application/x-protobuf"
RANK, SEED = 2, 3
# What the server gives adapters to, unless the client says less.
TARGETS = ".*/(q|k|v|o|gate|up|down)"
PPO = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 1.0}
PROMPTS = [[2, 17, 5], [2, 40, 41, 42, 43]]
SAMPLING = {"max_tokens": 6, "temperature": 1.0}


class Client:
    """HTTP with a key. patience: seconds for which it asks again while nobody answers."""

    def __init__(self, address, key="none", patience=0.0):
        self.address = address
        self.key = key
        self.patience = patience

    def call(self, path, body, kind="application/json", method="POST"):
        """Status and body of the answer."""
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {"Content-Type": kind, "X-API-Key": self.key}
        deadline = time.monotonic() + self.patience
        while True:
            request = urllib.request.Request(f"{self.address}/api/v1/{path}", raw, headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as error:
                return error.code, error.read()
            except (OSError, HTTPException):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def post(self, path, body, **how):
        status, raw = self.call(path, body, **how)
        assert status == 200, raw
        return json.loads(raw)

    def get(self, path):
        return self.call(path, None, method="GET")

    def result(self, future):
        status = 408
        while status == 408:
            status, raw = self.call("retrieve_future", {"request_id": future["request_id"]})
        assert status == 200, raw
        return raw

    def model(self, rank=RANK, seed=None, base="bundled"):
        """The name of a new model in a new session."""
        session = self.post("create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]
        lora = {"rank": rank} if seed is None else {"rank": rank, "seed": seed}
        body = {"session_id": session, "model_seq_id": 0, "base_model": base, "lora_config": lora}
        return json.loads(self.result(self.post("create_model", body)))["model_id"]

    def forward_backward(self, model, number, token, loss=b"cross_entropy"):
        """Of one sequence of one token, whose target is 1."""
        return self.post(
            "forward_backward", request_bytes(model, number, [Datum([token], [1])], loss.decode()), kind=PROTOBUF
        )

    def optim_step(self, model, number, rate=1.0):
        return self.post("optim_step", {"model_id": model, "seq_id": number, "adam_params": {"learning_rate": rate}})


def request_bytes(model, number, data, loss, settings=None, forward_only=False) -> bytes:
    """A forward_backward request, as the SDK 0.38.0 writes it."""
    request = wire.CLASSES["Request"](model_id=model, seq_id=number, loss=loss, forward_only=forward_only)
    for datum in data:
        one = request.data.add()
        one.chunks.add().text.tokens = np.asarray(datum.tokens, "<i4").tobytes()
        tensors = {"target_tokens": (np.asarray(datum.targets, "<i8"), 2)}
        for name in ("weights", "logprobs", "advantages"):
            if getattr(datum, name) is not None:
                tensors[name] = np.asarray(getattr(datum, name), "<f4"), 1
        for name, (values, dtype) in tensors.items():
            one.inputs.add(name=name, tensor={"dense": values.tobytes(), "dtype": dtype})
    for name, value in (settings or {}).items():
        request.settings.add(name=name, value={"number": value})
    return request.SerializeToString()


def read_result(raw) -> tuple[float, list[list[float]]]:
    """Loss and log-probabilities of a result of forward_backward."""
    result = wire.wire_message("Gradient", raw)
    [column] = [one.column for one in result.rows.columns]
    ends = np.frombuffer(column.ends, "<i8") // 4
    values = np.frombuffer(column.values, "<f4")
    return result.metrics[0].value, [values[a:b].tolist() for a, b in itertools.pairwise(ends)]


def read_samples(raw) -> tuple[list[tuple[list[int], list[float], int]], list[float | None]]:
    """(tokens, log-probabilities, stop reason) of each sample, and the log-probabilities of the prompt."""
    result = wire.wire_message("Samples", raw)
    samples = [
        (np.frombuffer(one.tokens, "<i4").tolist(), np.frombuffer(one.logprobs, "<f4").tolist(), one.reason)
        for one in result.sequences
    ]
    # The first token has no log-probability.
    return samples, [None, *np.frombuffer(result.prompt_logprobs, "<f4").tolist()[1:]]


class OverHttp:
    """A model of a server, with the calls of a loop."""

    def __init__(self, client: Client, base="bundled"):
        self.client = client
        self.model = client.model(seed=SEED, base=base)
        self.number = 0
        self.draws = 0

    def _next(self) -> dict:
        self.number += 1
        return {"model_id": self.model, "seq_id": self.number}

    def gradient(self, data, loss, settings=None):
        self.number += 1
        raw = request_bytes(self.model, self.number, data, loss, settings)
        return read_result(self.client.result(self.client.post("forward_backward", raw, kind=PROTOBUF)))

    def update(self):
        body = self._next() | {"adam_params": ADAM}
        return json.loads(self.client.result(self.client.post("optim_step", body)))["metrics"]

    def sample(self, prompts, count, seed):
        body = self._next() | {"sampling_session_seq_id": self.draws}
        self.draws += 1
        answer = self.client.result(self.client.post("save_weights_for_sampler", body))
        sampler = json.loads(answer)["sampling_session_id"]
        results = []
        for i, prompt in enumerate(prompts):
            chunks = [{"type": "encoded_text", "tokens": prompt}]
            body = {"sampling_session_id": sampler, "seq_id": i, "num_samples": count, "prompt": {"chunks": chunks}}
            body |= {"sampling_params": SAMPLING | {"seed": seed}, "prompt_logprobs": True}
            # One at a time: what is drawn together may change the last digit of a log-probability.
            results.append(read_samples(self.client.result(self.client.post("asample", body))))
        return results

    def save(self) -> str:
        """The name of the checkpoint on the server."""
        body = self._next() | {"path": "final"}
        return json.loads(self.client.result(self.client.post("save_weights", body)))["path"]


class InPython:
    """The same calls on a client of a tunix_lite.Trainer."""

    def __init__(self, client):
        self.client = client

    def gradient(self, data, loss, settings=None):
        found = self.client.forward_backward(data, loss=loss, settings=settings)
        return found.loss, found.logprobs

    def update(self):
        return self.client.optim_step(**ADAM)

    def sample(self, prompts, count, seed):
        results = []
        for prompt in prompts:
            drawn = self.client.sample([prompt], count, SAMPLING | {"seed": seed})
            samples = [(s.tokens, s.logprobs, int(s.stop_reason == "length")) for s in drawn]
            [scores] = self.client.logprobs([prompt])
            results.append((samples, scores))
        return results


def loop(face, steps: int, after=lambda step: None) -> list:
    """SFT and PPO in turns; all that they give. after: called with the number of each step that ended."""
    draw = np.random.default_rng(0)
    seen = []
    for step in range(steps):
        texts = [draw.integers(4, 500, length).tolist() for length in (5, 14, 9)]
        data = [Datum(text[:-1], text[1:], weights=[0.5] * (len(text) - 1)) for text in texts]
        seen.append(face.gradient(data[:2], "cross_entropy"))
        seen.append(face.gradient(data[2:], "cross_entropy"))
        if step % 2:
            drawn = face.sample(PROMPTS, 3, seed=step)
            seen.append(drawn)
            learned = [
                datum_of_sample(prompt, sample, advantage)
                for prompt, (samples, _) in zip(PROMPTS, drawn)
                for sample, advantage in zip(samples, (1.0, -0.5, -0.5))
            ]
            seen.append(face.gradient(learned, "ppo", PPO))
        seen.append(face.update())
        after(step)
    return seen


def datum_of_sample(prompt, sample, advantage) -> Datum:
    tokens, logprobs, _ = sample
    before = len(prompt) - 1
    return Datum(
        prompt + tokens[:-1],
        prompt[1:] + tokens,
        logprobs=[0.0] * before + logprobs,
        advantages=[0.0] * before + [advantage] * len(tokens),
    )
