"""The Tinker face: bytes as the SDK writes and reads them, fair turns, and nothing lost that was acknowledged."""

import json
import random
import shutil
import sqlite3
import threading
import time
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from server_thread import in_thread
from test_trainer import ONE
from test_trainer import TINY as OF_A_TRAINER
from tinker_client import PROTOBUF, RANK, SEED, TARGETS, Client, InPython, OverHttp, loop, request_bytes

import tunix_lite
from tunix_lite.serving.bad_call import BadCall
from tunix_lite.serving.face import ServerSettings
from tunix_lite.serving.tinker import wire, work
from tunix_lite.serving.tinker.app import TinkerServer
from tunix_lite.serving.tinker.bodies import TinkerLimits
from tunix_lite.serving.tinker.store import DONE, FAILED, Store, StoreDamaged, TinkerRequest
from tunix_lite.serving.tinker.work import next_turn
from tunix_lite.training_clients.data import Datum

pytestmark = pytest.mark.skipif(find_spec("aiohttp") is None, reason="needs aiohttp")
# What the SDK 0.38.0 sends for forward(one datum, "ppo", {"clip_low_threshold": 0.8, "x": "t"}).
FORWARD = bytes.fromhex(
    "0a03613a6210071a640a100a0e0a0c01000000020000002c01000012300a0d7461726765745f746f6b656e73121f0a180200000000000000"
    "2c0100000000000070110100000000001802220103121e0a077765696768747312130a0c000000000000003f0000803f1801220103220370"
    "706f2a1d0a12636c69705f6c6f775f7468726573686f6c64119a9999999999e93f30013a080a017812031201743a1f0a12636c69705f6c6f"
    "775f7468726573686f6c641209099a9999999999e93f"
)
# What protobuf writes for two results; the SDK reads them.
LOGPROBS = (
    "0a0b41727261795265636f726412470a0b41727261795265636f726412360a086c6f6770726f6273122a0a0c000080bf000000c0000040c0"
    "1218000000000000000008000000000000000c00000000000000180118021a130a086c6f73733a73756d110000000000000440"
)
SAMPLES = "0a1608011208050000002c0100001a08000000bf000080be12080000c07f000080bf"


def test_a_request_is_read_as_the_sdk_wrote_it():
    asked = wire.wire_message("Request", FORWARD)
    assert (asked.model_id, asked.seq_id, asked.loss, asked.forward_only) == ("a:b", 7, "ppo", True)
    assert wire.loss_settings(asked) == {"clip_low_threshold": 0.8, "x": "t"}
    [datum] = wire.data_of(asked)
    assert datum.tokens == [1, 2, 300]
    assert datum.targets.tolist() == [2, 300, 70000]
    assert datum.weights.tolist() == [0.0, 0.5, 1.0]


def test_results_are_the_bytes_that_protobuf_writes():
    rows = [np.array([-1.0, -2.0]), np.array([-3.0])]
    assert wire.write_forward_backward(rows, {"loss:sum": 2.5}).hex() == LOGPROBS
    sample = SimpleNamespace(tokens=[5, 300], logprobs=[-0.5, -0.25], stop_reason="length")
    assert wire.write_samples([sample], [None, -1.0]).hex() == SAMPLES


def test_garbage_is_refused_and_nothing_else():
    draw = random.Random(0)
    for length in range(len(FORWARD)):
        broken = bytearray(FORWARD[:length] if length % 2 else FORWARD)
        for _ in range(length % 5):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        try:
            wire.data_of(wire.wire_message("Request", bytes(broken)))
        except BadCall:
            continue
    with pytest.raises(BadCall, match="no protobuf message"):
        wire.wire_message("Request", b"\x1a\xff\xff\xff\xff\x0f")
    with pytest.raises(BadCall, match="sparse"):
        wire.data_of(wire.wire_message("Request", bytes.fromhex("1a0a12080a01611203120100")))


