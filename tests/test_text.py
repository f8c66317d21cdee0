"""Text to learn from: files become tokens once, tokens become full rows, and a row is the same row for everybody."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
import recorded_runs
import run_worker
from collecting import collect
from conftest import random_params, set_mesh
from recorded_runs import metrics_of

from tunix_lite.algorithms.sft import SFT
from tunix_lite.basics.errors import ConfigError
from tunix_lite.commands.program import _refuse_run_on_text
from tunix_lite.learner.policy import make_policy
from tunix_lite.learner.rows import RowLayout
from tunix_lite.models import decoder
from tunix_lite.models.attention import one_sequence_per_row
from tunix_lite.runs.fingerprint import check_same_run
from tunix_lite.runs.setup import find_parts
from tunix_lite.settings.compose import compose
from tunix_lite.tasks import token_files
from tunix_lite.tasks.processes import Processes
from tunix_lite.tasks.sources import batch_at
from tunix_lite.tasks.text import TextTask, TextTaskConfig
from tunix_lite.tasks.token_files import TokenFiles

TEXTS = [f"The {i}th story: " + "so it went on " * (i % 7) + "and ended." for i in range(40)]


def stream_of(tokenizer, texts) -> list[int]:
    """All documents, joined with the tokens that begin and end one."""
    return [t for text in texts for t in (*tokenizer.start_ids, *tokenizer.encode(text), tokenizer.end_id)]


def tokens_of(files: TokenFiles, split: str = "train", width: int = 16) -> list[int]:
    """All tokens of a split, put together from its rows: each begins with the last of the one before."""
    rows = files.rows(split, width)
    read = [rows.tokens(i).tolist() for i in range(len(rows))]
    assert all(len(row) == width for row in read[:-1]), "only the last may be shorter"
    assert all(row[0] == before[-1] for row, before in zip(read[1:], read))
    return read[0][:1] + [t for row in read for t in row[1:]]


def written(folder: Path, kind: str, texts=TEXTS) -> Path:
    """A file of these documents."""
    file = folder / f"corpus.{kind.partition('-')[0]}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts))
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), file, row_group_size=7)
    return file


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("part_bytes", [5, 97, 2**20])
def test_documents_are_the_same_wherever_the_parts_of_a_file_begin(kind, part_bytes, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "PART_BYTES", part_bytes)
    files = TokenFiles(str(written(tmp_path, kind)), tokenizer, tmp_path / "cache")
    assert tokens_of(files) == stream_of(tokenizer, TEXTS)


def test_a_text_file_is_one_document(tokenizer, tmp_path, monkeypatch):
    text = "\n".join(TEXTS)
    (tmp_path / "book.txt").write_text(text)
    for part_bytes in (2**25, 300):
        monkeypatch.setattr(token_files, "PART_BYTES", part_bytes)
        files = TokenFiles(str(tmp_path / "book.txt"), tokenizer, tmp_path / "cache")
        found = tokens_of(files)
        assert tokenizer.decode(found) == text and found.count(tokenizer.end_id) == 1
        assert found[-1] == tokenizer.end_id and found[: len(tokenizer.start_ids)] == [*tokenizer.start_ids]
        assert files.rows("train", 16).num_documents == 1


def test_the_example_of_the_page(tokenizer, tmp_path):
    """Documents of three and of two tokens, rows of four: worked by hand."""
    file = written(tmp_path, "jsonl", ["abc", "de"])
    files = TokenFiles(str(file), tokenizer, tmp_path)
    a, b = ([*tokenizer.start_ids, *tokenizer.encode(text)] for text in ("abc", "de"))
    end, width = tokenizer.end_id, len(a) + 1
    rows = files.rows("train", width)
    assert rows[0] == {"row": 0, "split": "train"} and len(rows) == 2
    assert rows.tokens(0).tolist() == [*a, end] and rows.tokens(1).tolist() == [end, *b, end]
    assert rows.segment_ids(0).tolist() == [1] * width
    assert rows.segment_ids(1).tolist() == [1, *[2] * (len(b) + 1)]


def text_task(tokenizer, tmp_path, width=24, hosts=(0, 1), **settings) -> TextTask:
    file = settings.pop("file", None) or written(tmp_path, "jsonl")
    config = TextTaskConfig(train=str(file), row_tokens=width, cache=str(tmp_path / "cache"), **settings)
    index, count = hosts

    def own_rows(num: int) -> np.ndarray:
        return np.arange(num) * count // num == index

    return config.task(tokenizer, 1, width - 1, processes=Processes(own_rows=own_rows))


def test_special_tokens_in_text_are_letters_unless_they_are_meant(tokenizer, tmp_path):
    name = tokenizer.backend.id_to_token(tokenizer.end_id)
    texts = [f"it says {name} here", "and here not"]
    for how, ends in (("text", 2), ("control", 3)):
        files = TokenFiles(str(written(tmp_path, "jsonl", texts)), tokenizer, tmp_path, special_tokens_in_data=how)
        assert tokens_of(files).count(tokenizer.end_id) == ends
    files = TokenFiles(str(tmp_path / "corpus.jsonl"), tokenizer, tmp_path, special_tokens_in_data="error")
    with pytest.raises(ValueError, match="corpus.jsonl, byte 0 and after: .*holds the special token"):
        files.rows("train", 16)


@pytest.mark.parametrize(
    "line, wrong",
    [
        (b'{"text": 3}\n', "'text' holds 3, and should be a text"),
        (b'{"body": "x"}\n', "'text' is not there.*the row has .*body.*task.field=NAME"),
        (b'{"text": "\\ud800"}\n', "lone surrogate"),
        (b'{"text": \n', "not JSON"),
        (b'{"text": "\xff"}\n', "not UTF-8"),
    ],
)
def test_a_malformed_document_is_named(line, wrong, tokenizer, tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "good"}\n' + line)
    with pytest.raises(ValueError, match=f"bad.jsonl, byte {'0 and after' if 'surrogate' in wrong else 17}: .*{wrong}"):
        TokenFiles(str(tmp_path / "bad.jsonl"), tokenizer, tmp_path).rows("train", 16)


def test_what_is_held_out_is_not_trained_on(tokenizer, tmp_path):
    files = TokenFiles(str(written(tmp_path, "jsonl")), tokenizer, tmp_path, held_out_every=8)
    trained = [text for i, text in enumerate(TEXTS) if (i + 1) % 8]
    assert tokens_of(files) == stream_of(tokenizer, trained)
    assert tokens_of(files, "held_out") == stream_of(tokenizer, TEXTS[7::8])


def test_files_that_look_alike_in_two_folders_have_tokens_of_their_own(tokenizer, tmp_path):
    """Of the same name, size and time."""
    streams = []
    for text in ("a b c", "d e f"):
        folder = tmp_path / text[0]
        folder.mkdir()
        os.utime(written(folder, "jsonl", [text]), ns=(10**18, 10**18))
        streams.append(tokens_of(TokenFiles(str(folder / "*.jsonl"), tokenizer, tmp_path / "cache")))
    assert streams == [stream_of(tokenizer, [text]) for text in ("a b c", "d e f")]


# ---- processes


def test_hosts_read_disjoint_shares_of_the_same_batch(tokenizer, tmp_path, monkeypatch):
    """Of 1, 2 and 4 hosts: what they read of a batch is apart, and together it is the batch of one."""
    reads = []
    tokens = token_files.TokenRows.tokens
    monkeypatch.setattr(token_files.TokenRows, "tokens", lambda rows, i: reads.append(i) or tokens(rows, i))
    batches = {}
    for count in (1, 2, 4):
        parts, shares = [], []
        for index in range(count):
            task = text_task(tokenizer, tmp_path, hosts=(index, count))
            examples = task.batch(8, seed=3, step=5)
            reads.clear()
            arrays = task.demonstrations(examples)
            shares.append(set(reads))
            assert len(reads) == 8 // count
            own = task.processes.own_rows(8)
            parts.append((own, arrays, task.segments(examples)))
        assert len(set.union(*shares)) == sum(map(len, shares)) == 8
        whole = np.zeros_like(parts[0][1][0])
        for own, (one, *_), _ in parts:
            whole[own] = one[own]
        for _, (_, *masks), segments in parts:  # what all know of all rows, for the weights
            np.testing.assert_array_equal(masks[0], parts[0][1][1])
            np.testing.assert_array_equal(masks[1], parts[0][1][2])
            np.testing.assert_array_equal(segments, parts[0][2])
        batches[count] = whole
    np.testing.assert_array_equal(batches[2], batches[1])
    np.testing.assert_array_equal(batches[4], batches[1])


def test_processes_tokenise_disjoint_parts(tokenizer, tmp_path, monkeypatch):
    """Each makes its own, and waits for the others; of one that never comes it makes those, too."""
    monkeypatch.setattr(token_files, "PART_BYTES", 200)
    made = []
    make = TokenFiles.make
    monkeypatch.setattr(TokenFiles, "make", lambda files, i: made.append(i) or make(files, i))
    file = str(written(tmp_path, "jsonl"))
    alone = TokenFiles(file, tokenizer, tmp_path / "alone")
    wanted = tokens_of(alone)
    count = len(alone.parts)
    assert made == list(range(count)) and count > 5

    made.clear()
    monkeypatch.setattr(token_files, "PATIENCE", 0.2)
    first = TokenFiles(file, tokenizer, tmp_path / "two", process=(0, 2))
    assert tokens_of(first) == wanted and made[: -(-count // 2)] == list(range(0, count, 2))
    made.clear()
    second = TokenFiles(file, tokenizer, tmp_path / "two", process=(1, 2))
    assert tokens_of(second) == wanted and not made, "they are there"
    assert second.rows("train", 16).digest == alone.rows("train", 16).digest


# ---- epochs


@pytest.mark.parametrize("last, size, each", [("drop", 8, 125), ("keep", 7, 143), ("drop", 7, 142)])
def test_every_row_comes_once_an_epoch(last, size, each):
    rows = [{"n": i} for i in range(1000)]
    orders = []
    for epoch in range(3):
        found = [batch_at(rows, size, 1, epoch * each + i, last) for i in range(each)]
        assert {len(batch) for batch in found[:-1]} == {size}
        assert len(found[-1]) == (1000 - size * (each - 1) if last == "keep" else size)
        numbers = [row["n"] for batch in found for row in batch]
        assert len(numbers) == len(set(numbers)) == (1000 if last == "keep" else size * each)
        orders.append(numbers)
    assert orders[0] != orders[1] != orders[2]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run of three epochs: the corpus, its folder and what it says."""
    folder = tmp_path_factory.mktemp("text")
    corpus = run_worker.write(folder / "corpus.jsonl")
    return corpus, folder / "alone", run_worker.learn_text(str(corpus), str(folder / "alone"), "1,1")


