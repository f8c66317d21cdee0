"""What guides of other projects promise, row by row: it works, or somebody who types it is told, or limits.md says so.

The guides are about distributed training by JAX, pmap, accelerate, DeepSpeed and torchrun. Each row is what their reader
types or looks for; those that simply work as printed are in tests/test_docs.py.
"""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
from test_docs import DOCS, ROOT, of_a_program, of_a_run
from test_hints import answer

from tunix_lite.config import plain
from tunix_lite.distributed import launcher
from tunix_lite.errors import ConfigError
from tunix_lite.planning.hardware import find_target
from tunix_lite.resolved.batch_size import plan_batch
from tunix_lite.settings import compose as composing
from tunix_lite.settings.compose import compose, compose_values
from tunix_lite.settings.flags import HYDRA, foreign_flags

# What now does what the guide wants: the command -> a setting that says so.
WORKS = [
    ("run_training.py model.mesh_shape=[[8,2],[fsdp,tp]]", "model.mesh_shape", [[8, 2], ["fsdp", "tp"]]),
    ("run_training.py sharding=data_parallel", "sharding.train.embed", None),
    ("run_training.py training.micro_batch_size=auto", "training.micro_batch_size", "auto"),
    (
        "run_training.py training.micro_batch_size=1 training.gradient_accumulation_steps=32 "
        "training.prompts_per_step=null",
        "training.gradient_accumulation_steps",
        32,
    ),
    (
        "run_training.py training.micro_batch_size=2 training.gradient_accumulation_steps=null",
        "training.micro_batch_size",
        2,
    ),
    ("run_training.py optimizer.scale_lr_with_devices=true", "optimizer.scale_lr_with_devices", True),
    ("run_training.py optimizer=sgd optimizer.momentum=0.9", "optimizer.momentum", 0.9),
    ("run_training.py task.system='Answer briefly.'", "task.system", "Answer briefly."),
    ("run_training.py model=random algorithm=sft", "model.weights", "random"),
    ("run_training.py model=gemma3_4b model.mesh_shape=[[8,2],[fsdp,tp]]", "model.weights", "google/gemma-3-4b-it"),
    ("run_training.py model.lora.rank=32 model.lora.alpha=64 model.lora.base=nf4", "model.lora.base", "nf4"),
    ("run_training.py project_name=tunix-grpo", "project_name", "tunix-grpo"),
    ("run_training.py launch.timeout=300", "launch.timeout", 300),
    ("tunix-lite check devices=4", "devices", 4),
    ("tunix-lite evaluate checkpoint=outputs/x evaluate.reference=answer", "evaluate.reference", "answer"),
    ("tunix-lite generate checkpoint=outputs/x step=60 prompt=Hi", "step", 60),
]
# What is refused, with words that lead on: what is typed -> the words of the message.
TOLD = [
    ("--dataset-id x/y --target-params 5000000 --epochs 10 --batch-size 32", "settings are written key=value"),
    ("--dataset-id x/y", "task=jsonl task.train=FILE"),
    ("--target-params 5000000", "model=random with model.architecture"),
    ("--epochs 10", "training.max_steps = epochs x rows"),
    ("--batch-size 32", "training.micro_batch_size"),
    ("--seq-len 256", "generation.max_new_tokens"),
    ("--max-length 100", "generation.max_new_tokens"),
    ("--bf16", "training.mixed_precision=bf16"),
    ("--checkpoint_dir /scratch/x", "hydra.run.dir=/scratch/x"),
    ("--multi-device", "all devices that JAX sees take part"),
    ("model=google/gemma-3-1b-it", "did you mean model.weights=google/gemma-3-1b-it"),
    ("model.name=google/gemma-3-27b-it", "write model.weights=google/gemma-3-27b-it"),
    ("model.max_seq_len=2048", "generation.max_prompt_length and generation.max_new_tokens"),
    ("model.mesh_shape=[1,1]", "'model.mesh_shape=[[1,1],[fsdp,tp]]'"),
    ("tuning.mode=qlora", "model.lora.rank=16 model.lora.base=nf4"),
    ("model.lora.r=32", "model.lora.rank=32"),
    ("model.lora.backend=bnb", "model.lora.base=nf4 or int8"),
    ("training.backend=unsloth", "model.lora.base=nf4 or int8"),
    ("distributed.backend=nccl", "by NCCL between GPUs"),
    ("training.bf16=true", "training.mixed_precision=bf16"),
    ("training.fp16=true", "float16 is not supported"),
    ("training.gradient_checkpointing=true", "training.remat=block"),
    ("training.grad_accum=auto", "training.gradient_accumulation_steps=null"),
    ("training.batch_size=auto", "training.micro_batch_size"),
    ("training.ddp_find_unused_parameters=false", "there is nothing to set"),
    ("training.find_unused_parameters=true", "there is nothing to set"),
    ("training.sync_batchnorm=true", "there is nothing to set"),
    ("training.dataloader_num_workers=4", "there is nothing to set"),
    ("training.pin_memory=true", "there is nothing to set"),
    ("training.generation_num_beams=1", "no beam search"),
    ("training.generation_max_new_tokens=64", "lengths, top_p and top_k are those of `generation`"),
    ("training.eval_steps=200", "evaluation.interval_steps=200"),
    ("training.eval_accumulation_steps=4", "rollout.num_slots bounds"),
    ("training.eval_loss_only=true", "there is no held-out loss"),
    ("evaluation.rouge=true", "evaluate.reference=FIELD"),
    ("training.cpu_offload=true", "stay on the devices"),
    ("training.stage=3", "as with ZeRO-3"),
    ("training.lr=1e-4", "optimizer.learning_rate=1e-4"),
    ("training.beta=0.1", "algorithm.kl_coef=0.1"),
    ("training.save_steps=10", "training.save_interval_steps=10"),
    ("training.num_train_epochs=3", "training.max_steps"),
    ("training.report_to=wandb", "tracking=wandb"),
    ("training.output_dir=/scratch/x", "hydra.run.dir=/scratch/x"),
    ("training.checkpoint_dir=/scratch/x", "hydra.run.dir=/scratch/x"),
    ("rollout.n=8", "algorithm.num_generations=8"),
    ("launch.nprocs=4", "tunix-lite launch --nprocs=N"),
    ("optimizer.name=adamw", "optimizer=adamw"),
    ("optimizer._target_=optax.sgd", "optimizer= is adamw, adafactor, lion, muon or sgd"),
    ("generation.max_completion_length=128", "generation.max_new_tokens=128"),
    ("mesh.shape=[2,2]", "'model.mesh_shape=[[2,2],[fsdp,tp]]'"),
    ("data.train_files=x.parquet", "task=parquet task.train=x.parquet"),
    ("num_gpus=2", "CUDA_VISIBLE_DEVICES=0,1"),
    ("training.pipeline_parallel_size=2", "no pipeline parallelism"),
    ("resume=gs://my-bucket/run", "addresses are not supported yet"),
]
# What is read or typed elsewhere: a page of ours -> words that stand on it.
PAGES = [
    ("references/troubleshooting.md", "`python -m jax.distributed.launch`, `__path__ attribute not found"),
    ("references/troubleshooting.md", "torchrun overwrites `MASTER_ADDR`, `RANK` and `WORLD_SIZE`"),
    ("references/troubleshooting.md", "`RANK` is the number of the first process on the machine"),
    ("references/troubleshooting.md", "NCCL timeout, `NCCL_DEBUG`, `NCCL_P2P_CONNECT_TIMEOUT`"),
    ("references/troubleshooting.md", "Uneven GPU utilisation"),
    ("references/troubleshooting.md", "`tensorboard: command not found`"),
    (
        "references/troubleshooting.md",
        "`No rule to make target 'gpu-info'`, or `setup-accelerate`, `train-distributed`",
    ),
    ("references/troubleshooting.md", "Out of memory"),
    ("references/troubleshooting.md", "Not faster with more GPUs"),
    ("references/troubleshooting.md", "pmap, `device_put_replicated`"),
    ("references/troubleshooting.md", "zsh has eaten the brackets"),
    ("references/seed_guides.md", "memory-check"),
    ("references/seed_guides.md", "test_distributed_setup.py"),
    ("references/seed_guides.md", "scales the learning rate with the number of GPUs"),
    ("references/seed_guides.md", "bfloat16 is automatic on TPUs"),
    ("references/seed_guides.md", "train-deepspeed"),
    ("howto/several_gpus.md", "Nothing is gained with the bundled one: use one device"),
    ("howto/several_gpus.md", "completions are divided, a completion is not"),
    ("howto/tpu.md", "gcloud compute tpus tpu-vm create"),
    ("guide/generate.md", "A single completion does not become faster with more devices"),
    ("guide/training.md", "training.max_steps"),
    ("guide/objectives.md", "`algorithm=sft` learns from demonstrations"),
    ("getting_started/configuration.md", "--config-dir FOLDER --config-name NAME"),
    ("tutorials/notebook.md", "first_run.ipynb"),
]
# What is not there: the title of its row in limits.md.
LIMITS = [
    "Plain text without prompts",
    "Data sets of the hub by name",
    "Held-out loss and perplexity of SFT",
    "Lengths of an evaluation of its own",
    "The best checkpoint by name",
    "Beam search",
    "Pipeline, sequence-ring and expert parallelism",
    "Offload to the memory of the host",
    "fp16 with loss scaling",
    "AMD GPUs by ROCm",
    "bitsandbytes and unsloth",
    "Consumer and old hardware in `plan`",
    "Loss, memory and speed per device",
    "Advice on batch sizes by device",
    "Timings on several GPUs and on TPUs",
    "Buckets",
    "Models for images and speech",
    "Colab and other hosted notebooks",
]