def test_sessions_take_turns_and_a_models_requests_keep_their_order():
    numbers = {"a:train:0": 1, "b:train:0": 1}
    # The client a is there first, with many requests, the first of them last.
    came = [("a:train:0", n) for n in (3, 2, 4, 1)] + [("b:train:0", 1)]
    waiting = [TinkerRequest(i, f"{owner}:{seq}", owner, seq, "optim_step") for i, (owner, seq) in enumerate(came)]
    turns, done = {}, []
    while taken := next_turn(waiting, turns, numbers):
        [request] = taken
        waiting.remove(request)
        numbers[request.owner] += 1
        done.append(request.id)
    assert done == ["a:train:0:1", "b:train:0:1", "a:train:0:2", "a:train:0:3", "a:train:0:4"]
    assert not waiting
    waiting = [TinkerRequest(9, "a:train:0:9", "a:train:0", 9, "optim_step")]
    assert next_turn(waiting, turns, numbers) == [], "the requests before it have not come"


# ---- the server, over a trainer that only counts: a model is one number, and its loss is their product


class Counting:
    """Stands for tunix_lite.Trainer. A gradient is the sum of the tokens, so an order or a loss of requests shows."""

    def __init__(self):
        # closed, it stops a step in its middle
        self.gate = threading.Event()
        self.gate.set()
        self.num_full = 0

    def adapter(self, rank, seed, targets):
        return CountingClient(self, float(rank))

    def full(self):
        assert self.num_full == 0, "there is room for one"
        self.num_full += 1
        client = CountingClient(self, 1.0)
        client.lora = None
        return client

    def sampler(self, path):
        client = CountingClient(self, 0.0)
        if path is not None:
            client.load(path)
        return client

    def close(self):
        pass


class CountingClient:
    def __init__(self, trainer, weight):
        self.trainer = trainer
        self.weight = weight
        self.grads = 0.0
        self.lora = "adapters"

    def forward_backward(self, data, loss, settings):
        if loss != "cross_entropy":
            raise ValueError(f"loss={loss}: there is none")
        self.grads = 10 * self.grads + sum(sum(one.tokens) for one in data)
        return SimpleNamespace(loss=self.weight, logprobs=[[self.weight] * len(one.tokens) for one in data])

    def optim_step(self, learning_rate=1e-4, **_):
        assert self.trainer.gate.wait(60)
        self.weight += learning_rate * self.grads
        self.grads = 0.0
        return {"weight": self.weight}

    def save(self, path, optimizer):
        path.write_text(repr(self.weight))

    def load(self, path, optimizer=True):
        self.weight = float(path.read_text())

    def sample(self, prompts, count, settings):
        return [
            SimpleNamespace(tokens=[how.seed % 100], logprobs=[self.weight], stop_reason="eos")
            for how in settings
            for _ in range(count)
        ]

    def logprobs(self, prompts):
        return [[None, *[self.weight] * (len(prompt) - 1)] for prompt in prompts]

    def close(self):
        self.trainer.num_full -= self.lora is None


LIMITS = TinkerLimits("bundled", max_length=64, max_waiting=8)


@contextmanager
def listening(folder, trainer=None, **settings):
    """A client of a server on this folder, and the server."""
    store = Store(folder)
    server = TinkerServer(trainer or Counting(), store, LIMITS, ServerSettings(port=0, **settings))
    try:
        with in_thread(server.application()) as address:
            yield Client(address, settings.get("api_key") or "none"), server
    finally:
        server.worker.close()
        store.close()


def test_a_model_trains_in_the_order_of_its_numbers(tmp_path):
    with listening(tmp_path) as (client, _):
        model = client.model(rank=2)
        # The SDK sends the chunks of a call side by side, so they may come in any order.
        step = client.optim_step(model, 3)
        second = client.forward_backward(model, 2, 7)
        first = client.forward_backward(model, 1, 5)
        assert json.loads(client.result(step)) == {"metrics": {"weight": 2 + 10 * 5 + 7}}
        assert client.result(first) == client.result(second) == wire.write_forward_backward([[2.0]], {"loss:sum": 2.0})
        # A client that heard no answer sends the same request again.
        assert client.optim_step(model, 3) == step
        assert json.loads(client.result(client.optim_step(model, 4, 0.0))) == {"metrics": {"weight": 59.0}}
        info = client.post("get_info", {"model_id": model})
        assert (info["is_lora"], info["lora_rank"], info["model_data"]["model_name"]) == (True, 2, "bundled")