def test_a_run_of_epochs_takes_every_row_once_and_says_where_it_is(alone):
    _, folder, said = alone
    batches = said["batches"][1:]  # the first is that of the check
    num_rows = max(map(max, batches)) + 1
    each = -(-num_rows // 4)
    assert num_rows % 4, "the last batch of an epoch is a smaller one"
    assert len(batches) == 3 * each
    for epoch in range(3):
        taken = sorted(row for batch in batches[epoch * each : (epoch + 1) * each] for row in batch)
        assert taken == list(range(num_rows))
    before, *rows = metrics_of(folder)
    assert before["step"] == 0 and before["eval/loss"] > rows[-1]["eval/loss"] > 0
    assert [row["step"] for row in rows] == list(range(1, 3 * each + 1))
    assert rows[each]["train/epoch"] == pytest.approx(1 + 1 / each) and rows[-1]["train/epoch"] == 3
    assert rows[-1]["train/learning_rate"] < rows[0]["train/learning_rate"] / 4, "the schedule spans the run"
    log = (folder / "train.log").read_text()
    assert f"step {each}/{3 * each} 33% | epoch 1.00 of 3" in log and f"{3 * each} steps (3 epochs of {each})" in log


def test_a_run_on_text_resumes_as_if_it_had_never_stopped(alone, tmp_path):
    """From a checkpoint in the middle of an epoch and of the file."""
    corpus, folder, said = alone
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    shutil.copytree(f"{folder}-cache", f"{again}-cache")
    steps = sorted(int(path.name) for path in (again / "checkpoints").iterdir() if path.name.isdigit())
    shutil.rmtree(again / "checkpoints" / str(steps[-1]))
    resumed = run_worker.learn_text(str(corpus), str(again), "1,1")
    assert f"resumed from step {steps[-2]}" in (again / "train.log").read_text()
    assert resumed["batches"][1:] == said["batches"][1 + steps[-2] :]
    assert metrics_of(again) == metrics_of(folder)
    for name, values in said["params"].items():
        np.testing.assert_array_equal(resumed["params"][name], values, err_msg=name)


@pytest.mark.wide
def test_two_processes_train_on_text_as_one_does(alone, tmp_path):
    corpus, folder, together = alone[0], tmp_path / "alone", tmp_path / "together"
    said = run_worker.learn_text(str(corpus), str(folder), "2,1")
    both = processes.run_together(run_worker.__file__, 2, 2, tmp_path, "learn_text", str(corpus), str(together), "2,1")
    for one in both:
        assert one["batches"] == said["batches"]
        for name, values in said["params"].items():
            np.testing.assert_allclose(one["params"][name], values, atol=1e-6, err_msg=name)
    # After the check before the run, which reads the first batch: each reads the rows of its own device.
    halves = [one["reads"][4:] for one in both]
    assert sorted([*halves[0], *halves[1]]) == sorted(row for batch in said["batches"][1:] for row in batch)
    assert "eval/loss" in metrics_of(together)[-1]
    for mine, rows in zip(metrics_of(together), metrics_of(folder)):
        assert mine.keys() == rows.keys()
        for name, value in rows.items():
            assert mine[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_a_file_in_the_place_of_tokens_is_an_error_and_not_waited_for(tokenizer, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("one")
    files = TokenFiles(str(corpus), tokenizer, tmp_path / "cache")
    files.folders[0].parent.mkdir(parents=True)
    files.folders[0].write_text("no folder")
    with pytest.raises(ValueError, match="cannot be written"):
        files.rows("train", 8)


# ---- the loss


@pytest.mark.parametrize("attention", ["documents", pytest.param("across", marks=pytest.mark.wide)])
def test_the_loss_of_packed_text_is_that_of_each_document_alone(attention, cfg, tokenizer, tmp_path):
    """In float64, value and gradient; of a last batch with fewer rows, too: the mean over its tokens."""
    width, count = 24, 3
    cfg = dataclasses.replace(cfg, vocab_size=512, num_layers=1, pattern=("global",))
    task = text_task(tokenizer, tmp_path, width, attention=attention)
    examples = [task.config.source.train[i] for i in (0, 5, len(task.config.source.train) - 1)]
    with jax.enable_x64(True):
        set_mesh(1, 1)
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), random_params(cfg))
        batch, _, _ = collect(SFT(), None, task, None, examples, None)
        policy = make_policy(cfg, None, 1.0, jnp.float64)
        rows, _ = RowLayout("none", 2, width - 1, num_rows=count + 1).lay_out(batch)

        def packed(params):
            return SFT().loss(policy.scores(params, rows), rows)[0]

        # Documents of a row, cut where it ends, from the texts themselves.
        stream = stream_of(tokenizer, TEXTS)
        ends = np.cumsum([len(stream_of(tokenizer, [text])) for text in TEXTS])
        pieces = []
        for example in examples:
            begin = example["row"] * (width - 1)
            row = np.array(stream[begin : begin + width])
            cuts = [] if attention == "across" else [e - begin for e in ends if 0 < e - begin < len(row)]
            pieces += np.split(row, cuts)

        def each_alone(params):
            total = 0.0
            for piece in pieces:
                tokens = jnp.asarray(piece)[None]
                meta = one_sequence_per_row(jnp.ones_like(tokens, bool))
                hidden = decoder.forward(params, cfg, tokens, meta, jnp.float64)[0]
                logprobs = jax.nn.log_softmax(decoder.logits(params, cfg, hidden))[0, :-1]
                total -= logprobs[jnp.arange(len(piece) - 1), tokens[0, 1:]].sum()
            return total / sum(len(piece) - 1 for piece in pieces)

        found, wanted = (jax.jit(jax.value_and_grad(f))(params) for f in (packed, each_alone))
    assert found[0] == pytest.approx(float(wanted[0]), rel=1e-6)
    for one, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1])):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# ---- settings


