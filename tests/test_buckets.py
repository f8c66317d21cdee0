"""Runs, weights and data in a bucket. The store here is a folder behind fsspec; tests/bucket_kills.py has real ones."""

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tunix_lite.basics import addresses, buckets
from tunix_lite.basics.addresses import address_of, place_here
from tunix_lite.basics.buckets import bring, send
from tunix_lite.basics.untrusted import as_path
from tunix_lite.distributed import bucket_folder
from tunix_lite.distributed.bucket_folder import BucketFolder, held_bucket, hold_bucket
from tunix_lite.models.source import BUNDLED
from tunix_lite.models.tokenizer import Tokenizer
from tunix_lite.tasks.token_files import TokenFiles, files_of

RUN = "s3://bucket/runs/one"


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    """What s3:// and gs:// hold, as a folder. This machine has its copies in another one."""
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem

    class Objects(LocalFileSystem):
        """As in a store, objects appear as a whole, and one can be created only if it is not there."""

        def pipe_file(self, path, value, mode="overwrite"):
            half = Path(tempfile.mkstemp(dir=tmp_path)[1])
            half.write_bytes(value)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            (os.link if mode == "create" else os.replace)(half, path)

    folder = tmp_path / "store"
    system = DirFileSystem(path=str(folder), fs=Objects(auto_mkdir=True))
    monkeypatch.setattr(buckets, "file_system", lambda scheme: system)
    monkeypatch.setenv(addresses.COPIES, str(tmp_path / "here"))
    buckets.brought.cache_clear()
    (folder / "bucket" / "runs" / "one" / buckets.LEASE).mkdir(parents=True)
    return folder


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(bucket_folder, "BEAT", 0.05)
    monkeypatch.setattr(bucket_folder, "DEAD", 0.4)
    monkeypatch.setattr(bucket_folder, "COPY", 0.05)


def put(folder: Path, **files: str) -> None:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def put_checkpoint(folder: Path, step: int, whole: bool = True) -> None:
    files = {"default/a": f"arrays of {step}", "digests.json": f"digests of {step}"}
    put(folder / "checkpoints" / str(step), **files, **({buckets.WHOLE: ""} if whole else {}))


# ---- addresses


def test_an_address_has_one_place_and_the_place_one_address(store, tmp_path):
    place = tmp_path / "here" / "gs" / "bucket" / "a" / "run"
    assert place_here("gs://bucket/a/run") == place and place_here("gs:/bucket/a/run/") == place
    assert address_of(place) == "gs://bucket/a/run"
    assert address_of(tmp_path / "elsewhere") is None and address_of(tmp_path / "here" / "gs" / "bucket") is None


REFUSED = {
    "hf://some/adapter": "gs://BUCKET/NAME and s3://BUCKET/NAME can be used",
    "gs://bucket": "give the bucket and a name in it, gs://BUCKET/NAME",
    "s3://bucket/../other/run": "give the bucket and a name in it",
}


@pytest.mark.parametrize("address", REFUSED)
def test_other_addresses_are_refused_with_what_can_be_used(address):
    with pytest.raises(ValueError, match=f"^{address}: .*{REFUSED[address]}"):
        place_here(address)


def test_a_missing_package_is_one_line_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match=r"^s3:// needs s3fs: pip install -e '\.\[s3\]'$"):
        buckets.file_system("s3")


# ---- what is brought


def test_a_file_and_a_folder_are_brought_once_and_again_when_they_change(store):
    put(store / "bucket", **{"data/train.jsonl": "1", "model/config.json": "{}", "model/a.safetensors": "12"})
    assert as_path("s3://bucket/data/train.jsonl").read_text() == "1"
    model = bring("s3://bucket/model", ("*.json",))
    assert sorted(file.name for file in model.iterdir()) == ["config.json"]
    config = model / "config.json"
    known = config.stat().st_ino, config.stat().st_mtime_ns
    bring("s3://bucket/model")
    assert (config.stat().st_ino, config.stat().st_mtime_ns) == known
    assert (model / "a.safetensors").read_text() == "12"
    put(store / "bucket", **{"model/config.json": '{"a": 1}'})
    (store / "bucket" / "model" / "a.safetensors").unlink()
    bring("s3://bucket/model")
    assert config.read_text() == '{"a": 1}' and not (model / "a.safetensors").exists()