@pytest.mark.parametrize("command, key, value", WORKS, ids=[command for command, *_ in WORKS])
def test_what_a_guide_promises_can_be_typed(command, key, value):
    words = command.replace("'", "").split(" ") if "'" not in command else _quoted(command)
    if words[0] == "tunix-lite":
        name, overrides = of_a_program(words)
        settings = compose_values(overrides, of=(f"+command={name}",))
    else:
        settings = plain(compose(of_a_run(["python", *words])))
    for part in key.split("."):
        settings = settings[part]
    assert (list(map(list, settings)) if isinstance(value, list) else settings) == value


def _quoted(command: str) -> list[str]:
    """The words of a command in which one value stands in quotes, as Hydra gets them."""
    before, text, _ = command.split("'")
    *words, last = before.split()
    return [*words, f'{last}"{text}"']


@pytest.mark.parametrize("typed, words", TOLD, ids=[typed for typed, _ in TOLD])
def test_somebody_who_types_a_word_of_the_guides_is_told(typed, words):
    assert words in answer(typed)


@pytest.mark.parametrize("page, words", PAGES, ids=[words for _, words in PAGES])
def test_somebody_who_searches_for_the_words_of_the_guides_finds_them(page, words):
    assert words in " ".join((DOCS / page).read_text().replace("**", "").split())


