"""What settings are called in other projects, and what they are here: the one table of it.

`tunix_lite.hints` looks words up, `docs/coming_from.py` makes the page `docs/guide/coming_from.md`
of them. A word that could mean two things has no override, but a sentence that says which ones: a
hint is right, or it is not given.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Word:
    """One meaning: its names elsewhere, and what to write here.

    Example: `Word({"TRL": "lr"}, ("optimizer.learning_rate={}",))`.
    """

    # project -> its names for this, separated by spaces; a name may have sections: rollout.n
    names: Mapping[str, str]
    # what to write, `{}` standing for the value; of several, the first whose settings the chosen
    # algorithm and task have; none: there is no equivalent, and `note` says so. One that begins
    # with `<` is made of the value by a function of hints.py
    ours: tuple[str, ...] = ()
    # what else there is to know, or why there is nothing to write
    note: str = ""
    # value -> what to write for it in place of `ours`; "": only the note
    values: Mapping[str, str] = field(default_factory=dict)

    def all_names(self) -> Iterator[tuple[str, str]]:
        """(project, name) of each name."""
        for project, names in self.names.items():
            for name in names.split():
                yield project, name


def word(
    *ours: str,
    note: str = "",
    values: Mapping[str, str] | None = None,
    **names: str,
) -> Word:
    """A Word, with the projects as keywords."""
    return Word(names, ours, note, values or {})


def no_word(note: str, **names: str) -> Word:
    """A Word that has no equivalent here, and why."""
    return Word(names, (), note)


ALGORITHMS = "tunix_lite.algorithms"
CENTRED = f"algorithm.advantages._target_={ALGORITHMS}.advantages.centre ~algorithm.advantages.eps"
PER_TOKEN = f"algorithm.weighting._target_={ALGORITHMS}.weighting.per_token"
PER_SEQUENCE = f"algorithm.weighting._target_={ALGORITHMS}.weighting.per_sequence"
TP = "model.mesh_shape=[[-1,{}],[fsdp,tp]]"
PACKED = "training.packing=sequences"

# ---- how much, how long, and where to

BATCH = (
    # TRL counts completions, as we do; a group need not lie on one device.
    word(
        "training.micro_batch_size={}",
        note="sequences on each fsdp shard in one forward and backward",
        TRL="per_device_train_batch_size",
        verl="ppo_micro_batch_size_per_gpu micro_batch_size_per_gpu",
        MaxText="per_device_batch_size",
        DeepSpeed="train_micro_batch_size_per_gpu",
    ),
    # verl counts prompts in it, before they are repeated n times.
    word(
        "training.prompts_per_step={}",
        note="where verl makes several updates of it, prompts_per_step is ppo_mini_batch_size and "
        "algorithm.mini_batches the quotient of the two",
        verl="data.train_batch_size",
    ),
    # Also prompts, in the configuration; the trainer multiplies it by n.
    no_word(
        "write training.prompts_per_step=ppo_mini_batch_size and "
        "algorithm.mini_batches=train_batch_size/ppo_mini_batch_size, since a rollout has "
        "mini_batches x prompts_per_step prompts",
        verl="ppo_mini_batch_size",
    ),
    # Sequences of DeepSpeed, prompts of verl, rows of Tunix: no override would be right for all.
    no_word(
        "it is prompts in some projects and sequences in others; prompts of an update are "
        "training.prompts_per_step, sequences of a device in one pass training.micro_batch_size",
        verl="train_batch_size ppo_micro_batch_size",
        Tunix="batch_size mini_batch_size train_micro_batch_size",
        DeepSpeed="global_batch_size",
    ),
    # In micro-batches of TRL, not in updates.
    no_word(
        "a rollout serves algorithm.mini_batches updates, each of training.prompts_per_step "
        "prompts: steps_per_generation / gradient_accumulation_steps of TRL are the mini_batches",
        TRL="steps_per_generation generation_batch_size num_mini_batches",
    ),
    word(
        "training.gradient_accumulation_steps={}",
        values={"auto": "training.gradient_accumulation_steps=null"},
        seeds="grad_accum",
        other="grad_accum_steps accumulate_grad_batches",
    ),
    # mu of the GRPO paper: the whole batch of completions is learned from so many times.
    word(
        "algorithm.updates_per_rollout={}",
        TRL="num_iterations num_ppo_epochs",
        verl="ppo_epochs",
        Tunix="num_iterations",
    ),
    # Completions of a prompt; `n` alone could be anything.
    word(
        "algorithm.num_generations={}",
        verl="rollout.n",
        other="group_size num_return_sequences samples_per_prompt n_samples_per_prompt",
    ),
    # What scores sequences without learning is as large as an update at most.
    no_word(
        "old and reference log-probabilities are computed by the micro-batches of the update; "
        "there is nothing to set",
        verl="log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size",
        Tunix="compute_logps_micro_batch_size rollout_micro_batch_size",
    ),
    no_word(
        "evaluation samples in slots, as training does: rollout.num_slots bounds its memory",
        TRL="per_device_eval_batch_size eval_accumulation_steps eval_do_concat_batches",
        verl="data.val_batch_size val_batch_size",
    ),
    # A run has no epochs: rows are drawn by seed and step, without end.
    no_word(
        "a run is counted in updates: training.max_steps = epochs x rows / "
        "training.prompts_per_step",
        TRL="num_train_epochs",
        verl="total_epochs",
        Tunix="num_batches",
        MaxText="num_epoch",
        other="epochs num_epochs max_epochs n_epochs",
    ),
    word(
        "training.max_steps={}",
        verl="total_training_steps",
        MaxText="steps",
        other="num_train_steps total_steps",
    ),
    word(
        "seed={}", MaxText="data_shuffle_seed init_weights_seed", Tunix="rng_seed", TRL="data_seed"
    ),
)

LENGTHS = (
    # The end-of-sequence token is counted here and there.
    word(
        "generation.max_new_tokens={}",
        TRL="max_completion_length vllm_max_new_tokens",
        verl="max_response_length response_length",
        Tunix="total_generation_steps max_tokens_to_generate",
        vLLM="max_tokens",
    ),
    word(
        "generation.max_prompt_length={}",
        verl="rollout.prompt_length",
        MaxText="max_prefill_predict_length",
    ),
    # Prompt and completion together, which we never bound as one number.
    no_word(
        "prompt and completion have a limit each: generation.max_prompt_length and "
        "generation.max_new_tokens",
        TRL="max_length max_seq_length vllm_max_model_length",
        MaxText="max_target_length",
        seeds="max_seq_len seq_len",
        vLLM="max_model_len",
    ),
    word(
        "generation.long_prompts={}",
        values={"true": "generation.long_prompts=drop", "false": "generation.long_prompts=error"},
        verl="filter_overlong_prompts",
    ),
    word(
        values={
            "left": "generation.long_prompts=truncate",
            "error": "generation.long_prompts=error",
        },
        note="generation.long_prompts is error, truncate (the last tokens are kept) or drop",
        verl="data.truncation",
    ),
)

SAMPLING = (
    word(
        "generation.temperature={}",
        TRL="temperature",
        MaxText="decode_sampling_temperature",
    ),
    word("generation.top_p={}", TRL="top_p", MaxText="decode_sampling_nucleus_p"),
    # vLLM turns it off by -1, transformers and we by 0.
    word(
        "generation.top_k={}",
        values={"-1": "generation.top_k=0"},
        TRL="top_k",
        MaxText="decode_sampling_top_k",
    ),
    word("generation.top_k={}", values={"-1": "generation.top_k=0"}, ours="generation.top_k"),
    word("generation.stop={}", MaxText="stop_strings", vLLM="stop_sequences"),
    # Two switches that each have one right position here.
    no_word(
        "training draws by generation.temperature; the greedy answers of an evaluation are always "
        "made",
        TRL="do_sample predict_with_generate",
    ),
    no_word(
        "there is no beam search: completions are drawn, or greedy at generation.temperature=0",
        TRL="num_beams generation_num_beams",
        vLLM="use_beam_search best_of",
    ),
    no_word("keys and values are always cached", TRL="use_cache cache_implementation"),
    no_word(
        "completions are drawn by the program and the weights that train; there is no second "
        "engine to set up",
        TRL="use_vllm use_transformers_paged ds3_gather_for_generation",
        verl="rollout.name gpu_memory_utilization enforce_eager free_cache_engine load_format "
        "max_num_batched_tokens enable_chunked_prefill rollout.mode",
        Tunix="rollout_engine",
        unsloth="fast_inference",
    ),
    no_word(
        "rollout.num_slots is the number of sequences drawn at once, those of all devices together",
        vLLM="max_num_seqs",
    ),
)

# ---- the model

MODEL = (
    word(
        "<model>",
        TRL="model_name_or_path pretrained_model_name_or_path model_id model_path",
        verl="model.path partial_pretrain",
        MaxText="model_name",
        seeds="model.name",
    ),
    # An orbax checkpoint of MaxText has names and shapes of its own.
    no_word(
        "it is the checkpoint of MaxText; weights are a folder or a hub name in Hugging Face "
        "layout: model.weights=",
        MaxText="load_parameters_path load_full_state_path",
    ),
    no_word(
        "the tokenizer and its chat template come with the weights; model.tokenizer is only for "
        "model=random",
        TRL="tokenizer_name_or_path tokenizer_name chat_template_path",
        verl="data.tokenizer",
        Tunix="tokenizer_path",
    ),
    no_word(
        "write the revision after the name: model.weights=org/name@revision",
        TRL="model_revision revision",
    ),
    no_word("no code of a model's folder is ever run", TRL="trust_remote_code"),
    # Weights and optimizer stay float32, as with autocast of torch.
    word(
        values={
            "true": "training.mixed_precision=bf16",
            "false": "training.mixed_precision=fp32",
        },
        note="training.mixed_precision is fp32, bf16 or bf16_params",
        TRL="bf16 bf16_full_eval",
    ),
    word(
        values={
            "bfloat16": "training.mixed_precision=bf16",
            "no": "training.mixed_precision=fp32",
            "float32": "training.mixed_precision=fp32",
        },
        ours="training.mixed_precision",
    ),
    word(
        values={
            "bf16": "training.mixed_precision=bf16",
            "no": "training.mixed_precision=fp32",
            "fp32": "training.mixed_precision=fp32",
        },
        note="training.mixed_precision is fp32, bf16 or bf16_params",
        accelerate="mixed_precision",
    ),
    word(
        values={
            "bf16-mixed": "training.mixed_precision=bf16",
            "bf16-true": "training.mixed_precision=bf16_params",
            "32": "training.mixed_precision=fp32",
            "32-true": "training.mixed_precision=fp32",
        },
        note="training.mixed_precision is fp32, bf16 or bf16_params",
        Lightning="trainer.precision precision",
    ),
    no_word(
        "float16 is not supported; training.mixed_precision=bf16 is the type of 16 bits here",
        TRL="fp16 fp16_full_eval half_precision_backend",
    ),
    no_word(
        "JAX decides how float32 products are computed: export "
        "JAX_DEFAULT_MATMUL_PRECISION=tensorfloat32",
        TRL="tf32",
    ),
    # The type of the weights in transformers, that of the computation in MaxText.
    no_word(
        "to compute in bfloat16 is training.mixed_precision=bf16; to keep the weights in it as "
        "well is bf16_params",
        TRL="torch_dtype dtype",
        verl="fsdp_config.model_dtype model_dtype",
        MaxText="weight_dtype",
    ),
    word(
        values={
            "true": "training.remat=block",
            "false": "training.remat=none",
        },
        note="training.remat is save_all, none, dots, save_qkv_out or block",
        TRL="gradient_checkpointing",
        verl="enable_gradient_checkpointing",
        Lightning="activation_checkpointing",
    ),
    # The policies between full and none save other products than ours do.
    word(
        values={
            "full": "training.remat=block",
            "save_qkv_proj": "",
        },
        note="training.remat is save_all, none, dots, save_qkv_out or block; block computes a "
        "whole layer again, as remat_policy=full does",
        MaxText="remat_policy",
    ),
    word("training.scan_layers={}", MaxText="scan_layers"),
    word(
        values={
            "full": "training.remat=block",
            "true": "training.remat=block",
            "false": "training.remat=none",
        },
        ours="training.remat",
    ),
    word(
        values={
            "flash_attention_2": "training.attention=auto",
            "flash_attention_3": "training.attention=auto",
            "sdpa": "training.attention=auto",
            "eager": "training.attention=xla",
        },
        note="training.attention is auto, xla, cudnn or splash; auto takes the fused kernel of "
        "the device",
        TRL="attn_implementation",
    ),
    word(
        values={"true": "training.attention=auto", "false": "training.attention=xla"},
        note="training.attention is auto, xla, cudnn or splash",
        Tunix="use_flash_attention",
        other="flash_attention use_flash_attn",
    ),
    word(
        values={
            "flash": "training.attention=auto",
            "flash_attention_2": "training.attention=auto",
            "eager": "training.attention=xla",
            "dot_product": "training.attention=xla",
            "cudnn_flash_te": "training.attention=cudnn",
        },
        ours="training.attention",
    ),
)

LORA = (
    # 16 is the default rank of TRL.
    word(
        values={"true": "model.lora.rank=16", "false": "model.lora.rank=0"},
        note="adapters are on where the rank is above 0",
        TRL="use_peft use_lora",
    ),
    word(
        "model.lora.rank={}",
        TRL="lora_r",
        verl="lora_rank",
        Tunix="lora_config.rank",
        seeds="lora.r peft.r",
    ),
    word("model.lora.alpha={}", TRL="lora_alpha", Tunix="lora_config.alpha", seeds="peft.alpha"),
    word("model.lora.dropout={}", TRL="lora_dropout"),
    # Names of modules there, paths of weights here.
    word(
        values={"all-linear": 'model.lora.targets=".*/(q|k|v|o|gate|up|down)"'},
        note="model.lora.targets is a regular expression over paths of ours, .*/(q|k|v|o) for "
        "q_proj to o_proj",
        TRL="lora_target_modules",
        verl="target_modules",
        Tunix="lora_config.module_path",
    ),
    # The type nf4, in blocks, as bitsandbytes has it by default.
    word(
        values={"true": "model.lora.base=nf4", "false": "model.lora.base=bf16"},
        note="it is for LoRA: set model.lora.rank above 0",
        TRL="load_in_4bit",
    ),
    word(
        values={"true": "model.lora.base=int8", "false": "model.lora.base=bf16"},
        note="it is for LoRA: set model.lora.rank above 0",
        TRL="load_in_8bit",
    ),
    word("model.lora.base={}", note="nf4, int8, bf16 or fp32", Tunix="weight_qtype"),
    no_word(
        "QLoRA is adapters on a base of 4 bits: model.lora.rank=16 model.lora.base=nf4",
        seeds="use_qlora qlora",
    ),
    word(
        values={
            "qlora": "model.lora.rank=16 model.lora.base=nf4",
            "lora": "model.lora.rank=16",
            "full": "model.lora.rank=0",
        },
        seeds="tuning.mode lora.mode",
    ),
    no_word(
        "a base of 4 or 8 bits is the package's own, model.lora.base=nf4 or int8; XLA computes and "
        "sends, by NCCL between GPUs",
        seeds="backend",
    ),
    no_word(
        "a model of a size of your own is model=random with model.architecture.num_layers=N, "
        "embed_dim and so on",
        seeds="target_params",
    ),
    no_word(
        "adapters are plain LoRA, scaled by alpha / rank",
        TRL="use_dora use_rslora lora_modules_to_save",
    ),
    no_word(
        "dropout is on the inputs of adapters alone: model.lora.dropout",
        TRL="attention_dropout hidden_dropout disable_dropout",
    ),
)

# ---- the objective

OBJECTIVE = (
    # In DPO beta is the temperature of the margin, and keeps its name here.
    word(
        "algorithm.beta={}",
        "algorithm.kl_coef={}",
        note="algorithm.kl_estimator=k3 is the estimator of TRL",
        TRL="beta",
        Tunix="grpo_config.beta",
        MaxText="grpo_beta",
    ),
    word("algorithm.kl_coef={}", verl="kl_loss_coef", other="kl_coeff kl_beta kl_loss_weight"),
    # The coefficient of verl that is in the reward, not in the loss.
    word(
        "algorithm.kl_coef={} algorithm.kl_estimator=k1_reward",
        note="it is the KL in the reward",
        verl="kl_ctrl.kl_coef",
    ),
    word(
        values={
            "low_var_kl": "algorithm.kl_estimator=k3",
            "k3": "algorithm.kl_estimator=k3",
            "mse": "algorithm.kl_estimator=k2",
            "k2": "algorithm.kl_estimator=k2",
        },
        note="algorithm.kl_estimator is k3_exact, k3, k3_ratio or k2 in the loss, and k1_reward "
        "in the reward; k1 as a loss has no expected gradient",
        verl="kl_loss_type",
    ),
    word(
        values={
            "low_var_kl": "algorithm.kl_estimator=k3",
            "mse": "algorithm.kl_estimator=k2",
        },
        ours="algorithm.kl_estimator",
    ),
    no_word(
        "the KL to the reference is in the loss where algorithm.kl_coef is above 0",
        verl="use_kl_loss",
    ),
    # k1 of each token, as the controller of verl subtracts it.
    word(
        values={"true": "algorithm.kl_estimator=k1_reward", "false": ""},
        note="algorithm.kl_coef is its weight; 0 leaves it out",
        verl="use_kl_in_reward",
    ),
    word(
        values={"true": "algorithm.kl_estimator=k3_ratio", "false": "algorithm.kl_estimator=k3"},
        TRL="use_bias_correction_kl",
    ),
    # One bound for both sides, unless epsilon_high is given.
    word(
        "algorithm.clip_low={} algorithm.clip_high={}",
        TRL="epsilon",
        verl="clip_ratio",
        Tunix="grpo_config.epsilon",
        MaxText="grpo_epsilon",
        other="cliprange clip_range clip_eps",
    ),
    word("algorithm.clip_low={}", verl="clip_ratio_low", other="epsilon_low eps_clip_low"),
    word(
        "algorithm.clip_high={}",
        TRL="epsilon_high",
        verl="clip_ratio_high",
        other="eps_clip_high",
    ),
    # Two-sided GRPO and dual clip are one formula; ours is `dual` of surrogates.clip.
    word(
        "+algorithm.surrogate.dual={}",
        note="the bound of the ratio where the advantage is negative",
        TRL="delta",
        verl="clip_ratio_c",
    ),
    word("algorithm.off_policy_delta={}", TRL="off_policy_mask_threshold"),
    word("algorithm.entropy_coef={}", verl="entropy_coeff", other="ent_coef entropy_bonus"),
    word("algorithm.mask_truncated={}", TRL="mask_truncated_completions"),
    word(
        values={
            "token": f"algorithm.ratio._target_={ALGORITHMS}.ratios.token_ratio",
            "sequence": f"algorithm.ratio._target_={ALGORITHMS}.ratios.sequence_ratio",
        },
        note="algorithm.ratio is token_ratio, sequence_ratio or no_ratio; algorithm=gspo has the "
        "bounds of the paper, too",
        TRL="importance_sampling_level",
    ),
    # Aggregations of TRL are weightings here; those with another surrogate are algorithms.
    word(
        values={
            "grpo": PER_SEQUENCE,
            "dapo": PER_TOKEN,
            "bnpo": PER_TOKEN,
            "dr_grpo": "algorithm=dr_grpo",
            "cispo": "algorithm=cispo",
            "sapo": "algorithm=sapo",
            "sigmoid": "algorithm=dpo",
            "gspo-token": "",
            "gspo": "algorithm=gspo",
        },
        note="algorithm= chooses the objective, algorithm.weighting how its tokens are averaged",
        TRL="loss_type",
        MaxText="loss_algo",
        verl="policy_loss.loss_mode loss_mode",
    ),
    # Over the whole batch of an update, as verl's with its global batch size.
    word(
        values={
            "token-mean": PER_TOKEN,
            "seq-mean-token-mean": PER_SEQUENCE,
            "seq-mean-token-sum-norm": "algorithm=dr_grpo",
        },
        note="algorithm.weighting is per_token, per_sequence or constant_length",
        verl="loss_agg_mode",
    ),
    # `centre` has no eps, which the default has.
    word(
        values={
            "false": CENTRED,
            "none": CENTRED,
            "true": f"algorithm.advantages._target_={ALGORITHMS}.advantages.standardise",
            "group": f"algorithm.advantages._target_={ALGORITHMS}.advantages.standardise",
            "batch": f"algorithm.advantages._target_={ALGORITHMS}.advantages.batch_scaled",
            "mean": "algorithm=maxrl",
        },
        note="algorithm.advantages says how rewards become advantages",
        TRL="scale_rewards",
    ),
    word(
        values={
            "false": CENTRED,
            "true": f"algorithm.advantages._target_={ALGORITHMS}.advantages.standardise",
        },
        note="algorithm.advantages says how rewards become advantages",
        verl="norm_adv_by_std_in_grpo",
    ),
    word(
        values={
            "grpo": "algorithm=grpo",
            "rloo": "algorithm=rloo",
            "reinforce_plus_plus_baseline": "algorithm=reinforce_pp",
            "reinforce_plus_plus": "algorithm=reinforce_pp "
            "algorithm.advantages.group_baseline=false",
            "gdpo": "algorithm=gdpo",
            "gae": "",
        },
        note="algorithm= chooses it; there is no critic, so no GAE and no PPO",
        verl="adv_estimator",
        OpenRLHF="advantage_estimator",
    ),
    word(
        values={"normalize_then_sum": "algorithm=gdpo", "sum_then_normalize": "algorithm=grpo"},
        TRL="multi_objective_aggregation",
    ),
    word("algorithm.advantages.eps={}", other="advantages.epsilon"),
    word("algorithm.reference_every={}", TRL="ref_model_sync_steps"),
    # alpha of TR-DPO is the share of the policy, as ours is.
    word("algorithm.reference_mix={}", TRL="ref_model_mixup_alpha"),
    no_word(
        "algorithm.reference_every is the number of steps after which the reference follows",
        TRL="sync_ref_model",
    ),
    word(
        values={
            "true": "algorithm.agreeing_groups=replace",
            "false": "algorithm.agreeing_groups=keep",
        },
        note="algorithm.agreeing_groups is keep, drop or replace",
        verl="filter_groups.enable dynamic_sampling dynamic_filtering",
    ),
    word(
        "algorithm.max_rounds={}",
        verl="max_num_gen_batches filter_groups.max_num_gen_batches",
    ),
    no_word(
        "algorithm=dapo has the soft penalty on length: algorithm.shaping.length, buffer and "
        "factor",
        verl="overlong_buffer.enable overlong_buffer.len overlong_buffer.penalty_factor",
    ),
    word("algorithm.surrogate.tau_positive={}", TRL="sapo_temperature_pos", verl="tau_pos"),
    word("algorithm.surrogate.tau_negative={}", TRL="sapo_temperature_neg", verl="tau_neg"),
    no_word(
        "algorithm.old_logprobs=rescored with algorithm.correction weighs what trainer and sampler "
        "disagree about; both run the same program here",
        TRL="vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "vllm_importance_sampling_cap",
        verl="rollout_is rollout_is_threshold tis_imp_ratio_cap",
    ),
    no_word("all tokens of a completion count", TRL="top_entropy_quantile"),
    # PPO proper, with a value model.
    no_word(
        "there is no critic: an advantage compares the completions of a prompt with each other",
        TRL="vf_coef cliprange_value whiten_rewards value_model_path",
        verl="algorithm.lam algorithm.gamma lam critic_warmup cliprange_value",
        Tunix="gae_lambda gamma",
    ),
)

# ---- the optimizer

OPTIMIZER = (
    word(
        "optimizer.learning_rate={}",
        verl="optim.lr",
        other="lr peak_lr",
        seeds="training.learning_rate",
    ),
    # Schedules of other shapes are not there: polynomial, inverse square root, restarts.
    word(
        "optimizer.schedule={}",
        values={
            "constant_with_warmup": "optimizer.schedule=constant",
            "cosine_with_min_lr": "optimizer.schedule=cosine",
            "warmup_cosine_decay_schedule": "optimizer.schedule=cosine",
            "cosine": "optimizer.schedule=cosine",
            "linear": "optimizer.schedule=linear",
            "constant": "optimizer.schedule=constant",
        },
        note="it is constant, linear or cosine, each after optimizer.warmup_steps",
        TRL="lr_scheduler_type",
        verl="warmup_style optim.lr_scheduler",
        Tunix="schedule_type",
        other="lr_schedule lr_scheduler",
    ),
    word(
        values={
            "constant_with_warmup": "optimizer.schedule=constant",
            "cosine_with_min_lr": "optimizer.schedule=cosine",
        },
        ours="optimizer.schedule",
    ),
    word("optimizer.warmup_steps={}", verl="lr_warmup_steps num_warmup_steps"),
    # A share of the run there, updates here.
    no_word(
        "it is counted in updates: optimizer.warmup_steps = ratio x training.max_steps",
        TRL="warmup_ratio",
        verl="lr_warmup_steps_ratio warmup_steps_ratio",
        MaxText="warmup_steps_fraction",
    ),
    word("optimizer.end_fraction={}", verl="min_lr_ratio", MaxText="learning_rate_final_fraction"),
    word(
        "optimizer.max_grad_norm={}",
        verl="grad_clip clip_grad",
        MaxText="gradient_clipping_threshold",
        accelerate="gradient_clipping clip_grad_norm",
        Lightning="gradient_clip_val",
    ),
    word("optimizer.beta1={}", TRL="adam_beta1", Tunix="optimizer_config.b1 b1", MaxText="adam_b1"),
    word("optimizer.beta2={}", TRL="adam_beta2", Tunix="optimizer_config.b2 b2", MaxText="adam_b2"),
    word("optimizer.eps={}", TRL="adam_epsilon optimizer.epsilon", MaxText="adam_eps"),
    word("optimizer.weight_decay={}", MaxText="adam_weight_decay", other="wd"),
    word(
        values={
            "adamw_torch": "optimizer=adamw",
            "adamw_torch_fused": "optimizer=adamw",
            "adamw_hf": "optimizer=adamw",
            "adamw": "optimizer=adamw",
            "adam": "optimizer=adamw",
            "adafactor": "optimizer=adafactor",
            "lion_32bit": "optimizer=lion",
            "lion": "optimizer=lion",
            "muon": "optimizer=muon",
            "sgd": "optimizer=sgd",
        },
        note="optimizer= is adamw, adafactor, lion, muon or sgd; there are none of 8 bits",
        TRL="optim",
        Tunix="opt_type",
        verl="optim.optimizer",
        other="optimizer.name optimizer_type optimizer._target_ optimizer.type",
    ),
    # Nothing of a run lies in host memory.
    no_word(
        "weights, gradients and the optimizer stay on the devices; fsdp, model.lora.rank and "
        "training.mixed_precision=bf16_params make them smaller",
        verl="param_offload optimizer_offload offload_params",
        Tunix="offload_to_cpu",
        seeds="cpu_offload",
        DeepSpeed="offload_optimizer offload_param",
    ),
)

# ---- data and rewards

DATA = (
    # Data sets on the hub have columns that a task must know: only GSM8K has one.
    word(
        "<data>",
        values={
            "gsm8k": "task=gsm8k",
            "openai/gsm8k": "task=gsm8k",
            "huggingface:openai/gsm8k": "task=gsm8k",
        },
        note="task=jsonl task.train=FILE takes a file of your own, with task.prompt and "
        "task.reward; task=gsm8k has its data on the hub",
        TRL="dataset_name dataset dataset_path",
        seeds="dataset_id",
    ),
    word("<file>", verl="data.train_files train_files", other="train_file data_path data.train"),
    word(
        "task.held_out={}",
        note="of task=jsonl, csv or parquet",
        verl="data.val_files val_files",
        other="eval_file validation_file",
    ),
    # A prompt is a text with columns in it, so no column has a fixed name.
    no_word(
        "task.prompt is the text of a prompt with {columns} in it: task.prompt='{question}'",
        verl="prompt_key",
        TRL="dataset_text_field",
    ),
    no_word("the order of the data is always shuffled, by seed", TRL="shuffle_dataset"),
    no_word(
        "held-out rows are task.held_out; without it a tenth of the rows is held out",
        TRL="dataset_train_split dataset_test_split test_size",
    ),
    word("task.system={}", TRL="system_prompt system_message"),
    # The names that TRL itself defines have no dotted path.
    word(
        "<reward>",
        note="a reward is a function by its dotted path: task=jsonl task.reward=my_rewards.near",
        TRL="reward_funcs reward_function",
        Tunix="reward_functions",
    ),
    no_word(
        "the file must be importable: task=jsonl task.reward=my_rewards.compute_score, or "
        "'+task.rewards.mine={fn: my_rewards.compute_score, weight: 1.0}'",
        verl="custom_reward_function.path custom_reward_function.name reward_manager",
    ),
    no_word("each reward has its own: task.rewards.NAME.weight=0.5", TRL="reward_weights"),
    no_word(
        "rewards are functions; a model that judges is one of them (docs/guide/rewards.md)",
        TRL="reward_model_path reward_model_name_or_path",
    ),
    no_word(
        "rows are read from memory or ahead of the run; there is nothing to set",
        TRL="dataset_num_proc remove_unused_columns pin_memory dataloader_num_workers "
        "dataloader_pin_memory",
        other="num_workers",
    ),
    # Rows hold several sequences; nothing of a sequence is cut.
    word(
        values={"true": PACKED, "false": "training.packing=none"},
        note="training.packing is auto, none, sequences or prefix",
        TRL="packing padding_free",
        verl="use_remove_padding use_dynamic_bsz",
        other="sample_packing group_by_length",
    ),
    word(values={"true": PACKED, "false": "training.packing=none"}, ours="training.packing"),
    word(
        f"{PACKED} training.micro_batch_tokens={{}}",
        verl="ppo_max_token_len_per_gpu",
    ),
)

# ---- what a run writes, and when

RUNS = (
    # Checkpoints, logs and samples of a run lie in one folder.
    word(
        "hydra.run.dir={}",
        TRL="output_dir",
        verl="default_local_dir",
        Tunix="checkpoint_root_directory",
        MaxText="base_output_directory checkpoint_dir",
        other="logging_dir log_dir save_dir out_dir",
    ),
    # A run has the name of its folder.
    word("hydra.run.dir=outputs/{}", TRL="run_name", verl="experiment_name"),
    no_word(
        "a run never overwrites another: give hydra.run.dir=FOLDER a new one, or the same to go on",
        TRL="overwrite_output_dir",
    ),
    word("project_name={}", TRL="wandb_project", accelerate="project_dir", other="trainer.project"),
    word(
        "training.save_interval_steps={}",
        values={"-1": "training.save_interval_steps=0"},
        TRL="save_steps",
        verl="save_freq",
        MaxText="checkpoint_period",
        other="save_interval save_every ckpt_interval",
    ),
    no_word(
        "checkpoints are counted in updates: training.save_interval_steps; 0 saves at the end only",
        TRL="save_strategy",
    ),
    word(
        "training.keep_checkpoints={}",
        TRL="save_total_limit",
        verl="max_actor_ckpt_to_keep",
        Tunix="max_to_keep",
        MaxText="max_num_checkpoints_to_keep",
    ),
    word(
        values={
            "true": "training.keep_best_checkpoints=1",
            "false": "training.keep_best_checkpoints=0",
        },
        note="the best is that with the highest held-out accuracy",
        TRL="load_best_model_at_end",
    ),
    no_word("held-out accuracy ranks checkpoints", TRL="metric_for_best_model greater_is_better"),
    word(
        "training.log_interval_steps={}",
        TRL="logging_steps",
        MaxText="log_period",
        other="log_interval log_every log_every_n_steps logging_interval",
    ),
    # In updates, as all intervals.
    word(
        "evaluation.interval_steps={}",
        TRL="eval_steps",
        verl="test_freq",
        Tunix="eval_every_n_steps",
        MaxText="eval_interval",
        other="eval_freq val_interval val_check_interval eval_every",
    ),
    word(
        values={"no": "evaluation.num_examples=0"},
        note="evaluation.interval_steps=0 evaluates only before the first update and after the "
        "last, evaluation.num_examples=0 never",
        TRL="eval_strategy evaluation_strategy",
    ),
    no_word(
        "an evaluation runs before the first update, unless evaluation.num_examples=0",
        verl="val_before_train",
        TRL="eval_on_start do_eval",
    ),
    no_word("a run always trains; tunix-lite evaluate only evaluates", TRL="do_train"),
    # Beside the greedy completion, which is always made.
    word("evaluation.num_samples={}", verl="val_kwargs.n", TRL="num_generations_eval"),
    word("evaluation.temperature={}", verl="val_kwargs.temperature", MaxText="eval_temperature"),
    no_word(
        "evaluation has a temperature of its own; lengths, top_p and top_k are those of "
        "`generation`",
        verl="val_kwargs.top_p val_kwargs.top_k val_kwargs.do_sample",
        seeds="generation_max_new_tokens evaluation.max_new_tokens evaluation.max_prompt_length "
        "evaluation.top_p evaluation.top_k",
    ),
    word("evaluation.num_examples={}", other="num_eval_examples max_eval_samples val_max_samples"),
    no_word("held-out accuracy is of greedy completions", TRL="compute_metrics"),
    no_word(
        "an evaluation is of completions; there is no held-out loss",
        TRL="prediction_loss_only",
        seeds="eval_loss_only loss_only",
    ),
    no_word(
        "tunix-lite evaluate evaluate.reference=FIELD compares completions with a field by ROUGE",
        other="rouge use_rouge",
    ),
    word(
        "resume={}",
        values={"true": "resume=auto", "false": "resume=none"},
        note="auto goes on from hydra.run.dir=FOLDER, if that holds a checkpoint",
        TRL="resume_from_checkpoint",
        verl="resume_from_path",
        other="resume_path resume_from checkpoint checkpoint_path",
    ),
    word(
        values={"auto": "resume=auto", "disable": "resume=none"},
        note="resume is auto, none, or the folder of a run",
        verl="resume_mode",
    ),
    word(
        values={
            "tensorboard": "tracking.tensorboard=true",
            "none": "tracking.tensorboard=false",
            "wandb": "tracking=wandb",
            "mlflow": "tracking=mlflow",
            "trackio": "tracking=trackio",
        },
        note="a run writes metrics.jsonl and event files of TensorBoard; tracking=wandb, mlflow or "
        "trackio adds one",
        TRL="report_to",
        verl="trainer.logger",
        accelerate="log_with",
    ),
    word(
        values={"true": "tracking=wandb", "false": ""},
        note="a run writes metrics.jsonl and event files of TensorBoard without it",
        seeds="wandb use_wandb tracking.wandb",
        other="enable_wandb wandb.enabled",
    ),
    no_word(
        "samples are written every tracking.samples_interval_steps updates, and "
        "tracking.samples_shown of them shown",
        TRL="log_completions log_unique_prompts",
        verl="log_val_generations rollout_data_dir",
    ),
    word("tracking.samples_shown={}", TRL="num_completions_to_print"),
    no_word(
        "tunix-lite export checkpoint=RUN writes a Hugging Face folder; nothing is uploaded",
        TRL="push_to_hub hub_model_id hub_strategy hub_token hub_private_repo",
    ),
    word(
        values={"true": "runtime.dry_run=true", "false": "runtime.dry_run=false"},
        Prime="dry_run",
    ),
    no_word(
        "training.profile_communication=true writes a trace of three steps",
        MaxText="profiler profiler_steps skip_first_n_steps_for_profiler",
        verl="global_profiler.tool",
    ),
    no_word("programs are always compiled", TRL="torch_compile", verl="use_torch_compile"),
    no_word(
        "log-probabilities are computed in chunks, so the logits of a batch never exist at once",
        TRL="use_liger_kernel use_liger_loss use_liger",
    ),
)

# ---- devices and processes

DEVICES = (
    # Sampling has no mesh of its own.
    word(
        TP,
        values={"-1": "model.mesh_shape=[[1,-1],[fsdp,tp]]"},
        note="one mesh trains and samples",
        TRL="vllm_tensor_parallel_size",
        verl="tensor_model_parallel_size",
        MaxText="ici_tensor_parallelism rollout_tensor_parallelism",
        vLLM="tensor_parallel_size",
        other="tp tp_size tensor_parallel model_parallel_size",
    ),
    word(
        "model.mesh_shape=[[{},1],[fsdp,tp]]",
        values={"-1": "model.mesh_shape=[[-1,1],[fsdp,tp]]"},
        verl="fsdp_size",
        MaxText="ici_fsdp_parallelism",
        other="dp_shard",
    ),
    word("<mesh>", Tunix="mesh.shape mesh mesh_shape model_config.mesh.shape"),
    no_word(
        "name the axes in model.mesh_shape=[[4,1],[fsdp,tp]]; fsdp divides weights and batch, tp "
        "the layers",
        Tunix="mesh.axis_names axis_names data_sharding_axis",
        MaxText="mesh_axes",
    ),
    no_word(
        "weights, gradients and the optimizer are divided over fsdp by default, as with ZeRO-3; "
        "sharding=data_parallel keeps whole copies",
        TRL="deepspeed fsdp fsdp_config",
        accelerate="zero_stage use_fsdp use_deepspeed fsdp_sharding_strategy deepspeed_config_file "
        "zero3_init_flag",
        verl="actor.strategy",
        seeds="stage",
    ),
    no_word(
        "sharding=data_parallel keeps whole weights on each device; the batch is divided over "
        "fsdp in any case",
        MaxText="ici_data_parallelism dcn_data_parallelism dcn_fsdp_parallelism",
        accelerate="distributed_type",
        other="dp ddp data_parallel",
    ),
    word(
        values={"true": "", "false": ""},
        note="all devices that JAX sees take part; CUDA_VISIBLE_DEVICES=0,1 before the command "
        "chooses some",
        accelerate="multi_gpu gpu_ids",
        seeds="multi_device num_gpus",
        other="gpus devices num_devices n_gpu",
    ),
    # One process for each GPU there; here one for all GPUs of a machine.
    no_word(
        "a machine needs one process for all of its devices; tunix-lite launch --nprocs=N starts "
        "several, and WORLD_SIZE, RANK and MASTER_ADDR tell it of other machines",
        accelerate="num_processes num_machines machine_rank main_process_ip main_process_port "
        "same_network rdzv_backend",
        torchrun="nproc_per_node nnodes node_rank master_addr master_port world_size local_rank",
        verl="n_gpus_per_node trainer.nnodes",
        seeds="launch.nprocs nprocs",
    ),
    no_word(
        "write JAX_PLATFORMS=cpu before the command",
        TRL="use_cpu no_cuda",
        accelerate="cpu",
    ),
    no_word(
        "JAX takes the accelerator that is there; JAX_PLATFORMS=cpu or cuda before the command "
        "chooses",
        other="device accelerator device_type",
        MaxText="hardware",
    ),
    no_word(
        "there is no pipeline parallelism; model.mesh_shape has fsdp and tp",
        MaxText="ici_pipeline_parallelism",
        other="pipeline_model_parallel_size pipeline_parallel_size pp",
    ),
    # Sequence parallelism of Ulysses divides attention, ours only what is between layers.
    no_word(
        "sharding=sequence_parallel divides the tokens between layers over tp; there is no "
        "attention over divided sequences",
        verl="ulysses_sequence_parallel_size context_parallel_size",
        MaxText="ici_context_parallelism ici_sequence_parallelism",
        other="sp_size cp",
    ),
    no_word(
        "launch.timeout bounds the start, launch.heartbeat_timeout the silence of a process, "
        "launch.stall_timeout a step, each in seconds",
        TRL="ddp_timeout",
    ),
    no_word(
        "a rank of adapters is model.lora.rank; the number of a process is RANK in the "
        "environment, or launch.process_id",
        other="rank",
    ),
    no_word(
        "here only sharding has a setting of this name; prompts of an update are "
        "training.prompts_per_step",
        other="batch",
    ),
)

WORDS = (
    *BATCH,
    *LENGTHS,
    *SAMPLING,
    *MODEL,
    *LORA,
    *OBJECTIVE,
    *OPTIMIZER,
    *DATA,
    *RUNS,
    *DEVICES,
)

# Whole families of settings that have no equivalent: how their names begin, and why.
FAMILIES = {
    "critic.": "there is no critic: an advantage compares the completions of a prompt",
    "profiler_options.": "training.profile_communication=true writes a trace of three steps",
    "critic_": "there is no critic: an advantage compares the completions of a prompt",
    "reward_model.": "rewards are functions; a model that judges is one of them, task.rewards",
    "vllm_": "completions are drawn by the program and the weights that train; there is no vLLM",
    "sglang_": "completions are drawn by the program and the weights that train; no SGLang",
    "find_unused_": "gradients are summed by the compiled program; there is nothing to set",
    "sync_batchnorm": "no layer has statistics of the batch; there is nothing to set",
    "ddp_": "gradients are summed by the compiled program; there is nothing to set",
    "fsdp_config.": "model.mesh_shape and sharding say how arrays are divided; nothing is wrapped",
    "deepspeed_": "weights, gradients and optimizer are divided over fsdp by default",
    "dataloader_": "rows are read from memory or ahead of the run; there is nothing to set",
    "hub_": "nothing is uploaded; tunix-lite export checkpoint=RUN writes a Hugging Face folder",
    "bnb_4bit_": "a base of 4 bits is model.lora.base=nf4, its scales are float32",
}
