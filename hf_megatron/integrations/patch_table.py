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
_ARGUMENTS = "transformers.training_args:TrainingArguments"
_ACCELERATOR = "accelerate.accelerator:Accelerator"

_LAYOUTS = "transformers accepts parallel layouts from other libraries"
_CHECKPOINTS = "Trainer lets a model define how it is saved"
_RANKS_PER_BATCH = "Trainer lets a model define its data-parallel ranks"
_ACCELERATE = "Accelerate accepts plugins for other engines"
_HUB = "Trainer pushes from several ranks"
_GENERATE = "generation reads the head count from the cache and synchronizes stopping over ranks"
_ROUTERS = "transformers computes router losses over data-parallel ranks"
_TRL = "TRL reads per-token log-probabilities through a method of the model"
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
        f"{_ARGUMENTS}.__post_init__",
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
_ALIASES = {
    "peft.utils.save_and_load:get_peft_model_state_dict": ("peft", "peft.utils", "peft.peft_model"),
    "peft.tuners.tuners_utils:delete_adapter": ("peft.functional",),
}

# Columns: target, replacement (relative to this package unless it starts with `hf_megatron.`), upstream behavior,
# condition under which the patch can be dropped, and optionally a predicate.
# fmt: off
_ROWS: tuple[tuple[str, ...], ...] = (
    (f"{_MODEL}.from_pretrained", "transformers.loading:from_pretrained", "has no megatron_config argument", _ALWAYS),
    (f"{_MODEL}._from_config", "transformers.loading:from_config", "creates the full model on every rank", _ALWAYS),
    ("transformers.models.auto.auto_factory:_BaseAutoModelClass.from_pretrained",
     "transformers.loading:auto_from_pretrained", "reads a config from the Hub before arguments are validated",
     _ALWAYS),
    (f"{_MODEL}.save_pretrained", "transformers.saving:save_pretrained",
     "writes the local shard as if it were the full model", _LAYOUTS),
    (f"{_MODEL}.set_use_kernels", "transformers.hub_kernels:set_use_kernels",
     "replaces the forwards of sharded modules, and skips kernels in training", "kernels asks modules"),
    (f"{_MODEL}.push_to_hub", "hub.hooks:push_to_hub", "uploads from every rank", _LAYOUTS),
    (f"{_MODEL}._initialize_missing_keys", "transformers.loading:initialize_missing_keys",
     "draws different weights on every layout", "transformers draws the global tensor and keeps the shard"),
    (f"{_MODEL}.resize_token_embeddings", "transformers.resizing:resize_token_embeddings",
     "resizes the local shard of the embedding", "transformers resizes sharded embeddings"),
    (f"{_MIXIN}.prepare_distribute_model", "transformers.loading:prepare_distribute_model",
     "creates the mesh of its own layouts", _LAYOUTS),
    (f"{_MIXIN}.maybe_distribute_model", "transformers.loading:maybe_distribute_model", "shards by its own plans",
     _LAYOUTS),
    (f"{_MIXIN}.gather_sharded_state_dict_for_save", "transformers.saving:gather_sharded_state_dict_for_save",
     "gathers all weights on every rank before writing", _LAYOUTS),
    ("transformers.masking_utils:find_packed_sequence_indices",
     "hf_megatron.data_parallel.packed_sequences:find_packed_sequence_indices",
     "synchronizes host and device in every forward", "transformers checks positions only if they were passed"),
    ("transformers.masking_utils:_preprocess_mask_arguments",
     "hf_megatron.data_parallel.packed_sequences:preprocess_mask_arguments",
     "synchronizes host and device for every mask", "transformers checks the masks of a call once"),
    ("transformers.utils.generic:GeneralInterface.__getitem__",
     "hf_megatron.context_parallel.attention_dispatch:mask_function", "creates tensors of queries x keys", _ALWAYS),
    ("transformers.trainer:has_mixed_dtensor", "trainer.trainer:has_mixed_dtensor",
     "treats off-stage weights as a separate mesh", "Trainer groups parameters by mesh"),
    (f"{_MIXIN}.barrier_after_gathered_checkpoint_save", "transformers.saving:barrier_after_gathered_checkpoint_save",
     "reads sizes that a layout may not define", _LAYOUTS),
    ("transformers.trainer:get_model_param_count", "transformers.saving:get_model_param_count",
     "counts the parameters of the local pipeline stages", "Trainer reads the number of parameters from the model"),
    ("transformers.modeling_utils:AttentionInterface.get_interface",
     "hf_megatron.context_parallel.attention_dispatch:attention_function",
     "attends to local tokens only and saves intermediate results for backward", _ALWAYS),
    ("transformers.core_model_loading:_add_unmatched_checkpoint_key",
     "transformers.loading:add_unmatched_checkpoint_key", "reports off-stage weights as unexpected",
     "the loader asks the model which weights it holds"),
    ("transformers.distributed.sharding_utils:DtensorShardOperation.__init__",
     "transformers.shard_operation:plan_shard", "reads the first dim of a scalar",
     "the loader reads scalar parameters"),
    ("transformers.distributed.sharding_utils:DtensorShardOperation.shard_tensor",
     "transformers.shard_operation:shard_tensor", "assumes that a rank's experts are contiguous",
     "the loader reads blocks that are sharded separately"),
    ("transformers.core_model_loading:set_param_for_module", "transformers.loading:set_param_for_module",
     "leaves weights memory-mapped to the file", "the loader copies weights that training writes to"),
    (f"{_GENERATION}.generate", "transformers.generation:generate", "samples and stops on each rank separately",
     _GENERATE),
    (f"{_GENERATION}._maybe_prepare_encoder_kwargs_for_generation", "transformers.generation:call_encoder",
     "calls the encoder outside of the model's forward", _GENERATE),
    (f"{_GENERATION}._get_stopping_criteria", "transformers.generation:get_stopping_criteria",
     "evaluates the stopping criteria on each rank separately", _GENERATE),
    (f"{_GENERATION}._get_static_cache_init_shape", "transformers.generation:get_static_cache_init_shape",
     "counts the heads of the full model", _GENERATE),
    (f"{_GENERATION}._valid_auto_compile_criteria", "transformers.generation:valid_auto_compile_criteria",
     "compiles a forward that contains pipeline communication", _GENERATE),
    ("transformers.generation.continuous_batching.continuous_api:ContinuousMixin.init_continuous_batching",
     "transformers.generation:init_continuous_batching", "schedules requests on each rank separately",
     "ranks share one scheduler"),
    *((f"{_SWITCH}:{name}", "hf_megatron.losses.router_losses:row_mean", "treats local samples as the full batch",
       _ROUTERS) for name in ("load_balancing_loss_func", "router_z_loss_func")),
    (f"{_ARGUMENTS}.__post_init__", "transformers.training_arguments:post_init",
     "reports a single process on every rank of a CPU job", "TrainingArguments joins the job's ranks on CPUs"),
    (f"{_TRAINER}.__init__", "trainer.trainer:init", "accepts settings that train incorrectly on a sharded model",
     _ALWAYS),
    ("transformers.trainer:apply_liger_kernel", "trainer.fused_kernels:apply_liger_kernel",
     "replaces the head and its loss by a kernel that reads the full weight", "Liger supports sharded heads"),
    (f"{_TRAINER}._build_accelerator_args", "trainer.trainer:build_accelerator_args", "supports only its own plans",
     _RANKS_PER_BATCH),
    (f"{_TRAINER}._sync_replicated_trainable_parameters", "trainer.trainer:sync_replicated_trainable_parameters",
     "averages gradients that are averaged already", _RANKS_PER_BATCH),
    (f"{_TRAINER}.get_tp_size", "trainer.trainer:get_tp_size",
     "divides by model-parallel ranks although the loss was not summed over them", _RANKS_PER_BATCH),
    (f"{_TRAINER}.floating_point_ops", "trainer.ramp_up:skip_missing_operations",
     "assumes a different number of calls per step", "Trainer supports batch-size ramp-up"),
    (f"{_TRAINER}.floating_point_ops", "trainer.trainer:floating_point_ops",
     "counts a batch once per model-parallel rank", _RANKS_PER_BATCH),
    (f"{_TRAINER}._finalize_training", "trainer.trainer:finalize_training", "adds the local loss since the last log",
     "Trainer gathers it as for a log"),
    (f"{_TRAINER}._maybe_log_save_evaluate", "trainer.control_flags:maybe_log_save_evaluate",
     "follows a callback's flags on the rank that set them", _RANKS_PER_BATCH),
    (f"{_TRAINER}.log", "trainer.callbacks.base:log", "reports logs before callbacks can add to them",
     "Trainer collects additions of callbacks first"),
    (f"{_TRAINER}._inner_training_loop", "trainer.callbacks.base:inner_training_loop",
     "does not notify callbacks of an error that ended training", "Trainer notifies callbacks"),
    (f"{_TRAINER}.get_batch_samples", "trainer.ramp_up:take_step_batches",
     "uses the same number of batches in every step", "Trainer supports batch-size ramp-up"),
    (f"{_TRAINER}.get_batch_samples", "trainer.padded_batches:get_batch_samples",
     "trains on samples that pad the last batch", "Accelerate reports which samples are repeated"),
    (f"{_TRAINER}._track_num_input_tokens", "trainer.ramp_up:skip_missing_tokens",
     "counts tokens for a different number of calls per step", "Trainer supports batch-size ramp-up"),
    (f"{_TRAINER}._track_num_input_tokens", "trainer.padded_batches:track_num_input_tokens",
     "counts the tokens of samples that pad a batch", "Accelerate reports which samples are repeated"),
    (f"{_TRAINER}._get_eval_sampler", "trainer.ordered_data:get_eval_sampler",
     "sorts samples by length for one device", _RANKS_PER_BATCH),
    (f"{_TRAINER}._get_train_sampler", "trainer.ordered_data:get_train_sampler",
     "sorts samples by length for one device, and shuffles data that defines its own order",
     "Trainer keeps the order of such data, and Accelerate's samplers support model-parallel groups"),
    (f"{_TRAINER}._set_signature_columns_if_needed", "trainer.ordered_data:set_signature_columns",
     "drops labels that are shifted already, and shifts the others again", "Trainer keeps shift_labels"),
    (f"{_TRAINER}.call_model_init", "trainer.trainer:call_model_init",
     "creates a model after its Accelerator, and again later", _RANKS_PER_BATCH),
    ("transformers.trainer_seq2seq:Seq2SeqTrainer.prediction_step", "trainer.padded_batches:sequence_prediction_step",
     "keeps the samples that pad the last batch", "Seq2SeqTrainer gathers as Trainer does"),
    *((f"{_TRAINER}.{name}", f"trainer.uneven_batches:{name.removeprefix('_')}",
       "pads the samples of each rank separately", "Accelerate's loaders collate the samples of all ranks together")
      for name in ("evaluation_loop", "_prepare_for_training")),
    (f"{_TRAINER}.compute_loss", "trainer.script_losses:compute_loss", "multiplies the loss by the number of ranks",
     "Trainer scales the losses of subclasses too", "trainer.script_losses:has_script_loss"),
    (f"{_TRAINER}.prediction_step", "trainer.pipeline:prediction_step", "sends logits that are not read",
     "Trainer declares whether it reads logits"),
    (f"{_TRAINER}.training_step", "trainer.ramp_up:skip_missing_call", "makes the same number of calls in every step",
     "Trainer supports batch-size ramp-up", "trainer.ramp_up:counts_samples"),
    (f"{_TRAINER}.training_step", "trainer.padded_batches:leave_out_empty_batch", "trains on samples that pad a batch",
     "Accelerate reports which samples are repeated", "trainer.padded_batches:divides_batches"),
    (f"{_TRAINER}.training_step", "trainer.pipeline:training_step", "multiplies the loss after the forward",
     "Trainer announces the factor before the forward", "trainer.pipeline:is_pipelined"),
    *((f"{_TRAINER}.{name}", f"trainer.checkpoints:{name.removeprefix('_')}", stock, _CHECKPOINTS)
      for name, stock in ( ("train", "takes the highest number as the newest complete checkpoint"), ("_save_checkpoint",
         "writes files that a kill leaves half-written"), ("_load_from_checkpoint", "reads full weights"),
         ("_load_optimizer_and_scheduler", "unpickles the optimizer of one layout"), ("_load_rng_state",
         "unpickles random states of as many ranks"), ("_load_best_model", "reads full weights"), )),
    (f"{_TRAINER}._get_dataloader", "trainer.ordered_data:get_dataloader", "reads a stream on one rank for all",
     "Accelerate splits batches of any length"),
    ("transformers.trainer:get_last_checkpoint", "trainer.resume:get_last_checkpoint",
     "takes the highest number as the newest complete checkpoint", _CHECKPOINTS),
    ("transformers.trainer:skip_first_batches", "trainer.ordered_data:skip_first_batches",
     "skips the same number of steps, with the current batch size", "Trainer resumes by samples"),
    ("transformers.trainer:compare_trainer_and_checkpoint_args", "trainer.checkpoints:compare_arguments",
     "warns of batch sizes that another layout requires", _CHECKPOINTS),
    (f"{_TRAINER}.init_hf_repo", "hub.hooks:init_hf_repo", "creates the repository on every rank", _HUB),
    (f"{_TRAINER}.push_to_hub", "hub.hooks:trainer_push_to_hub", "uploads everything from one rank", _HUB),
    (f"{_TRAINER}._push_from_checkpoint", "hub.hooks:push_from_checkpoint", "uploads everything from one rank", _HUB),
    (f"{_TRAINER}._save", "transformers.model_cards:save", "writes a card without the layout", _ALWAYS),
    (f"{_TRAINER}.create_model_card", "transformers.model_cards:create_model_card", "writes a card without the layout",
     _ALWAYS),
    ("trl.trainer.base_trainer:_BaseTrainer.create_model_card", "transformers.model_cards:create_model_card",
     "writes a card without the layout", _ALWAYS),
    (f"{_ACCELERATOR}.__init__", "accelerate.accelerator:init",
     "splits batches over all ranks, also model-parallel ones", _ACCELERATE),
    (f"{_ACCELERATOR}.prepare_model", "accelerate.accelerator:prepare_model", "wraps models in DistributedDataParallel",
     _ACCELERATE),
    (f"{_ACCELERATOR}._prepare_tp", "accelerate.accelerator:prepare_tp", "puts full DTensors into the optimizer",
     _ACCELERATE),
    (f"{_ACCELERATOR}.prepare_optimizer", "torch.optimizers:prepare_optimizer", "steps on full parameters",
     _ACCELERATE),
    *((f"{_ACCELERATOR}.{name}", f"accelerate.replicas:{name}", "counts each model-parallel rank as a replica",
       _ACCELERATE) for name in ("num_processes", "process_index")),
    (f"{_ACCELERATOR}.is_last_process", "accelerate.replicas:is_last_process",
     "compares an index with a count, which are those of replicas", _ACCELERATE),
    (f"{_ACCELERATOR}.profile", "accelerate.replicas:profile", "names the trace of a rank by its replica", _ACCELERATE),
    (f"{_ACCELERATOR}.prepare_data_loader", "accelerate.shuffled_order:prepare_data_loader",
     "finds a rank's batches by its place in the layout, shuffles by another seed than a single process, and shares "
     "out the batches of a DistributedSampler again",
     _ACCELERATE),
    *((f"accelerate.data_loader:{name}.set_epoch", "accelerate.shuffled_order:set_epoch",
       "looks for the sampler two levels deep, and finds none in a loader that skips and shards",
       "Accelerate passes the epoch to samplers on all levels")
      for name in ("DataLoaderShard", "DataLoaderDispatcher")),
    ("accelerate.utils.random:AcceleratorState", "accelerate.replicas:seed_state",
     "seeds the ranks of a replica differently", _ACCELERATE),
    *((f"{_ARGUMENTS}.{name}", f"accelerate.replicas:{function}",
       "counts each model-parallel rank as a replica", _RANKS_PER_BATCH)
      for name, function in (("world_size", "world_size"), ("process_index", "training_process_index"))),
    *((target, "accelerate.replicas:count_ranks", "is true on every rank of the first replica", _RANKS_PER_BATCH)
      for target in (f"{_ARGUMENTS}.should_log", f"{_ARGUMENTS}.should_save", f"{_TRAINER}.is_world_process_zero")),
    (f"{_ARGUMENTS}.main_process_first", "accelerate.replicas:main_process_first",
     "lets no rank of a single replica wait", _RANKS_PER_BATCH),
    ("accelerate.local_sgd:LocalSGD.__init__", "accelerate.accelerator:reject_local_sgd",
     "averages weights whose gradients are averaged already", _ACCELERATE),
    (f"{_ACCELERATOR}.prepare_scheduler", "accelerate.accelerator:prepare_scheduler",
     "steps once per model-parallel rank", _ACCELERATE),
    (f"{_ACCELERATOR}.clip_grad_norm_", "accelerate.accelerator:clip_grad_norm_",
     "clips by the norm of the local shard", _ACCELERATE),
    (f"{_ACCELERATOR}.gather", "accelerate.gathering:gather", "gathers duplicates from model-parallel ranks",
     _ACCELERATE),
    (f"{_ACCELERATOR}.gather_for_metrics", "accelerate.gathering:gather_for_metrics",
     "gathers duplicates from model-parallel ranks", _ACCELERATE),
    (f"{_ACCELERATOR}.split_between_processes", "accelerate.gathering:split_between_processes",
     "splits over model-parallel ranks too", _ACCELERATE),
    (f"{_ACCELERATOR}.reduce", "accelerate.gathering:reduce", "counts a batch once per model-parallel rank",
     _ACCELERATE),
    (f"{_ACCELERATOR}.check_trigger", "accelerate.gathering:check_trigger", "ignores the other model-parallel ranks",
     _ACCELERATE),
    (f"{_ACCELERATOR}.save_state", "accelerate.checkpoints:save_state", "pickles the state of one layout", _ACCELERATE),
    (f"{_ACCELERATOR}.load_state", "accelerate.checkpoints:load_state", "reads the state of one layout", _ACCELERATE),
    (f"{_ACCELERATOR}.get_state_dict", "accelerate.accelerator:get_state_dict", "returns the local shard", _ACCELERATE),
    ("accelerate.optimizer:AcceleratedOptimizer.step", "torch.optimizers:optimizer_step",
     "does not report that the step was skipped on every rank", _ACCELERATE),
    ("accelerate.data_loader:DataLoaderStateMixin.begin", "accelerate.batch_shards:begin",
     "counts the samples of the dataset instead of the sampler, and not for loaders that skip batches",
     "Accelerate counts the samples that its samplers yield"),
    ("accelerate.data_loader:DataLoaderStateMixin.end", "accelerate.batch_shards:end",
     "drops the loader while Trainer still collects its batches",
     "Accelerate counts the samples that its samplers yield"),
    ("accelerate.data_loader:DataLoaderStateMixin.end", "accelerate.shuffled_order:end_order",
     "knows no order that a saved state could continue", "Accelerate saves the order of an epoch"),
    ("accelerate.data_loader:DataLoaderDispatcher.__init__", "accelerate.data_loaders:make_dispatcher",
     "splits batches over model-parallel ranks if a loader is recreated to skip some", _ACCELERATE),
    ("accelerate.data_loader:DataLoaderShard.__iter__", "accelerate.data_loaders:iterate",
     "hangs ranks with more batches than others", "Accelerate stops all ranks together"),
    ("torch.autograd:backward", "torch.autograd:backward", "leaves gradients local that are not reduced", _ALWAYS),
    ("torch.autograd:_engine_run_backward", "torch.autograd:run_backward", "misses in-place edits of sharded weights",
     "local tensors of DTensors count in-place edits"),
    ("torch:Tensor.register_hook", "torch.autograd:register_hook",
     "passes the local gradient times dp_size to hooks", _ALWAYS),
    ("torch.utils:swap_tensors", "torch.autograd:swap_tensors", "drops the hooks of weights that a cast swaps",
     "torch swaps hooks with their tensors"),
    ("torch.amp.grad_scaler:GradScaler._unscale_grads_", "torch.optimizers:unscale_grads",
     "checks only the local shard for infinities", "torch's scaler lets the optimizer check"),
    # Replace `.func`, which these decorated functions call: training loops have already imported them by name.
    *((f"torch.nn.utils.clip_grad:{name}.func", f"torch.optimizers:{name.removeprefix('_')}",
       "treats local gradients as complete", "torch's norm supports pipelines and gradients that are reduced late")
      for name in ("clip_grad_norm_", "_get_total_norm", "_clip_grads_with_norm_")),
    ("torch.distributed.distributed_c10d:_get_default_group", "torch.default_group:default_group",
     "counts a sample once per rank of its replica", _ALWAYS),
    ("torch.distributed.distributed_c10d:_get_default_timeout", "accelerate.process_group:default_timeout",
     "gives new groups a timeout of 30 minutes regardless of the job", "torch gives new groups the job's timeout"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel.state_dict_type",
     "transformers.saving:state_dict_type", "raises for a model without FSDP modules", _ALWAYS),
    ("torch.nn.parallel.distributed:DistributedDataParallel.__init__", "torch.ddp_check:data_parallel",
     "averages shards of different weights", _ALWAYS),
    ("transformers.integrations.peft:PeftAdapterMixin.add_adapter", "peft.loading:add_adapter",
     "lists an adapter that was rejected", _ALWAYS),
    ("transformers.modeling_utils:maybe_load_adapters", "peft.loading:find_adapter",
     "loads a folder's adapter before the model is complete", _ALWAYS),
    ("transformers.integrations.peft:PeftAdapterMixin.load_adapter", "peft.loading:load_adapter",
     "loads shards by its own plans", _ALWAYS),
    ("peft.peft_model:PeftModel.__init__", "peft.injection:init", "ignores the layout", _ALWAYS),
    ("peft.mixed_model:PeftMixedModel.__init__", "peft.injection:init_mixed", "ignores the layout", _ALWAYS),
    ("peft.peft_model:PeftModel._setup_prompt_encoder", "peft.injection:setup_prompt_encoder", "ignores the layout",
     _ALWAYS),
    ("peft.peft_model:PeftModel.get_prompt", "peft.injection:get_prompt", "creates prompts for all heads", _ALWAYS),
    ("peft.tuners.tuners_utils:BaseTuner.inject_adapter", "peft.injection:inject_adapter",
     "adds full adapters to sharded layers", _ALWAYS),
    ("peft.tuners.lora.model:LoraModel._enable_peft_forward_hooks", "peft.injection:reject_adapter_names",
     "assigns adapters to the samples of a full batch", _ALWAYS),
    ("peft.tuners.tuners_utils:BaseTuner._unload_and_optionally_merge", "peft.injection:unload", "ignores the layout",
     _ALWAYS),
    ("peft.tuners.tuners_utils:delete_adapter", "peft.injection:delete_adapter", "keeps its shardings", _ALWAYS),
    ("peft.tuners.tuners_utils:BaseTuner._cast_adapter_dtype", "peft.injection:cast_adapter", "replaces parameters",
     _ALWAYS),
    ("peft.tuners.tuners_utils:BaseTuner.merge_adapter", "peft.injection:merge_adapter", "ignores the layout", _ALWAYS),
    ("peft.peft_model:PeftModel.save_pretrained", "peft.injection:save_adapter", "writes the files on every rank",
     _ALWAYS),
    ("transformers.utils.hub:PushToHubMixin.push_to_hub", "peft.injection:push_adapter", "uploads on every rank",
     _ALWAYS),
    ("peft.utils.save_and_load:get_peft_model_state_dict", "peft.injection:adapter_state_dict",
     "returns the local shard", _ALWAYS),
    *((f"peft.tuners.{name}.layer:Linear.__init__", "peft.injection:linear_init",
       "assumes that a linear's weight is [out, in]", _ALWAYS) for name in ("lora", "ia3")),
    ("peft.tuners.lora.dora:DoraLinearLayer.update_layer", "peft.injection:dora_update_layer", "reads the local shard",
     _ALWAYS),
    ("peft.tuners.trainable_tokens.model:TrainableTokensModel.inject_adapter", "peft.injection:inject_tokens",
     "adds tied tokens to sharded layers", _ALWAYS),
    ("peft.tuners.trainable_tokens.layer:TrainableTokensLayer.update_layer", "peft.injection:tokens_update_layer",
     "reads the local shard", _ALWAYS),
    *((f"peft.tuners.lora.layer:LoraLayer.{name}_init", "peft.injection:from_base", "reads the local shard", _ALWAYS)
      for name in ("pissa", "olora")),
    ("peft.utils.save_and_load:_reshard_dtensor_values_for_load", "peft.injection:parts_for_load",
     "slices one dim only, of a strided shard", _ALWAYS),
    ("peft.tuners.lora.layer:_get_in_out_features", "peft.injection:in_out_features", "counts the local shard",
     _ALWAYS),
    *((f"trl.trainer.{name.lower()}_trainer:{target}", f"trl.base:{function}", stock, _TRL)
      for name in ("SFT", "DPO", "KTO", "GRPO", "RLOO") for target, function, stock in ( (f"{name}Trainer.__init__",
         "init", "accepts any model"), ("add_fused_lm_head", "add_fused_lm_head", "reads the full head's weight"),
         ("create_model_from_path", "create_model_from_path", "loads the reference model whole"), )),
    # TRL 1.14; DPOTrainer and KTOTrainer read logits there.
    ("trl.trainer.sft_trainer:_patch_chunked_ce_lm_head", "trl.base:patch_chunked_loss", "reads the full head's weight",
     "TRL 1.14 is no longer supported"),
    ("trl.trainer.reward_trainer:RewardTrainer.__init__", "trl.base:init", "accepts any model", _TRL),
    ("trl.trainer.reward_trainer:create_model_from_path", "trl.base:create_model_from_path", "loads onto one device",
     _TRL),
    ("trl.trainer.sft_trainer:SFTTrainer.prediction_step", "trl.base:sft_prediction_step", "averages over local tokens",
     _TRL),
    *((f"trl.trainer.{name}_trainer:hash_module", "trl.base:hash_module", "hashes the local shard", _TRL)
      for name in ("dpo", "kto")),
    ("trl.trainer.dpo_trainer:DPOTrainer._compute_loss", "trl.losses:dpo_loss", "sorts and averages over local samples",
     "TRL computes these losses over the samples of all ranks"),
    ("trl.trainer.kto_trainer:KTOTrainer._compute_loss", "trl.losses:kto_loss",
     "reports the local router loss in evaluation", "TRL averages router losses over all ranks"),
    ("trl.trainer.kto_trainer:KTOTrainer._prepare_dataset", "trl.losses:kto_prepare_dataset",
     "pairs samples within the local batch", "TRL pairs samples within the global batch"),
    *((f"trl.experimental.{name}.{name}_trainer:{name.upper()}Trainer.{method}", function, stock, until)
      for name in ("orpo", "cpo") for method, function, stock, until in ( ("__init__", "trl.base:init",
         "accepts any model", _TRL), ( "concatenated_forward", f"trl.losses:{name}_forward",
         "averages over local tokens", "TRL counts tokens over ranks", ), )),
    *((f"trl.trainer.{name.lower()}_trainer:{target.format(name)}", f"trl.online:{function}", stock, _RANKS_PER_BATCH)
      for name in ("GRPO", "RLOO", "Distillation") for target, function, stock in ( ("shuffle_sequence_dict", "shuffle",
         "shuffles the rows of each rank by themselves"), ("{}Trainer._prepare_inputs", "prepare_inputs",
         "does not say whose rows it shuffles"), ("{}Trainer.prediction_step", "predict_over_replicas",
         "keeps this rank's part of an evaluation's loss"), )),
    *((f"trl.trainer.{name.lower()}_{target.format(name)}", function, stock, _RANKS_PER_BATCH)
      for name in ("GRPO", "RLOO") for target, function, stock in ( ("config:{}Config.__post_init__",
         "trl.generation_sizes:count_generations", "counts prompts once per rank"),
         ( "trainer:{}Trainer._generate_and_score_completions", "trl.online:generate_and_score",
         "takes the rows of a rank by its number", ), ( "trainer:{}Trainer._generate_single_turn",
         "trl.routing:generate_turn", "forgets which experts were chosen", ),
         ( "trainer:{}Trainer._get_per_token_logps_and_entropies", "trl.routing:token_numbers",
         "forgets which experts were chosen", ), ( "trainer:{}Trainer._compute_loss", "trl.online:compute_global_loss",
         "averages over local tokens", ), ( "trainer:{}Trainer._calculate_rewards", "trl.online:calculate_rewards",
         "calls reward functions on each rank of a batch", ), )),
    *((f"accelerate.utils.operations:{name}", f"accelerate.gather_functions:{function}",
       "gathers duplicates from model-parallel ranks", _ACCELERATE)
      for name, function in (("_gpu_gather", "gather_by_name"), ("_gpu_gather_object", "gather_object_by_name"))),
    ("trl.experimental.gkd.gkd_trainer:GKDTrainer.__init__", "trl.distillation:gkd_init",
     "loads the full teacher on every rank", _TRL),
    ("trl.experimental.gkd.gkd_trainer:GKDTrainer.compute_loss", "trl.distillation:gkd_compute_loss",
     "reads the full logits of two models, and divides by all ranks' tokens and again by the number of ranks", _TRL),
    ("trl.experimental.gkd.gkd_trainer:GKDTrainer.training_step", "trl.distillation:gkd_training_step",
     "decides on each rank separately whether to generate", _RANKS_PER_BATCH),
    *((f"trl.trainer.distillation_trainer:{target}", function, stock, _TRL)
      for target, function, stock in ( ("DistillationTrainer.__init__", "trl.base:init", "accepts any model"),
         ("create_model_from_path", "trl.base:create_model_from_path", "loads the full teacher on every rank"),
         ( "DistillationTrainer.compute_loss", "trl.distillation:distillation_compute_loss",
         "reads the heads of two models", ), )),
    *((f"sentence_transformers.{name}:get_rank", "sentence_transformers:get_rank",
       "counts each model-parallel rank as a replica", _RANKS_PER_BATCH)
      for name in ("util.distributed", *_EMBEDDING_LOSSES)),
    ("sentence_transformers.util.distributed:all_gather", "sentence_transformers:gather_embeddings",
     "gathers duplicates from model-parallel ranks", _RANKS_PER_BATCH),
    ("sentence_transformers.base.modules.transformer:Transformer.forward", "sentence_transformers:forward",
     "calls a model's forward without its hooks", _ALWAYS),
    ("sentence_transformers.base.trainer:distributed_evaluation", "sentence_transformers:distributed_evaluation",
     "splits sentences over model-parallel ranks", _RANKS_PER_BATCH),
    ("sentence_transformers.base.model:BaseModel.save", "sentence_transformers:save", "saves on one rank", _LAYOUTS),
    ("sentence_transformers.base.trainer:BaseTrainer._load_from_checkpoint", "sentence_transformers:load_trained",
     "reads full weights", _CHECKPOINTS),
    ("sentence_transformers.base.trainer:BaseTrainer._build_dataloader", "sentence_transformers:build_dataloader",
     "draws batches on each rank separately", _RANKS_PER_BATCH),
    ("sentence_transformers.base.trainer:BaseTrainer.get_train_dataloader",
     "sentence_transformers:get_train_dataloader", "distributes complete batches to the ranks", _RANKS_PER_BATCH),
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
    ("transformers.modeling_utils", f"{_HERE}.torch.dtensor_ops:override_sharded_tensor_ops"),
    ("transformers.modeling_utils", f"{_HERE}.torch.data_assignment:replace_data_assignment"),
    ("transformers.modeling_utils", "hf_megatron.pipeline_parallel.module_placement:follow_exchanged_modules"),
)