@pytest.mark.parametrize("title", LIMITS)
def test_what_is_not_there_is_said(title):
    titles = re.findall(r"^- \*\*(.*?)\*\*", (DOCS / "references" / "limits.md").read_text(), re.MULTILINE)
    assert any(found.startswith(title) for found in titles)


@pytest.mark.parametrize("target", ["v3-8", "rtx4090x2", "v100x4"])
def test_hardware_that_plan_does_not_know_is_refused_with_what_it_knows(target):
    with pytest.raises(ValueError, match=r"is no hardware that is known; .*a100, h100, h200.*v4, v5e"):
        find_target(target)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("2xh100x8", "did you mean h100x16?"), ("8xA100", "did you mean a100x8?"), ("h10x8", "did you mean h100x8?")],
)
def test_hardware_that_is_written_otherwise_is_answered_with_what_was_meant(typed, meant):
    with pytest.raises(ValueError, match=re.escape(meant)):
        find_target(typed)


def test_two_sizes_that_contradict_each_other_are_answered_with_a_line_that_works():
    sizes = ["training.gradient_accumulation_steps=2", "training.micro_batch_size=2"]
    with pytest.raises(ConfigError, match="training.gradient_accumulation_steps=null makes it 64"):
        plan_batch(compose(sizes), 1)
    assert "2 micro_batch_size x 1 fsdp x 64 accumulation" in str(
        plan_batch(compose([*sizes, "training.gradient_accumulation_steps=null"]), 1)
    )


def test_a_launcher_that_jax_does_not_have_is_one_of_ours():
    with pytest.raises(ModuleNotFoundError):
        importlib.util.find_spec("jax.distributed.launch")
    known = launcher.parsed(["--nprocs=4", "run_training.py", "model.mesh_shape=[[4,1],[fsdp,tp]]"])
    assert (known.nprocs, known.program[0]) == (4, "run_training.py")
    assert importlib.util.find_spec("tunix_lite.launch") is not None


def test_as_many_processes_as_gpus_is_one(capsys):
    with pytest.raises(SystemExit):
        launcher.main(["--nprocs=auto"])
    assert "one process uses all devices that it sees" in capsys.readouterr().err


def test_flags_and_settings_of_a_guide_at_once_are_all_answered():
    flags = ["--dataset-id", "x/y", "--epochs", "10", "--bf16"]
    assert [name for name in ("--dataset-id", "--epochs", "--bf16") if name in str(foreign_flags(flags, HYDRA))]


def test_make_refuses_settings_that_the_program_would_never_see():
    """`make train hydra.run.dir=X` set a variable of make, and a new run began without a word."""
    call = ["make", "-n", "--no-print-directory", "train"]
    refused = subprocess.run([*call, "seed=1", "PYTHON=python3"], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 2 and "settings go into ARGS: make train ARGS='seed=1'" in refused.stderr
    taken = subprocess.run([*call, "ARGS=seed=1 resume=none"], cwd=ROOT, capture_output=True, text=True)
    assert taken.returncode == 0 and taken.stdout.splitlines()[-1].endswith("run_training.py seed=1 resume=none")


@pytest.mark.parametrize("name", ["LICENSE", "CITATION.cff", ".readthedocs.yaml", "examples/first_run.ipynb"])
def test_the_repository_has_what_its_guides_speak_of(name):
    assert (ROOT / name).is_file()


def test_no_target_of_make_that_a_page_names_as_foreign_is_one_of_ours():
    ours = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert not ours & {"gpu-info", "setup-accelerate", "memory-check", "train-distributed", "train-deepspeed"}


def test_the_paths_of_weights_in_comments_are_those_that_are_accepted():
    """An old comment named groups/0/q, and the program refused it."""
    files = [file.read_text() for file in Path(composing.conf_dir()).rglob("*.yaml")]
    assert not [text for text in files if "groups/0" in text]
    assert compose(['model.lora.targets="layers/(q|v)"']).model.lora.targets == "layers/(q|v)"
