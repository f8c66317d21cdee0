"""Models of the hub, from a hub of our own on the loopback: what is fetched, what the cache saves, what errors say."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tunix_lite.models.hub import is_hub_name

ROOT = Path(__file__).parents[1]
SHA = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"config.json": b"{}", "tokenizer.json": b"{ }", "tokenizer.model": b"m", "chat_template.jinja": b"hi"}
SHARDS = {"model-00001-of-00002.safetensors": b"one", "model-00002-of-00002.safetensors": b"two"}
INDEX = {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", SHARDS))}).encode()}
OTHERS = "pytorch_model.bin original/params.json onnx/model.safetensors consolidated.safetensors README.md"
NOT_NEEDED = dict.fromkeys(OTHERS.split(), b"x")
REPOS = {
    "org/whole": CONFIG | SHARDS | INDEX | NOT_NEEDED,
    "org/one-file": CONFIG | {"model.safetensors": b"w"},
    "org/gated": CONFIG | {"model.safetensors": b"w"},
    "org/bin": CONFIG | {"pytorch_model.bin": b"x"},
    "org/broken": {},
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as a download asks for."""

    asked = []

    def do_GET(self):
        path = self.path.split("?")[0]
        self.asked.append(path)
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        parts = parts[2:] if api else parts
        repo, verb, revision, rest = "/".join(parts[:2]), parts[2], parts[3], "/".join(parts[4:])
        files = REPOS.get(repo)
        if files is None:
            self.answer(401, **{"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif repo == "org/broken":
            self.answer(418)
        elif revision not in ("main", SHA):
            self.answer(404, **{"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        elif verb == "revision":
            listed = [{"rfilename": file} for file in files]
            self.answer(200, json.dumps({"id": repo, "modelId": repo, "sha": SHA, "siblings": listed}).encode())
        elif verb == "tree":
            listed = [{"type": "file", "path": f, "size": len(b), "oid": f.encode().hex()} for f, b in files.items()]
            self.answer(200, json.dumps(listed).encode())
        elif repo == "org/gated":
            self.answer(403, **{"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to org/gated is restricted"})
        else:
            self.answer(200, files[rest], **{"ETag": f'"{rest.encode().hex()}"', "X-Repo-Commit": SHA})

    do_HEAD = do_GET

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    """hub(code, **environment): what `code` prints, in a process whose hub is ours. `hub.server` can be stopped."""
    pytest.importorskip("huggingface_hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.asked.clear()
    keep = {key: value for key, value in os.environ.items() if "proxy" not in key.lower() and not key.startswith("HF_")}
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    ours = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
    ours |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def run(code, **environment):
        code = f"from tunix_lite.models.hub import small_files, snapshot\n{code}"
        call = [sys.executable, "-c", code]
        done = subprocess.run(call, cwd=ROOT, env=keep | ours | environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.server = server
    yield run
    server.shutdown()
    server.server_close()


NAMES = """
def why(call, name):
    try:
        return str(call(name))
    except ValueError as error:
        assert error.__suppress_context__ or error.__context__ is None
        return str(error)
"""


def in_folder(folder: str) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in Path(folder).rglob("*") if file.is_file()}


def test_the_small_files_come_first_then_the_weights_and_then_nothing(hub):
    small = hub("print(small_files('org/whole'))").strip()
    assert in_folder(small) == {*CONFIG, *INDEX}
    assert not any("safetensors" in path and "index" not in path for path in Hub.asked)
    whole = hub("print(snapshot('org/whole'))").strip()
    assert whole == small and in_folder(whole) == {*CONFIG, *INDEX, *SHARDS}
    assert (Path(whole) / "model-00002-of-00002.safetensors").read_bytes() == b"two"
    before = len(Hub.asked)
    again = f"print(snapshot('org/whole'), small_files('org/whole'), snapshot('org/whole@{SHA}'))"
    assert hub(again).split() == [whole] * 3
    assert len(Hub.asked) == before  # the cache is asked, and no server
    hub.server.shutdown()
    hub.server.server_close()
    assert hub(again).split() == hub(again, HF_HUB_OFFLINE="1").split() == [whole] * 3
    (Path(whole) / "model-00001-of-00002.safetensors").unlink()
    said = hub(NAMES + "print(why(snapshot, 'org/whole'))")
    assert "org/whole is not, or not wholly, in the cache" in said and "refused" in said
    assert "the hub cannot be reached: " in said and "model.weights=FOLDER" in said


def test_a_part_of_a_model_that_a_cache_holds_is_made_whole(hub):
    whole = hub("print(snapshot('org/whole'))").strip()
    (Path(whole) / "model-00001-of-00002.safetensors").unlink()
    for tree in Path(whole).parents[1].glob("trees/*"):  # older versions of huggingface_hub kept no list
        tree.unlink()
    hub("snapshot('org/whole')")
    assert (Path(whole) / "model-00001-of-00002.safetensors").read_bytes() == b"one"


def test_every_way_a_model_cannot_be_had_says_what_to_do(hub):
    names = ["org/gated", "org/absent", "org/one-file@v9", "org/bin", "org/broken", "not a name"]
    code = NAMES + f"import json\nprint(json.dumps([why(snapshot, n) for n in {names}]))"
    gated, absent, revision, pytorch, broken, wrong = json.loads(hub(code))
    assert "org/gated is gated: accept its licence at https://huggingface.co/org/gated, then run `hf auth" in gated
    assert "there is no model org/absent on the hub" in absent and "private" in absent and "HF_TOKEN" in absent
    assert "org/one-file has no revision v9" in revision
    assert "org/bin has no *.safetensors files, and only safetensors are read" in pytorch
    assert "418" in broken and "org/broken" in broken
    assert "'not a name' is no model of the hub; one is written org/name" in wrong
    assert not any("\n" in said for said in (gated, absent, revision, pytorch, broken, wrong))


def test_without_a_network_the_way_round_is_told(hub, tmp_path):
    code = NAMES + "print(why(snapshot, 'org/one-file@v1'))"
    offline = hub(code, HF_HUB_OFFLINE="1")
    assert f"org/one-file is not, or not wholly, in the cache {tmp_path}/hub, and HF_HUB_OFFLINE=1 is set" in offline
    assert "`hf download org/one-file --revision v1`" in offline and "model.weights=FOLDER" in offline
    assert not Hub.asked


def test_a_name_of_the_hub_is_told_from_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    for name in ("google/gemma-3-1b-it", "Qwen/Qwen2.5-0.5B", "a/b@main", "a/b@refs/pr/1", "meta-llama/Llama-3.2-1B"):
        assert is_hub_name(name), name
    paths = "gemma ./a/b ~/a /a/b ../b a/b/c a/ a\\b/c a/b.git a--b/c a/-b runs/mine ä/b a/b@"
    for path in (*paths.split(), "", "a/b "):
        assert not is_hub_name(path), path