def test_what_was_acknowledged_outlives_the_server(tmp_path):
    """The folder as it is at any moment, taken by another server: all goes on as if the first had not ended."""
    trainer = Counting()
    with listening(tmp_path / "first", trainer) as (client, server):
        model = client.model()
        client.result(client.forward_backward(model, 1, 5))
        client.result(client.optim_step(model, 2))
        saved = client.post("save_weights", {"model_id": model, "seq_id": 3, "path": "one"})
        path = json.loads(client.result(saved))["path"]
        body = {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 0}
        sampler = json.loads(client.result(client.post("save_weights_for_sampler", body)))["sampling_session_id"]
        client.result(client.forward_backward(model, 5, 7))
        # The server ends in the middle of this one.
        trainer.gate.clear()
        last = client.optim_step(model, 6)
        assert server.store.result(last["request_id"])[0] not in (DONE, FAILED)
        shutil.copytree(tmp_path / "first", tmp_path / "second")
        trainer.gate.set()
        expected = client.result(last)
    assert json.loads(expected) == {"metrics": {"weight": 2.0 + 5 + 7}}
    with listening(tmp_path / "second") as (client, _):
        assert client.result(last) == expected, "done again, with the gradients of before"
        chunks = [{"type": "encoded_text", "tokens": [1, 2]}]
        body = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 2, "prompt": {"chunks": chunks}}
        asked = client.post("asample", body | {"sampling_params": {"seed": 42}, "prompt_logprobs": True})
        assert len(asked["sample_sequence_ids"]) == 2
        sample = SimpleNamespace(tokens=[42], logprobs=[7.0], stop_reason="eos")
        assert client.result(asked) == wire.write_samples([sample] * 2, [None, 7.0])
        new = {"session_id": model.split(":")[0], "model_seq_id": 1, "path": path, "optimizer": True}
        copy = json.loads(client.result(client.post("load_weights", new)))["model_id"]
        assert json.loads(client.result(client.optim_step(copy, 1, 0.0))) == {"metrics": {"weight": 7.0}}
        _, run = client.get(f"training_runs/{copy}")
        assert json.loads(run)["training_run_id"] == copy


def test_a_failed_gradient_makes_no_step(tmp_path):
    with listening(tmp_path) as (client, _):
        model = client.model()
        client.forward_backward(model, 1, 5)
        failed = json.loads(client.result(client.forward_backward(model, 2, 5, b"gspo")))
        assert failed == {"error": "loss=gspo: there is none", "category": "user"}
        refused = json.loads(client.result(client.optim_step(model, 3)))
        assert refused["category"] == "user" and "gradients since then are dropped" in refused["error"]
        client.forward_backward(model, 4, 3)
        assert json.loads(client.result(client.optim_step(model, 5))) == {"metrics": {"weight": 5.0}}


def test_hostile_requests_harm_nobody(tmp_path):
    with listening(tmp_path, api_key="tml-secret", max_body=100_000) as (client, _):
        model = client.model()
        assert client.call("create_session", b"x" * 10_000_000)[0] == 413
        assert Client(client.address, "tml-wrong").call("create_session", {})[0] == 401
        assert Client(client.address, "tml-wrong").get("healthz")[0] == 200
        for path, body, kind, status in [
            ("create_session", b"[" * 50_000, "application/json", 400),
            ("optim_step", {"model_id": "other", "adam_params": {}}, "application/json", 404),
            ("optim_step", {"model_id": model, "adam_params": {"beta1": "x"}}, "application/json", 400),
            ("forward_backward", b"\xff" * 100, "application/x-protobuf", 400),
            ("save_weights", {"model_id": model, "path": "../../other"}, "application/json", 400),
            ("retrieve_future", {"request_id": "nobody"}, "application/json", 404),
        ]:
            found, raw = client.call(path, body, kind=kind)
            assert found == status and json.loads(raw)["detail"], (path, body, raw)
        assert json.loads(client.result(client.optim_step(model, 1, 0.0))) == {"metrics": {"weight": 2.0}}


