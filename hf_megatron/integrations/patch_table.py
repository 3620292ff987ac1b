"""Table of every replaced upstream function: target, replacement, upstream behavior, and how long it is needed.

Every replacement calls the original for models that this library has not parallelized. Attributes that are replaced on
single parallelized models are in `instance_patches.py`; docs/patches.md lists both.

Rows with the same target form a chain: the first row is the outermost replacement, and the `original` of the last row
is the upstream function. An optional fifth column names a predicate that is called with the first argument of each call
and decides whether the replacement runs.
"""

from collections.abc import Iterator, Sequence

from ..compat.patch_registry import ModulePatternPatch, Patch

_HERE = __package__
_MODEL = "transformers.modeling_utils:PreTrainedModel"
_MIXIN = "transformers.distributed.mixin:DistributedMixin"
_GENERATION = "transformers.generation.utils:GenerationMixin"
_TRAINER = "transformers.trainer:Trainer"
_ACCELERATOR = "accelerate.accelerator:Accelerator"

_LAYOUTS = "transformers takes layouts of other libraries"
_CHECKPOINTS = "Trainer asks the model how it is saved"
_RANKS_PER_BATCH = "Trainer asks a model which ranks share a batch"
_ACCELERATE = "Accelerate has plugins for engines of others"
_HUB = "Trainer pushes from several ranks"
_GENERATE = "generation asks the cache for its heads and ranks for their verdict"
_ROUTERS = "transformers takes router losses over the ranks of a batch"
_TRL = "TRL asks a model for its numbers per token"
_ALWAYS = "always"

_SWITCH = "transformers.models.switch_transformers.modeling_switch_transformers"
# Each of these modules imports the function by name.
_EMBEDDING_LOSSES = (
    *(
        f"sentence_transformer.losses.{prefix}{name}"
        for prefix in ("", "cached_")
        for name in ("gist_embed", "multiple_negatives_ranking")
    ),
    *(f"multi_vector_encoder.losses.{prefix}multiple_negatives_ranking" for prefix in ("", "cached_")),
)

# Targets replaced by `import hf_megatron`. They parallelize a model, launch a layout or read a sharded checkpoint; when
# that happens they call `PATCH_REGISTRY.activate()`, which applies all other rows.
ENTRY_POINTS = frozenset(
    (
        f"{_MODEL}.from_pretrained",
        f"{_MODEL}._from_config",
        f"{_MODEL}.save_pretrained",
        "transformers.models.auto.auto_factory:_BaseAutoModelClass.from_pretrained",
        "transformers.training_args:TrainingArguments.__post_init__",
        f"{_TRAINER}._load_from_checkpoint",
        "transformers.trainer:get_last_checkpoint",
        f"{_ACCELERATOR}.__init__",
        f"{_ACCELERATOR}.load_state",
        "trl.trainer.grpo_config:GRPOConfig.__post_init__",
        "trl.trainer.rloo_config:RLOOConfig.__post_init__",
        # Scripts import it by name before they load a model.
        "peft.utils.save_and_load:get_peft_model_state_dict",
    )
)

# Modules that import a target's function by name.
_ALIASES = {"peft.utils.save_and_load:get_peft_model_state_dict": ("peft", "peft.utils", "peft.peft_model")}