@pytest.mark.parametrize(
    "settings, wrong",
    [
        (["algorithm=grpo"], "no prompts to sample from; set algorithm=sft"),
        (["algorithm=dpo"], "task=text is for algorithm=sft"),
        (["generation.max_new_tokens=9"], "leave out generation.max_prompt_length and max_new_tokens"),
        (["training.packing=sequences"], "set training.packing=none"),
        (["evaluation.num_examples=4"], "set evaluation.num_examples=0"),
        (["evaluation.loss_examples=4", "task.held_out_every=0"], "task.held_out_every=10 holds out one in ten"),
        (
            ["training.best_metric=eval/loss", "training.keep_best_checkpoints=1", "task.held_out_every=0"],
            "task.held_out_every=10 holds out one in ten",
        ),
        (["generation.long_prompts=drop"], "set generation.long_prompts=error"),
        (["task.attention=all"], "documents or across"),
        (["task.row_tokens=1024"], "set task.row_tokens=512"),
        (["task.held_out_every=1"], "must be 0, or 2 or more"),
        (["task.train=."], "name files in it by a pattern"),
        (["training.max_steps=3", "training.epochs=2"], "training.max_steps=null counts epochs"),
        (["training.last_batch=keep"], "give training.epochs"),
        (["task.train=none.txt"], "names no file"),
        (["task.cache=/proc/none"], "task.cache=/proc/none cannot be written: No such file"),
        (["task.cache=gs://bucket/text"], "no address can stand here"),
        (["training.prompts_per_step=9996", "training.epochs=1"], "an epoch of .* rows has no batch"),
    ],
)
def test_settings_that_text_cannot_have_say_what_would_be_right(settings, wrong, tmp_path):
    words = [f"task.train={written(tmp_path, 'jsonl')}", f"task.cache={tmp_path}", "task.row_tokens=16"]
    with pytest.raises(ConfigError, match=wrong):
        find_parts(compose(["algorithm=sft", "task=text", *words, *settings]))