def test_what_is_not_there_is_named(store):
    with pytest.raises(ValueError, match=r"^s3://bucket/nothing: the bucket has nothing of that name$"):
        as_path("s3://bucket/nothing")


def test_only_whole_checkpoints_are_brought_and_a_step_made_anew_replaces_the_old_one(store):
    there = store / "bucket" / "runs" / "one"
    put(there, **{"model.json": "{}", "metrics.jsonl": "3 rows"})
    put_checkpoint(there, 2)
    put_checkpoint(there, 4, whole=False)
    place = bring(RUN)
    assert [path.name for path in (place / "checkpoints").iterdir()] == ["2"]
    # what a dead run of this machine left: a later checkpoint, and more rows
    put_checkpoint(place, 6)
    put(place, **{"metrics.jsonl": "7 rows", "samples/step_000007.jsonl": "", ".hydra/config.yaml": "now"})
    put(there / "checkpoints" / "2", **{"digests.json": "of another machine", "default/b": "other arrays"})
    bring(RUN, is_mine=True)
    names = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    step = {"checkpoints/2/default/a", "checkpoints/2/default/b", "checkpoints/2/digests.json"}
    assert names == {"model.json", "metrics.jsonl", ".hydra/config.yaml", *step, f"checkpoints/2/{buckets.WHOLE}"}
    assert (place / "metrics.jsonl").read_text() == "3 rows"
    assert (place / "checkpoints" / "2" / "default" / "b").read_text() == "other arrays"


def test_a_copy_without_arrays_is_never_taken_for_a_whole_one(store):
    there = store / "bucket" / "runs" / "one"
    put(there, **{"model.json": "{}"})
    put_checkpoint(there, 2)
    put(there / "checkpoints" / "2", **{"about.json": "{}"})
    place = bring(RUN, is_mine=True, with_arrays=False)
    assert sorted(path.name for path in (place / "checkpoints" / "2").iterdir()) == ["about.json", buckets.WHOLE]
    bring(RUN)
    assert (place / "checkpoints" / "2" / "default" / "a").read_text() == "arrays of 2"


def test_a_name_that_leads_out_of_the_place_is_refused(store, monkeypatch, tmp_path):
    listing = {"bucket/data/../../../outside": {"size": 1, "ETag": "1"}}
    monkeypatch.setattr(buckets.file_system("s3"), "find", lambda *_, **__: listing)
    with pytest.raises(
        ValueError, match=r"s3://bucket/data holds '\.\./\.\./\.\./outside', which is no name of a file"
    ):
        bring("s3://bucket/data")


def test_files_of_text_are_brought_by_their_pattern(store):
    corpus = {"corpus/a.jsonl": '{"text": "a"}', "corpus/more/b.jsonl": '{"text": "b"}', "corpus/c.bin": "0"}
    put(store / "bucket", **corpus)
    patterns = {"*.jsonl": ["a"], "**/*.jsonl": ["a", "b"], "a.jsonl": ["a"]}
    for pattern, texts in patterns.items():
        files = TokenFiles(f"s3://bucket/corpus/{pattern}", Tokenizer.load(BUNDLED), store / "cache")
        assert [*files.texts(None)] == texts, pattern
        assert files.rows("train", 8).num_documents == len(texts)
    assert not (place_here("s3://bucket/corpus") / "c.bin").exists()
    with pytest.raises(ValueError, match=r"s3://bucket/corpus/\*.txt names no file"):
        files_of("s3://bucket/corpus/*.txt")