# Columns: target, replacement (relative to this package unless it starts with `hf_megatron.`), upstream behavior,
# condition under which the patch can be dropped, and optionally a predicate.
_ROWS: tuple[tuple[str, ...], ...] = (
    (f"{_MODEL}.from_pretrained", "transformers.loading:from_pretrained", "knows no megatron_config", _ALWAYS),
    (f"{_MODEL}._from_config", "transformers.loading:from_config", "makes the whole model on every rank", _ALWAYS),
    (
        "transformers.models.auto.auto_factory:_BaseAutoModelClass.from_pretrained",
        "transformers.loading:auto_from_pretrained",
        "reads a config from the Hub before anything is refused",
        _ALWAYS,
    ),
    (
        f"{_MODEL}.save_pretrained",
        "transformers.saving:save_pretrained",
        "writes this rank's part as if it were all",
        _LAYOUTS,
    ),
    (f"{_MODEL}.push_to_hub", "hub.hooks:push_to_hub", "every rank uploads what it has", _LAYOUTS),
    (
        f"{_MODEL}._initialize_missing_keys",
        "transformers.loading:initialize_missing_keys",
        "draws other numbers on every layout",
        "transformers draws by the global tensor",
    ),
    (
        f"{_MODEL}.resize_token_embeddings",
        "transformers.saving:resize_token_embeddings",
        "resizes this rank's rows",
        "transformers resizes split embeddings",
    ),
    (
        f"{_MIXIN}.prepare_distribute_model",
        "transformers.loading:prepare_distribute_model",
        "makes the mesh of its own layouts",
        _LAYOUTS,
    ),
    (
        f"{_MIXIN}.maybe_distribute_model",
        "transformers.loading:maybe_distribute_model",
        "splits by its own plans",
        _LAYOUTS,
    ),
    (
        f"{_MIXIN}.gather_sharded_state_dict_for_save",
        "transformers.saving:gather_sharded_state_dict_for_save",
        "gathers all weights on every rank to write them at once",
        _LAYOUTS,
    ),
    (
        "transformers.masking_utils:find_packed_sequence_indices",
        "hf_megatron.data_parallel.packed_sequences:find_packed_sequence_indices",
        "has the host wait for its device in every forward",
        "transformers looks at positions that it was given only",
    ),
    (
        "transformers.masking_utils:_preprocess_mask_arguments",
        "hf_megatron.data_parallel.packed_sequences:preprocess_mask_arguments",
        "has the host wait for its device in every mask",
        "transformers looks at the masks of a call once",
    ),
    (
        "transformers.utils.generic:GeneralInterface.__getitem__",
        "hf_megatron.context_parallel.attention_dispatch:mask_function",
        "makes tensors of queries x keys",
        _ALWAYS,
    ),
    (
        "transformers.trainer:has_mixed_dtensor",
        "trainer.trainer:has_mixed_dtensor",
        "takes weights of other stages for a mesh of their own",
        "Trainer splits groups of parameters by mesh",
    ),
    (
        f"{_MIXIN}.barrier_after_gathered_checkpoint_save",
        "transformers.saving:barrier_after_gathered_checkpoint_save",
        "asks a layout for sizes that it may not have",
        _LAYOUTS,
    ),
    (
        "transformers.trainer:get_model_param_count",
        "transformers.saving:get_model_param_count",
        "counts the parameters of this rank's stages",
        "Trainer asks a model for its size",
    ),
    (
        "transformers.modeling_utils:AttentionInterface.get_interface",
        "hf_megatron.context_parallel.attention_dispatch:attention_function",
        "attends to the tokens at hand, and keeps what it computes for backward",
        _ALWAYS,
    ),
    (
        "transformers.core_model_loading:_add_unmatched_checkpoint_key",
        "transformers.loading:add_unmatched_checkpoint_key",
        "reports weights of other stages as unexpected",
        "the loader asks a model what it holds",
    ),
    (
        "transformers.distributed.sharding_utils:DtensorShardOperation.__init__",
        "transformers.shard_operation:plan_shard",
        "asks a single number for its first dim",
        "the loader reads a parameter without dims",
    ),
    (
        "transformers.distributed.sharding_utils:DtensorShardOperation.shard_tensor",
        "transformers.shard_operation:shard_tensor",
        "takes a rank's experts for a run of them",
        "the loader reads blocks that are split one by one",
    ),
    (
        "transformers.core_model_loading:set_param_for_module",
        "transformers.loading:set_param_for_module",
        "leaves weights mapped into the file",
        "the loader copies what training will write to",
    ),
    (f"{_GENERATION}.generate", "transformers.generation:generate", "each rank draws and stops alone", _GENERATE),
    (
        f"{_GENERATION}._maybe_prepare_encoder_kwargs_for_generation",
        "transformers.generation:call_encoder",
        "calls the encoder outside of the model's forward",
        _GENERATE,
    ),
    (
        f"{_GENERATION}._get_stopping_criteria",
        "transformers.generation:get_stopping_criteria",
        "judges stopping on each rank",
        _GENERATE,
    ),
    (
        f"{_GENERATION}._get_static_cache_init_shape",
        "transformers.generation:get_static_cache_init_shape",
        "counts the heads of the whole model",
        _GENERATE,
    ),
    (
        f"{_GENERATION}._valid_auto_compile_criteria",
        "transformers.generation:valid_auto_compile_criteria",
        "compiles a forward with collectives of pipelines",
        _GENERATE,
    ),
    (
        "transformers.generation.continuous_batching.continuous_api:ContinuousMixin.init_continuous_batching",
        "transformers.generation:init_continuous_batching",
        "schedules requests on each rank alone",
        "ranks share one scheduler",
    ),
    *(
        (
            f"{_SWITCH}:{name}",
            "hf_megatron.losses.router_losses:row_mean",
            "takes this rank's rows for all of them",
            _ROUTERS,
        )
        for name in ("load_balancing_loss_func", "router_z_loss_func")
    ),
    (
        "transformers.training_args:TrainingArguments.__post_init__",
        "transformers.training_arguments:post_init",
        "reports one process on every rank of a CPU job",
        "TrainingArguments joins the job's ranks on CPUs",
    ),
    (f"{_TRAINER}.__init__", "trainer.trainer:init", "accepts what would train wrong on a split model", _ALWAYS),
    (
        f"{_TRAINER}._build_accelerator_args",
        "trainer.trainer:build_accelerator_args",
        "knows ranks of its own plans only",
        _RANKS_PER_BATCH,
    ),
    (
        f"{_TRAINER}._has_mixed_mesh_grads",
        "trainer.trainer:has_mixed_mesh_grads",
        "takes a norm that knows no shards of ours",
        _RANKS_PER_BATCH,
    ),
    (
        f"{_TRAINER}._sync_replicated_trainable_parameters",
        "trainer.trainer:sync_replicated_trainable_parameters",
        "averages gradients that our reduction has averaged",
        _RANKS_PER_BATCH,
    ),
    (
        f"{_TRAINER}.get_tp_size",
        "trainer.trainer:get_tp_size",
        "divides by the ranks of a batch what was not summed over them",
        _RANKS_PER_BATCH,
    ),
    (
        f"{_TRAINER}.get_total_train_batch_size",
        "trainer.trainer:get_total_train_batch_size",
        "counts every rank's rows",
        _RANKS_PER_BATCH,
    ),
    (
        f"{_TRAINER}.floating_point_ops",
        "trainer.ramp_up:skip_missing_operations",
        "counts calls that a step does not have",
        "Trainer grows batches",
    ),
    (
        f"{_TRAINER}.floating_point_ops",
        "trainer.trainer:floating_point_ops",
        "counts a batch once for each of its ranks",
        _RANKS_PER_BATCH,
    ),
    (
        f"{_TRAINER}._finalize_training",
        "trainer.trainer:finalize_training",
        "adds this rank's loss since the last log",
        "Trainer gathers it as it does for a log",
    ),
    (
        f"{_TRAINER}.log",
        "trainer.callbacks.base:log",
        "tells logs to those it reports to before callbacks can add to them",
        "Trainer asks callbacks for what they add",
    ),
    (
        f"{_TRAINER}._inner_training_loop",
        "trainer.callbacks.base:inner_training_loop",
        "tells no callback that an error ended training",
        "Trainer tells callbacks",
    ),
    (
        f"{_TRAINER}.get_batch_samples",
        "trainer.ramp_up:take_step_batches",
        "takes as many batches for every step",
        "Trainer grows batches",
    ),
    (
        f"{_TRAINER}.get_batch_samples",
        "trainer.padded_batches:get_batch_samples",
        "trains on rows that fill up the last batch of several ranks",
        "Accelerate says which rows are repeated",
    ),
    (
        f"{_TRAINER}._track_num_input_tokens",
        "trainer.ramp_up:skip_missing_tokens",
        "counts tokens of calls that a step does not have",
        "Trainer grows batches",
    ),
    (
        f"{_TRAINER}._track_num_input_tokens",
        "trainer.padded_batches:track_num_input_tokens",
        "counts tokens of rows that fill up a batch",
        "Accelerate says which rows are repeated",
    ),
    (
        f"{_TRAINER}._get_eval_sampler",
        "trainer.ordered_data:get_eval_sampler",
        "sorts rows by length for one device or all processes",
        _RANKS_PER_BATCH,
    ),
    (
        f"{_TRAINER}._get_train_sampler",
        "trainer.ordered_data:get_train_sampler",
        "sorts rows by length for one device or all processes, and shuffles data that has an order of its own",
        "Trainer keeps the order of such data, and Accelerate's samplers know of ranks that share rows",
    ),
    (
        f"{_TRAINER}._set_signature_columns_if_needed",
        "trainer.ordered_data:set_signature_columns",
        "leaves out labels that are shifted already, and shifts the others again",
        "Trainer keeps shift_labels",
    ),
    (
        f"{_TRAINER}.call_model_init",
        "trainer.trainer:call_model_init",
        "makes a model after its Accelerator, and again",
        _RANKS_PER_BATCH,
    ),
    (
        "transformers.trainer_seq2seq:Seq2SeqTrainer.prediction_step",
        "trainer.padded_batches:sequence_prediction_step",
        "keeps the rows that fill up the last batch",
        "Seq2SeqTrainer gathers as Trainer does",
    ),
    *(
        (
            f"{_TRAINER}.{name}",
            f"trainer.uneven_batches:{name.removeprefix('_')}",
            "pads the rows of each rank for themselves",
            "Accelerate's loaders collate the rows of all ranks together",
        )
        for name in ("evaluation_loop", "_prepare_for_training")
    ),
    (
        f"{_TRAINER}.prediction_step",
        "trainer.pipeline:prediction_step",
        "sends logits that nobody reads",
        "Trainer says whether it reads logits",
    ),
    (
        f"{_TRAINER}.training_step",
        "trainer.ramp_up:skip_missing_call",
        "makes as many calls in every step",
        "Trainer grows batches",
        "trainer.ramp_up:counts_samples",
    ),
    (
        f"{_TRAINER}.training_step",
        "trainer.padded_batches:leave_out_empty_batch",
        "trains on rows that fill up a batch",
        "Accelerate says which rows are repeated",
        "trainer.padded_batches:divides_batches",
    ),
    (
        f"{_TRAINER}.training_step",
        "trainer.pipeline:training_step",
        "says what the loss is multiplied by afterwards",
        "Trainer says so before the forward",
        "trainer.pipeline:is_pipelined",
    ),
    *(
        (f"{_TRAINER}.{name}", f"trainer.checkpoints:{name.removeprefix('_')}", stock, _CHECKPOINTS)
        for name, stock in (
            ("train", "takes the highest number for the newest complete checkpoint"),
            ("_save_checkpoint", "writes files that a kill leaves half-written"),
            ("_load_from_checkpoint", "reads whole weights"),
            ("_load_optimizer_and_scheduler", "unpickles the optimizer of one layout"),
            ("_load_scaler", "unpickles the scaler"),
            ("_load_rng_state", "unpickles random states of as many ranks"),
            ("_load_best_model", "reads whole weights"),
        )
    ),
    (
        f"{_TRAINER}._get_dataloader",
        "trainer.ordered_data:get_dataloader",
        "has one rank read a stream for all",
        "Accelerate cuts batches of any length",
    ),
    (
        "transformers.trainer:get_last_checkpoint",
        "trainer.resume:get_last_checkpoint",
        "takes the highest number for the newest complete checkpoint",
        _CHECKPOINTS,
    ),
    (
        "transformers.trainer:skip_first_batches",
        "trainer.ordered_data:skip_first_batches",
        "skips as many steps as there were, of the batch size that there is now",
        "Trainer goes on by samples",
    ),
    (
        "transformers.trainer:compare_trainer_and_checkpoint_args",
        "trainer.checkpoints:compare_arguments",
        "warns of batch sizes that another layout has to have",
        _CHECKPOINTS,
    ),
    (f"{_TRAINER}.init_hf_repo", "hub.hooks:init_hf_repo", "every rank makes the repository", _HUB),
    (f"{_TRAINER}.push_to_hub", "hub.hooks:trainer_push_to_hub", "one rank uploads everything", _HUB),
    (f"{_TRAINER}._push_from_checkpoint", "hub.hooks:push_from_checkpoint", "one rank uploads everything", _HUB),
    (f"{_TRAINER}._save", "transformers.model_cards:save", "writes no card with the layout", _ALWAYS),
    (
        f"{_TRAINER}.create_model_card",
        "transformers.model_cards:create_model_card",
        "writes a card without the layout",
        _ALWAYS,
    ),
    (
        "trl.trainer.base_trainer:_BaseTrainer.create_model_card",
        "transformers.model_cards:create_model_card",
        "writes a card without the layout",
        _ALWAYS,
    ),
    (f"{_ACCELERATOR}.__init__", "accelerate.accelerator:init", "splits batches over all ranks", _ACCELERATE),
    (
        f"{_ACCELERATOR}.prepare_model",
        "accelerate.accelerator:prepare_model",
        "wraps models in DistributedDataParallel",
        _ACCELERATE,
    ),
    (
        f"{_ACCELERATOR}._prepare_tp",
        "accelerate.accelerator:prepare_tp",
        "puts whole DTensors into the optimizer",
        _ACCELERATE,
    ),
    (
        f"{_ACCELERATOR}.prepare_optimizer",
        "torch.optimizers:prepare_optimizer",
        "steps on whole parameters",
        _ACCELERATE,
    ),
    (
        f"{_ACCELERATOR}.num_processes",
        "accelerate.accelerator:num_processes",
        "counts the ranks of a batch each",
        _ACCELERATE,
    ),
    (
        f"{_ACCELERATOR}.prepare_scheduler",
        "accelerate.accelerator:prepare_scheduler",
        "steps once for each rank of a batch",
        _ACCELERATE,
    ),
    (
        f"{_ACCELERATOR}.clip_grad_norm_",
        "accelerate.accelerator:clip_grad_norm_",
        "clips by the norm of this rank's part",
        _ACCELERATE,
    ),
    (f"{_ACCELERATOR}.gather", "accelerate.gathering:gather", "repeats what ranks of one batch hold", _ACCELERATE),
    (
        f"{_ACCELERATOR}.gather_for_metrics",
        "accelerate.gathering:gather_for_metrics",
        "repeats what ranks of one batch hold",
        _ACCELERATE,
    ),
    (
        f"{_ACCELERATOR}.split_between_processes",
        "accelerate.gathering:split_between_processes",
        "splits over the ranks of a batch too",
        _ACCELERATE,
    ),
    (f"{_ACCELERATOR}.reduce", "accelerate.gathering:reduce", "counts a batch once for each of its ranks", _ACCELERATE),
    (
        f"{_ACCELERATOR}.check_trigger",
        "accelerate.gathering:check_trigger",
        "does not ask the other ranks of a batch",
        _ACCELERATE,
    ),
    (f"{_ACCELERATOR}.save_state", "accelerate.checkpoints:save_state", "pickles the state of one layout", _ACCELERATE),
    (f"{_ACCELERATOR}.load_state", "accelerate.checkpoints:load_state", "reads the state of one layout", _ACCELERATE),
    (f"{_ACCELERATOR}.get_state_dict", "accelerate.accelerator:get_state_dict", "gives this rank's part", _ACCELERATE),
    (
        "accelerate.optimizer:AcceleratedOptimizer.step",
        "torch.optimizers:optimizer_step",
        "does not know that all ranks skipped a step",
        _ACCELERATE,
    ),
    (
        "accelerate.data_loader:DataLoaderStateMixin.begin",
        "accelerate.batch_shards:begin",
        "counts the rows of the dataset, whatever the sampler takes, and of no loader that skips batches",
        "Accelerate counts what its samplers deal out",
    ),
    (
        "accelerate.data_loader:DataLoaderStateMixin.end",
        "accelerate.batch_shards:end",
        "forgets the loader whose batches Trainer is still collecting",
        "Accelerate counts what its samplers deal out",
    ),
    (
        "accelerate.data_loader:DataLoaderDispatcher.__init__",
        "accelerate.data_loaders:make_dispatcher",
        "deals batches out to ranks of one batch where a loader is made again to skip some",
        _ACCELERATE,
    ),
    (
        "accelerate.data_loader:DataLoaderShard.__iter__",
        "accelerate.data_loaders:iterate",
        "lets ranks with more batches wait for ever",
        "Accelerate stops all ranks together",
    ),
    (
        "torch.autograd:backward",
        "torch.autograd:backward",
        "leaves gradients that nobody reduces to this rank",
        _ALWAYS,
    ),
    (
        "torch.autograd:_engine_run_backward",
        "torch.autograd:run_backward",
        "does not see edits in place of split weights",
        "DTensor's parts count edits in place",
    ),
    (
        "torch._tensor:Tensor.register_hook",
        "torch.autograd:register_hook",
        "shows a hook this rank's gradient times dp_size",
        _ALWAYS,
    ),
    (
        "torch.utils:swap_tensors",
        "torch.autograd:swap_tensors",
        "forgets the hooks of weights that a cast swaps",
        "torch swaps hooks with their tensors",
    ),
    (
        "torch.amp.grad_scaler:GradScaler._unscale_grads_",
        "torch.optimizers:unscale_grads",
        "looks for infinities in what this rank holds",
        "torch's scaler asks the optimizer",
    ),
    # Replace `.func`, which these decorated functions call: training loops have already imported them by name.
    *(
        (
            f"torch.nn.utils.clip_grad:{name}.func",
            f"torch.optimizers:{name.removeprefix('_')}",
            "takes this rank's gradients for all",
            "torch's norm follows pipelines and gradients that are reduced late",
        )
        for name in ("clip_grad_norm_", "_get_total_norm", "_clip_grads_with_norm_")
    ),
    (
        "torch.distributed.distributed_c10d:_get_default_timeout",
        "accelerate.process_group:default_timeout",
        "gives new groups half an hour whatever the job has",
        "torch gives new groups the job's timeout",
    ),
    (
        "torch.nn.parallel.distributed:DistributedDataParallel.__init__",
        "torch.ddp_check:data_parallel",
        "averages shards of different weights",
        _ALWAYS,
    ),
    *(
        (
            f"transformers.integrations.peft:PeftAdapterMixin.{name}",
            "torch.ddp_check:own_adapters",
            "saves a model's adapters without asking where they lie",
            "it is laid out, too",
        )
        for name in ("add_adapter", "load_adapter")
    ),
    ("peft.peft_model:PeftModel.__init__", "peft.injection:init", "knows no layout", _ALWAYS),
    ("peft.mixed_model:PeftMixedModel.__init__", "peft.injection:init_mixed", "knows no layout", _ALWAYS),
    (
        "peft.peft_model:PeftModel._setup_prompt_encoder",
        "peft.injection:setup_prompt_encoder",
        "knows no layout",
        _ALWAYS,
    ),
    ("peft.peft_model:PeftModel.get_prompt", "peft.injection:get_prompt", "makes prompts for all heads", _ALWAYS),
    (
        "peft.tuners.tuners_utils:BaseTuner.inject_adapter",
        "peft.injection:inject_adapter",
        "puts whole adapters beside split layers",
        _ALWAYS,
    ),
    (
        "peft.tuners.lora.model:LoraModel._enable_peft_forward_hooks",
        "peft.injection:forward_hooks",
        "names adapters for rows of a whole batch",
        _ALWAYS,
    ),
    (
        "peft.tuners.tuners_utils:BaseTuner._unload_and_optionally_merge",
        "peft.injection:unload",
        "knows no layout",
        _ALWAYS,
    ),
    (
        "peft.tuners.tuners_utils:BaseTuner._cast_adapter_dtype",
        "peft.injection:cast_adapter",
        "exchanges parameters",
        _ALWAYS,
    ),
    ("peft.tuners.tuners_utils:BaseTuner.merge_adapter", "peft.injection:merge_adapter", "knows no layout", _ALWAYS),
    (
        "peft.peft_model:PeftModel._get_base_model_class",
        "peft.injection:base_model_class",
        "writes FSDP2's class",
        _ALWAYS,
    ),
    (
        "peft.peft_model:PeftModel.save_pretrained",
        "peft.injection:save_adapter",
        "every rank writes the files",
        _ALWAYS,
    ),
    ("transformers.utils.hub:PushToHubMixin.push_to_hub", "peft.injection:push_adapter", "every rank uploads", _ALWAYS),
    (
        "peft.utils.save_and_load:get_peft_model_state_dict",
        "peft.injection:adapter_state_dict",
        "gives this rank's part",
        _ALWAYS,
    ),
    *(
        (
            f"peft.tuners.{name}.layer:Linear.__init__",
            "peft.injection:linear_init",
            "takes a linear's weight for [out, in]",
            _ALWAYS,
        )
        for name in ("lora", "ia3")
    ),
    (
        "peft.tuners.lora.dora:DoraLinearLayer.update_layer",
        "peft.injection:dora_update_layer",
        "reads what a rank holds",
        _ALWAYS,
    ),
    *(
        (
            f"peft.tuners.lora.layer:LoraLayer.{name}_init",
            "peft.injection:from_base",
            "reads what a rank holds",
            _ALWAYS,
        )
        for name in ("pissa", "olora")
    ),
    (
        "peft.utils.save_and_load:_reshard_dtensor_values_for_load",
        "peft.injection:parts_for_load",
        "cuts one dim alone, of a strided part",
        _ALWAYS,
    ),
    (
        "peft.tuners.lora.layer:_get_in_out_features",
        "peft.injection:in_out_features",
        "counts what a rank holds",
        _ALWAYS,
    ),
    *(
        (f"trl.trainer.{name.lower()}_trainer:{target}", f"trl.base:{function}", stock, _TRL)
        for name in ("SFT", "DPO", "KTO", "GRPO", "RLOO")
        for target, function, stock in (
            (f"{name}Trainer.__init__", "init", "takes any model"),
            ("add_fused_lm_head", "add_fused_lm_head", "reads the whole head's weight"),
            ("create_model_from_path", "create_model_from_path", "loads the reference model whole"),
        )
    ),
    # TRL 1.14; DPOTrainer and KTOTrainer read logits there.
    (
        "trl.trainer.sft_trainer:_patch_chunked_ce_lm_head",
        "trl.base:patch_chunked_loss",
        "reads the whole head's weight",
        "TRL 1.14 is no longer supported",
    ),
    ("trl.trainer.reward_trainer:RewardTrainer.__init__", "trl.base:init", "takes any model", _TRL),
    (
        "trl.trainer.reward_trainer:create_model_from_path",
        "trl.base:create_model_from_path",
        "loads onto one device",
        _TRL,
    ),
    (
        "trl.trainer.sft_trainer:SFTTrainer.prediction_step",
        "trl.base:sft_prediction_step",
        "takes this rank's mean over tokens",
        _TRL,
    ),
    *(
        (f"trl.trainer.{name}_trainer:hash_module", "trl.base:hash_module", "hashes this rank's part", _TRL)
        for name in ("dpo", "kto")
    ),
    (
        "trl.trainer.dpo_trainer:DPOTrainer._compute_loss",
        "trl.losses:dpo_loss",
        "sorts, and averages the tokens of, this rank's rows",
        "TRL takes these losses over all ranks' rows",
    ),
    (
        "trl.trainer.kto_trainer:KTOTrainer._compute_loss",
        "trl.losses:kto_loss",
        "takes this rank's router loss in evaluation",
        "TRL takes router losses over all ranks",
    ),
    (
        "trl.trainer.kto_trainer:KTOTrainer._prepare_dataset",
        "trl.losses:kto_prepare_dataset",
        "pairs rows within this rank's batch",
        "TRL pairs rows within the batch of all ranks",
    ),
    *(
        (f"trl.experimental.{name}.{name}_trainer:{name.upper()}Trainer.{method}", function, stock, until)
        for name in ("orpo", "cpo")
        for method, function, stock, until in (
            ("__init__", "trl.base:init", "takes any model", _TRL),
            (
                "concatenated_forward",
                f"trl.losses:{name}_forward",
                "takes this rank's mean over tokens",
                "TRL counts tokens over ranks",
            ),
        )
    ),
    *(
        (f"trl.trainer.{name.lower()}_trainer:{target.format(name)}", f"trl.online:{function}", stock, _RANKS_PER_BATCH)
        for name in ("GRPO", "RLOO", "Distillation")
        for target, function, stock in (
            ("set_seed", "seed_replicas", "draws otherwise on ranks that share prompts"),
            ("shuffle_sequence_dict", "shuffle", "shuffles the rows of each rank by themselves"),
            ("{}Trainer._prepare_inputs", "prepare_inputs", "does not say whose rows it shuffles"),
            ("{}Trainer.prediction_step", "predict_over_replicas", "keeps this rank's part of an evaluation's loss"),
        )
    ),
    *(
        (f"trl.trainer.{name.lower()}_{target.format(name)}", function, stock, _RANKS_PER_BATCH)
        for name in ("GRPO", "RLOO")
        for target, function, stock in (
            ("config:{}Config.__post_init__", "trl.generation_sizes:count_generations", "counts prompts once per rank"),
            (
                "trainer:{}Trainer._generate_and_score_completions",
                "trl.online:generate_and_score",
                "takes the rows of a rank by its number",
            ),
            (
                "trainer:{}Trainer._generate_single_turn",
                "trl.routing:generate_turn",
                "forgets which experts were chosen",
            ),
            (
                "trainer:{}Trainer._get_per_token_logps_and_entropies",
                "trl.routing:token_numbers",
                "forgets which experts were chosen",
            ),
            (
                "trainer:{}Trainer._compute_loss",
                "trl.online:compute_global_loss",
                "takes this rank's mean over tokens",
            ),
            (
                "trainer:{}Trainer._calculate_rewards",
                "trl.online:calculate_rewards",
                "calls reward functions on each rank of a batch",
            ),
        )
    ),
    (f"{_ACCELERATOR}.process_index", "trl.online:process_index", "counts the ranks of a batch each", _RANKS_PER_BATCH),
    *(
        (
            f"accelerate.utils.operations:{name}",
            f"accelerate.gather_functions:{function}",
            "repeats what ranks of one batch hold",
            _ACCELERATE,
        )
        for name, function in (("_gpu_gather", "gather_by_name"), ("_gpu_gather_object", "gather_object_by_name"))
    ),
    (
        "trl.experimental.gkd.gkd_trainer:GKDTrainer.__init__",
        "trl.distillation:gkd_init",
        "loads the teacher whole",
        _TRL,
    ),
    (
        "trl.experimental.gkd.gkd_trainer:GKDTrainer.compute_loss",
        "trl.distillation:gkd_compute_loss",
        "reads the logits of two models, and divides by all ranks' tokens and again by the ranks",
        _TRL,
    ),
    (
        "trl.experimental.gkd.gkd_trainer:GKDTrainer.training_step",
        "trl.distillation:gkd_training_step",
        "draws whether to generate on each rank",
        _RANKS_PER_BATCH,
    ),
    *(
        (f"trl.trainer.distillation_trainer:{target}", function, stock, _TRL)
        for target, function, stock in (
            ("DistillationTrainer.__init__", "trl.base:init", "takes any model"),
            ("create_model_from_path", "trl.base:create_model_from_path", "loads the teacher whole"),
            (
                "DistillationTrainer.compute_loss",
                "trl.distillation:distillation_compute_loss",
                "reads the heads of two models",
            ),
        )
    ),
    *(
        (
            f"sentence_transformers.{name}:get_rank",
            "sentence_transformers:get_rank",
            "counts the ranks of a batch each",
            _RANKS_PER_BATCH,
        )
        for name in ("util.distributed", *_EMBEDDING_LOSSES)
    ),
    (
        "sentence_transformers.util.distributed:all_gather",
        "sentence_transformers:gather_embeddings",
        "repeats what ranks of one batch hold",
        _RANKS_PER_BATCH,
    ),
    (
        "sentence_transformers.base.modules.transformer:Transformer.forward",
        "sentence_transformers:forward",
        "calls a model's forward without its hooks",
        _ALWAYS,
    ),
    (
        "sentence_transformers.base.trainer:distributed_evaluation",
        "sentence_transformers:distributed_evaluation",
        "deals sentences out to ranks that hold parts of one model",
        _RANKS_PER_BATCH,
    ),
    ("sentence_transformers.base.model:BaseModel.save", "sentence_transformers:save", "saves on one rank", _LAYOUTS),
    (
        "sentence_transformers.base.trainer:BaseTrainer._load_from_checkpoint",
        "sentence_transformers:load_trained",
        "reads whole weights",
        _CHECKPOINTS,
    ),
    (
        "sentence_transformers.base.trainer:BaseTrainer._build_dataloader",
        "sentence_transformers:build_dataloader",
        "draws batches for each rank by itself",
        _RANKS_PER_BATCH,
    ),
    (
        "sentence_transformers.base.trainer:BaseTrainer.get_train_dataloader",
        "sentence_transformers:get_train_dataloader",
        "deals whole batches out to the ranks",
        _RANKS_PER_BATCH,
    ),
)
# fmt: on


