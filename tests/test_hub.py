"""Models of the hub, from a hub of our own on the loopback: what is fetched, what the cache saves, what errors say."""

import json
from pathlib import Path

import pytest
from hub_server import Hub, serving

from tunix_lite.models.hub import is_hub_name

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


class Models(Hub):
    repos = {name: {SHA: files} for name, files in REPOS.items()}

    def do_GET(self):
        if "org/broken" in self.path:
            return self.answer(418)
        if "org/gated" in self.path and "/api/" not in self.path:
            why = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to org/gated is restricted"}
            return self.answer(403, **why)
        super().do_GET()


@pytest.fixture
def hub(tmp_path):
    pytest.importorskip("huggingface_hub")
    with serving(Models, tmp_path, "from tunix_lite.models.hub import small_files, snapshot") as run:
        yield run


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
    assert not any("safetensors" in path and "index" not in path for path in Models.asked)
    whole = hub("print(snapshot('org/whole'))").strip()
    assert whole == small and in_folder(whole) == {*CONFIG, *INDEX, *SHARDS}
    assert (Path(whole) / "model-00002-of-00002.safetensors").read_bytes() == b"two"
    before = len(Models.asked)
    again = f"print(snapshot('org/whole'), small_files('org/whole'), snapshot('org/whole@{SHA}'))"
    assert hub(again).split() == [whole] * 3
    assert len(Models.asked) == before  # the cache is asked, and no server
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
    assert not Models.asked


def test_a_name_of_the_hub_is_told_from_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    for name in ("google/gemma-3-1b-it", "Qwen/Qwen2.5-0.5B", "a/b@main", "a/b@refs/pr/1", "meta-llama/Llama-3.2-1B"):
        assert is_hub_name(name), name
    paths = "gemma ./a/b ~/a /a/b ../b a/b/c a/ a\\b/c a/b.git a--b/c a/-b runs/mine ä/b a/b@"
    for path in (*paths.split(), "", "a/b "):
        assert not is_hub_name(path), path