def test_what_is_too_large_is_refused_before_it_is_brought(store, monkeypatch):
    listing = {"bucket/data/a.bin": {"size": 10**15, "ETag": "1"}}
    monkeypatch.setattr(buckets.file_system("s3"), "find", lambda *_, **__: listing)
    wrong = r"s3://bucket/data has 1,000,000\.0 GB to bring, .* GB left; TUNIX_LITE_BUCKETS=FOLDER names another disk"
    with pytest.raises(ValueError, match=wrong):
        bring("s3://bucket/data")


def test_results_of_a_command_go_to_the_bucket(store):
    place = place_here("s3://bucket/model")
    put(place, **{"old.json": "1"})
    began = time.time() + 0.01
    time.sleep(0.02)
    put(place, **{"config.json": "{}"})
    send(place, began)
    assert [path.name for path in (store / "bucket" / "model").iterdir()] == ["config.json"]


# ---- who has the folder


def owners(store: Path) -> list[str]:
    files = sorted((store / "bucket" / "runs" / "one" / buckets.LEASE).iterdir())
    return [json.loads(file.read_text())["owner"] for file in files]


def test_a_second_run_is_refused_while_the_first_gives_signs_of_life(store, quick, capsys):
    with hold_bucket(place_here(RUN), "first", None, 1):
        with pytest.raises(ValueError, match=f"^{RUN} is in use by first, and was for 0.6 s: end that run"):
            BucketFolder(place_here(RUN), "second").take(None, 0.6)
        assert f"waiting for {RUN}, which is in use by first" in capsys.readouterr().err
    began = time.monotonic()
    BucketFolder(place_here(RUN), "second").take(None, 0)
    assert time.monotonic() - began < 0.3 and owners(store) == ["second"], "the first left it"


def test_a_dead_run_is_waited_for_once_and_cannot_write_when_it_wakes(store, quick, capsys):
    """By the clock of who waits: the time of the objects is not looked at."""
    first = BucketFolder(place_here(RUN), "first")
    first.take(None, 0)
    began = time.monotonic()
    second = BucketFolder(place_here(RUN), "second")
    second.take(None, 0)
    assert 0.4 <= time.monotonic() - began < 2
    assert "first gave no sign of life for 0.4 s, by the clock of this machine" in capsys.readouterr().err
    put(place_here(RUN), **{"metrics.jsonl": "of the first"})
    for work in (first.beat, first.copy):
        with pytest.raises(OSError, match=f"{RUN} was taken by second"):
            work()
    assert owners(store) == ["second"] and not (store / "bucket" / "runs" / "one" / "metrics.jsonl").exists()


def test_the_last_owner_of_this_machine_is_not_waited_for(store, quick):
    BucketFolder(place_here(RUN), "first").take(None, 0)
    began = time.monotonic()
    BucketFolder(place_here(RUN), "second").take("first", 0)
    assert time.monotonic() - began < 0.3


@pytest.mark.parametrize("is_same, has_all", [(True, True), (False, True), (True, False)])
def test_what_a_dead_run_left_here_stays_if_no_other_run_wrote_since(is_same, has_all, store, quick):
    """A kill comes before the copy: the next start of this machine goes on with what is in the place. One that was
    killed before it had brought everything may have left files of an older run."""
    is_kept = is_same and has_all
    place, there = place_here(RUN), store / "bucket" / "runs" / "one"
    put(there, **{"model.json": "{}", "metrics.jsonl": "1 row"})
    put_checkpoint(there, 2)
    bring(RUN)
    first = BucketFolder(place, "first")
    first.take(None, 0)
    first.has_all = has_all
    first.beat()
    put(place, **{".lock": "first", "metrics.jsonl": "3 rows", "samples/step_000003.jsonl": "new"})
    if not is_same:
        BucketFolder(place, "of another machine").take("first", 0)
    bucket_folder.bring_run(place)  # the look before the lock
    assert (place / "metrics.jsonl").read_text() == ("3 rows" if is_kept else "1 row")
    put(place, **{".lock": "second"})
    with hold_bucket(place, "second", "first", 0):
        assert (place / "metrics.jsonl").read_text() == ("3 rows" if is_kept else "1 row")
        assert (place / "samples" / "step_000003.jsonl").exists() == is_kept
    assert (there / "metrics.jsonl").read_text() == ("3 rows" if is_kept else "1 row")