def _patches() -> Iterator[Patch]:
    for target, replacement, stock, until, *when in _ROWS:
        function, *predicate = (
            name if name.startswith("hf_megatron.") else f"{_HERE}.{name}" for name in (replacement, *when)
        )
        aliases = _ALIASES.get(target, ())
        yield Patch(target, function, stock, until, "".join(predicate), target in ENTRY_POINTS, aliases)


PATCHES: tuple[Patch, ...] = tuple(_patches())

# Functions that transformers duplicates in many modeling files.
PATTERNS: tuple[ModulePatternPatch, ...] = (
    # Doge and NLLB-MoE couple the samples of a batch, so both are rejected with data parallelism, and their losses stay
    # as they are. Doge's function of this name also has another signature.
    ModulePatternPatch(
        "transformers.models.*.modeling_*",
        "load_balancing_loss_func",
        ("gate_logits", "num_experts", "top_k", "attention_mask"),
        "hf_megatron.losses.router_losses:load_balancing_loss",
        "takes this rank's part of a batch for all of it",
        _ROUTERS,
        excluded=("transformers.models.nllb_moe.modeling_nllb_moe",),
    ),
)

# Process-wide hooks. Importing the first module of a pair calls the function, which registers a hook and returns its
# removal handle.
HOOKS: Sequence[tuple[str, str]] = (
    ("transformers.modeling_utils", f"{_HERE}.torch.optimizers:watch_unprepared_steps"),
    ("transformers.modeling_utils", f"{_HERE}.torch.optimizers:end_unprepared_steps"),
    ("transformers.modeling_utils", f"{_HERE}.torch.autograd:watch_retained_gradients"),
    ("transformers.modeling_utils", f"{_HERE}.torch.dtensor_methods:replace_tensor_methods"),
    ("transformers.modeling_utils", f"{_HERE}.torch.dtensor_ops:handle_split_operators"),
    ("transformers.modeling_utils", "hf_megatron.pipeline_parallel.module_placement:follow_exchanged_modules"),
)