def test_a_session_holds_up_no_other_one(tmp_path):
    """Requests whose turn never comes filled the line of all clients, for a day and over restarts."""
    with listening(tmp_path) as (client, server):
        stuck, other = client.model(), client.model()
        sent = [client.call("optim_step", {"model_id": stuck, "seq_id": 100 + n})[0] for n in range(9)]
        assert sent == [200] * LIMITS.max_waiting + [429]
        assert json.loads(client.result(client.optim_step(other, 1, 0.0))) == {"metrics": {"weight": 2.0}}
        # What the others wait for always has room.
        assert b"metrics" in client.result(client.optim_step(stuck, 1, 0.0))
        # The session ends, and so does what waits of it.
        waiting = {"request_id": f"{stuck}:100"}
        client.post(f"sessions/{stuck.split(':')[0]}/finish", {})
        assert b"the session has ended" in client.result(waiting)
        assert len(server.store.waiting()) == 0

        # One that a server of before had kept is given up at the start.
        server.store.accept(stuck, 200, "optim_step", b"{}")
        shutil.copytree(tmp_path, tmp_path.with_name("again"))
    with listening(tmp_path.with_name("again")) as (client, server):
        assert len(server.store.waiting()) == 0
        assert b"the session has ended" in client.result({"request_id": f"{stuck}:200"})


def test_a_number_belongs_to_one_request(tmp_path):
    trainer = Counting()
    with listening(tmp_path, trainer) as (client, _):
        model = client.model()
        first = client.forward_backward(model, 1, 5)
        client.result(first)
        assert client.forward_backward(model, 1, 5) == first
        status, raw = client.call("forward_backward", request_bytes(model, 1, [Datum([7], [1])], "ppo"), kind=PROTOBUF)
        assert status == 400 and "with other data" in json.loads(raw)["detail"]
        status, raw = client.call("optim_step", {"model_id": model, "seq_id": 1})
        assert status == 400 and "was forward_backward, not optim_step" in json.loads(raw)["detail"]
        # Without a number each is a request of its own, also while the one before is under way.
        trainer.gate.clear()
        several = [client.post("optim_step", {"model_id": model})["request_id"] for _ in range(3)]
        several.append(client.forward_backward(model, 0, 3)["request_id"])
        trainer.gate.set()
        assert several == [f"{model}:{number}" for number in (2, 3, 4, 5)]


def test_a_record_of_another_version_is_one_line(tmp_path):
    store = Store(tmp_path / "a")
    store.accept("a:train:0", 0, "create_model", b"{}")
    store.close()
    with sqlite3.connect(tmp_path / "a" / "journal.sqlite") as db:
        db.execute("INSERT INTO records VALUES ('model', 'm', '{\"newer\": 1}')")
    db.close()
    with pytest.raises(StoreDamaged, match="is not as expected; .*another version of this server") as raised:
        Store(tmp_path / "a")
    assert "\n" not in str(raised.value)


def test_a_full_disk_is_said_in_words_and_loses_nothing(tmp_path, capfd):
    trainer = Counting()
    with listening(tmp_path / "a", trainer) as (client, server):
        model = client.model()
        client.result(client.forward_backward(model, 1, 5))
        trainer.gate.clear()
        step = client.optim_step(model, 2)
        store = server.store
        [pages] = store._db.execute("PRAGMA page_count").fetchone()
        store._db.execute(f"PRAGMA max_page_count = {pages}")
        status, raw = 200, b""
        for number in range(3, 7):
            data = [Datum([7] * 2000, [1] * 2000)]
            status, raw = client.call("forward_backward", request_bytes(model, number, data, "ppo"), kind=PROTOBUF)
            if status != 200:
                break
        assert status == 503, raw
        assert json.loads(raw)["detail"] == "the journal of this server cannot be written: database or disk is full"

        # The worker ends, with one line and no traceback; what it did not do is done by the next server.
        store._db.execute("PRAGMA query_only = 1")
        trainer.gate.set()
        deadline = time.monotonic() + 30
        while server.worker.is_alive:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(work.WorkerFailed, match=r"^the worker failed: .*readonly"):
            server.check()
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        assert client.get("healthz")[0] == 503
    assert "Traceback" not in capfd.readouterr().err
    with listening(tmp_path / "b") as (client, _):
        assert json.loads(client.result(step)) == {"metrics": {"weight": 2.0 + 5}}