def test_of_two_that_see_the_folder_free_at_once_one_takes_it(store, quick, monkeypatch):
    second = BucketFolder(place_here(RUN), "second")
    looks = iter([(0, {})])
    real = second._newest
    monkeypatch.setattr(second, "_newest", lambda: next(looks, None) or real())
    with (
        hold_bucket(place_here(RUN), "first", None, 1),
        pytest.raises(ValueError, match="is in use by first"),
    ):
        second.take(None, 0.3)


def test_of_many_that_wait_for_a_dead_run_one_gets_its_folder(store, quick):
    BucketFolder(place_here(RUN), "dead").take(None, 0)
    has_it, refused = [], []

    def wait(name: str) -> None:
        try:
            with hold_bucket(place_here(RUN), name, None, 0.5):
                has_it.append(name)
                time.sleep(1.5)
        except ValueError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=wait, args=(f"run {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(has_it) == 1 and len(refused) == 3 and all(f"in use by {has_it[0]}" in text for text in refused)


# ---- what is copied


def test_files_are_copied_while_the_run_lives_and_at_its_end(store, quick):
    place, there = place_here(RUN), store / "bucket" / "runs" / "one"
    with hold_bucket(place, "first", None, 0):
        put(place, **{"train.log": "a line", ".lock": "first"})
        deadline = time.monotonic() + 5
        while not (there / "train.log").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (there / "train.log").read_text() == "a line"
        put(place, **{"status.json": "{}"})
    assert (there / "status.json").exists() and not (there / ".lock").exists() and held_bucket(place) is None


def test_a_checkpoint_is_whole_only_when_all_of_it_and_all_before_it_is_there(store, quick, monkeypatch):
    place, there = place_here(RUN), store / "bucket" / "runs" / "one"
    with hold_bucket(place, "first", None, 0):
        held = held_bucket(place / "checkpoints")
        put(place, **{"metrics.jsonl": "2 rows"})
        half = place / "checkpoints" / "2.orbax-checkpoint-tmp"
        put(half, **{"default/a": "arrays", "digests.json": "of 2"})
        monkeypatch.setattr(held._fs, "put", lambda *_: (_ for _ in ()).throw(TimeoutError("no answer")))
        with pytest.raises(
            OSError, match=r"s3://bucket/runs/one/checkpoints/2 cannot be reached \(TimeoutError: no answer\)"
        ):
            held.save(half, place / "checkpoints" / "2")
        assert not (there / "checkpoints" / "2" / buckets.WHOLE).exists()
        monkeypatch.undo()
        held.save(half, place / "checkpoints" / "2")
        assert (there / "checkpoints" / "2" / buckets.WHOLE).exists()
        assert (there / "metrics.jsonl").read_text() == "2 rows"


def test_checkpoints_that_orbax_removes_here_go_in_the_bucket_but_never_the_newest(store, quick):
    place, there = place_here(RUN), store / "bucket" / "runs" / "one"
    put_checkpoint(there, 2)
    put_checkpoint(there, 4)
    put_checkpoint(there, 6, whole=False)
    with hold_bucket(place, "first", None, 0):
        left = lambda: sorted(path.parent.name for path in there.glob(f"checkpoints/*/{buckets.WHOLE}"))  # noqa: E731
        assert left() == ["2", "4"]
        for file in sorted((place / "checkpoints").rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        held_bucket(place).copy()
        assert left() == ["2", "4"], "the folder is gone here, and not the run"
        put_checkpoint(place, 4)
        held_bucket(place).copy()
        assert left() == ["4"]
        put_checkpoint(place, 8)
        held_bucket(place).copy()
        assert left() == ["4"] and not [*there.glob("checkpoints/6/default/*")], "a dead run had not finished it"