def test_the_best_of_text_is_by_its_held_out_loss(tmp_path):
    words = ["algorithm=sft", "task=text", f"task.train={written(tmp_path, 'jsonl')}"]
    assert compose(words).training.best_metric == "eval/loss"
    assert compose([]).training.best_metric == "eval/accuracy"
    assert compose([*words, "training.best_metric=train/loss"]).training.best_metric == "train/loss"


def test_epochs_in_place_of_steps_are_named_in_words():
    ours, theirs = {"training": {"last_batch": "drop"}}, {"training": {}}
    with pytest.raises(ValueError, match=r"training.epochs: epochs are counted here, updates there\."):
        check_same_run(ours, theirs, "run", force=False)


@pytest.mark.wide
def test_a_killed_run_on_text_goes_on_to_the_same_bits(tmp_path):
    """kill -9 in the middle of an epoch, where the text is two files: metrics, arrays and held-out loss are the same."""
    for name in ("one", "two"):
        run_worker.write(tmp_path / f"{name}.jsonl")
    words = [f"task.train={tmp_path}/*.jsonl", f"task.cache={tmp_path}/cache", "evaluation.interval_steps=2"]
    run = recorded_runs.Run((*run_worker.TEXT, *words, "model.mesh_shape=[[2,2],[fsdp,tp]]"))
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert recorded_runs.started(run, whole).wait(timeout=300) == 0
    epochs = [row["train/epoch"] for row in metrics_of(whole)[1:]]
    step = next(i for i, epoch in enumerate(epochs, 1) if 1 < epoch < 2)
    started = recorded_runs.started(run, again)
    while recorded_runs.last_logged_step(again) <= step + 2:  # a checkpoint within the epoch is there
        assert started.poll() is None
        time.sleep(0.02)
    os.killpg(started.pid, signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL and recorded_runs.last_logged_step(again) < len(epochs)
    assert recorded_runs.started(run, again).wait(timeout=300) == 0
    assert "resumed from step" in (again / "train.log").read_text()
    assert metrics_of(again) == metrics_of(whole) and "eval/loss" in metrics_of(whole)[2]
    assert recorded_runs.checkpoint_of(again) == recorded_runs.checkpoint_of(whole)


@pytest.mark.wide
def test_tensor_parallelism_learns_the_same_of_text(alone, tmp_path):
    corpus, folder, said = alone
    other = run_worker.learn_text(str(corpus), str(tmp_path / "tp"), "1,2")
    assert other["batches"] == said["batches"]
    for name, values in said["params"].items():
        np.testing.assert_allclose(other["params"][name], values, atol=1e-5, err_msg=name)
    for mine, rows in zip(metrics_of(tmp_path / "tp"), metrics_of(folder), strict=True):
        for name in {"eval/loss", "eval/perplexity", "train/loss"} & rows.keys():
            assert mine[name] == pytest.approx(rows[name], rel=1e-5), name


def test_a_run_on_text_is_not_graded_on_the_sums_of_the_default_task(tmp_path):
    _refuse_run_on_text(tmp_path)  # of a copy without its fingerprint nobody knows
    for task, is_refused in (("text.TextTaskConfig", True), ("files.FilesTaskConfig", False)):
        about = {"model": {}, "task": {"_target_": f"tunix_lite.tasks.{task}"}}
        (tmp_path / "fingerprint.json").write_text(json.dumps(about))
        with pytest.raises(ConfigError, match="name a task, such as") if is_refused else contextlib.nullcontext():
            _refuse_run_on_text(tmp_path)