POSTS = {
    "create_session": {},
    "create_sampling_session": {"session_id": "?", "sampling_session_seq_id": 0, "base_model": "bundled"},
    "create_model": {"session_id": "?", "model_seq_id": 1, "base_model": "bundled", "lora_config": {"rank": 2}},
    "optim_step": {"model_id": "?", "seq_id": 1, "adam_params": {"learning_rate": 1.0}},
    "save_weights": {"model_id": "?", "seq_id": 1, "path": "a"},
    "save_weights_for_sampler": {"model_id": "?", "seq_id": 1, "sampling_session_seq_id": 1},
    "load_weights": {"model_id": "?", "seq_id": 1, "path": "tinker://a"},
    "asample": {
        "sampling_session_id": "?",
        "seq_id": 0,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [2, 3]}]},
        "sampling_params": {"max_tokens": 4, "stop": ["a"], "seed": 1, "temperature": 1.0},
    },
    "retrieve_future": {"request_id": "?"},
}
ODD = [None, True, -1, 2**70, 1e400, float("nan"), "", "\ud800", "x" * 70_000, [], [[]], [None], {}, {"": []}, "../a"]


def broken(value, draw):
    """The value with one of its parts replaced or left out."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(sorted(value))
        if draw.random() < 0.1:
            return {key: one for key, one in value.items() if key != name}
        return value | {name: broken(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.5:
        return [broken(value[0], draw), *value[1:]]
    return draw.choice(ODD)


def test_no_body_makes_the_server_fail(tmp_path):
    """Whatever a field holds: the request is refused, or done, or fails alone; never 500, and never the worker."""
    draw = random.Random(0)
    with listening(tmp_path) as (client, server):
        model = client.model()
        session = model.split(":")[0]
        body = {"session_id": session, "sampling_session_seq_id": 7, "base_model": "bundled"}
        sampler = client.post("create_sampling_session", body)["sampling_session_id"]
        names = {"session_id": session, "model_id": model, "sampling_session_id": sampler, "request_id": f"{model}:0"}
        for i in range(400):
            path = draw.choice(sorted(POSTS))
            whole = POSTS[path] | {name: names[name] for name in POSTS[path] if name in names}
            if "seq_id" in whole:
                whole["seq_id"] = i + 1000 if path == "asample" else server.store.get("model", model).next_seq
            given = broken(whole, draw)
            status, raw = client.call(path, given)
            assert status in (200, 400, 404, 410, 413), (path, given, raw)
            if status != 200:
                assert json.loads(raw)["detail"], (path, given, raw)
            elif "request_id" in (answer := json.loads(raw)):
                assert b"Error:" not in client.result(answer), (path, given, client.result(answer))
        for path in ("training_runs/%00", "sessions?offset=99999999999999999999", "x"):
            assert client.get(path)[0] in (200, 404)
        number = server.store.get("model", model).next_seq
        assert b"metrics" in client.result(client.optim_step(model, number, 0.0))


def test_models_of_all_weights_take_turns(tmp_path):
    """There is room for one on the devices. The other one comes back with its gradients."""
    with listening(tmp_path) as (client, _):
        first = client.model(base="bundled:full")
        client.result(client.forward_backward(first, 1, 5))
        second = client.model(base="bundled:full")
        client.result(client.forward_backward(second, 1, 7))
        for model, expected in ((first, 1.0 + 5), (second, 1.0 + 7)):
            assert json.loads(client.result(client.optim_step(model, 2))) == {"metrics": {"weight": expected}}
        client.result(client.post("save_weights", {"model_id": first, "seq_id": 3, "path": "one"}))
    with listening(tmp_path) as (client, _):
        assert json.loads(client.result(client.optim_step(first, 4, 0.0))) == {"metrics": {"weight": 6.0}}


def test_what_a_client_leaves_behind_is_deleted_after_a_day(tmp_path):
    with listening(tmp_path) as (client, server):
        model, other = client.model(), client.model()
        for one in (model, other):
            client.result(client.forward_backward(one, 1, 5))
            client.result(client.optim_step(one, 2))
            path = json.loads(client.result(client.post("save_weights", {"model_id": one, "seq_id": 3, "path": "a"})))
            body = {"model_id": one, "seq_id": 4, "sampling_session_seq_id": 0}
            client.result(client.post("save_weights_for_sampler", body))
        stuck = client.optim_step(model, 9)
        now = time.time()
        server._began = now - 2 * 86400
        server.store.get("session", model.split(":")[0]).heard = now - 2 * 86400
        server._tidy(now)
        assert b"the session has ended" in client.result(stuck)
        assert client.call("optim_step", {"model_id": model, "seq_id": 5, "adam_params": {}})[0] == 410
        assert len(list((tmp_path / "models").iterdir())) == len(list((tmp_path / "samplers").iterdir())) == 1
        assert len(list((tmp_path / "checkpoints").rglob("a.3"))) == 2, "what has a name is kept"
        new = {"session_id": other.split(":")[0], "model_seq_id": 1, "path": path["path"], "optimizer": True}
        assert b"model_id" in client.result(client.post("load_weights", new))
        assert json.loads(client.result(client.optim_step(other, 5, 0.0))) == {"metrics": {"weight": 7.0}}


def test_a_second_server_on_the_folder_is_refused(tmp_path):
    store = Store(tmp_path)
    store.accept("a:train:0", 0, "create_model", b"{}")
    with pytest.raises(sqlite3.Error):
        Store(tmp_path)
    store.close()


# ---- a loop over HTTP gives the numbers of the same loop in Python, bit for bit, also when the server is killed in it


TINY = [*OF_A_TRAINER, ONE, "rollout.num_slots=4", "rollout.chunk=4"]
LENGTHS = {"max_prompt_length": 16, "max_new_tokens": 16}


@pytest.fixture(scope="module")
def trainer():
    with tunix_lite.Trainer(*TINY, **LENGTHS) as trainer:
        yield trainer


def new_client(trainer, base: str):
    return trainer.full() if base == "bundled:full" else trainer.adapter(rank=RANK, seed=SEED, targets=TARGETS)


@pytest.mark.parametrize("base", ["bundled", pytest.param("bundled:full", marks=pytest.mark.wide)])
def test_a_loop_over_http_is_the_loop_in_python_though_its_server_dies(trainer, base, tmp_path):
    """After the first step another server takes the folder as it is at that moment."""
    client = new_client(trainer, base)
    expected = loop(InPython(client), 2)
    client.save(tmp_path / "mine")
    client.close()
    with ExitStack() as servers:
        http, first = servers.enter_context(listening(tmp_path / "first", trainer))
        face = OverHttp(http, base)

        def dies(step: int) -> None:
            if step == 0:
                shutil.copytree(tmp_path / "first", tmp_path / "state")
                # Of all weights there is one client at a time.
                first.worker.live.forget(face.model)
                face.client, others[0] = servers.enter_context(listening(tmp_path / "state", trainer))

        others = [None]
        assert loop(face, 2, dies) == expected
        checkpoint = others[0].store.get("checkpoint", face.save())
        others[0].worker.live.forget(face.model)
    both = []
    for folder in (tmp_path / "mine", tmp_path / "state" / checkpoint.file):
        client = new_client(trainer, base)
        client.load(folder)
        both.append([np.asarray(x) for x in jax.tree.leaves(client.state)])
        client.close()
    assert len(both[0]) == len(both[1]) > 0 and all(map(np.array_equal, *both))
