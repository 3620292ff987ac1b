"""How the ecosystem's loops meet the library, one file each, all gated on a model being ours.

`PATCHES` is the whole list of what is replaced upstream: target -> the function that wraps the original. Each wrapper
passes everything through that does not concern a model laid out by this library.
"""

from collections.abc import Mapping

_HERE = __name__
_MODEL = "transformers.modeling_utils:PreTrainedModel"
_ATTENTION = "transformers.modeling_utils:AttentionInterface"
_AUTO = "transformers.models.auto.auto_factory:_BaseAutoModelClass"
_MIXIN = "transformers.distributed.mixin:DistributedMixin"
_GENERATION = "transformers.generation.utils:GenerationMixin"
_ACCELERATOR = "accelerate.accelerator:Accelerator"

PATCHES: Mapping[str, str] = {
    f"{_MODEL}.from_pretrained": f"{_HERE}.transformers:from_pretrained",
    f"{_MODEL}._from_config": f"{_HERE}.transformers:from_config",
    f"{_MODEL}.save_pretrained": f"{_HERE}.transformers:save_pretrained",
    f"{_MODEL}.push_to_hub": f"{_HERE}.hub:push_to_hub",
    f"{_MODEL}._initialize_missing_keys": f"{_HERE}.transformers:initialize_missing_keys",
    f"{_MODEL}.resize_token_embeddings": f"{_HERE}.transformers:resize_token_embeddings",
    f"{_AUTO}.from_pretrained": f"{_HERE}.transformers:auto_from_pretrained",
    f"{_MIXIN}.prepare_distribute_model": f"{_HERE}.transformers:prepare_distribute_model",
    f"{_MIXIN}.maybe_distribute_model": f"{_HERE}.transformers:maybe_distribute_model",
    f"{_ATTENTION}.get_interface": "hf_megatron.memory.recompute:recomputing_interface",
    "transformers.core_model_loading:_add_unmatched_checkpoint_key": (
        f"{_HERE}.transformers:add_unmatched_checkpoint_key"
    ),
    "transformers.core_model_loading:set_param_for_module": f"{_HERE}.transformers:set_param_for_module",
    f"{_GENERATION}.generate": f"{_HERE}.generation:generate",
    "transformers.generation.continuous_batching.continuous_api:ContinuousMixin.init_continuous_batching": (
        f"{_HERE}.generation:init_continuous_batching"
    ),
    f"{_GENERATION}._get_stopping_criteria": f"{_HERE}.generation:get_stopping_criteria",
    f"{_GENERATION}._get_static_cache_init_shape": f"{_HERE}.generation:get_static_cache_init_shape",
    f"{_GENERATION}._valid_auto_compile_criteria": f"{_HERE}.generation:valid_auto_compile_criteria",
    "transformers.training_args:TrainingArguments.__post_init__": f"{_HERE}.training_arguments:post_init",
    "transformers.trainer:Trainer.__init__": f"{_HERE}.trainer:init",
    "transformers.trainer:Trainer._build_accelerator_args": f"{_HERE}.trainer:build_accelerator_args",
    **{
        f"transformers.trainer:Trainer.{name}": f"{_HERE}.checkpoints:{name.removeprefix('_')}"
        for name in (
            "train",
            "_save_checkpoint",
            "_load_from_checkpoint",
            "_load_optimizer_and_scheduler",
            "_load_scaler",
            "_load_rng_state",
            "_load_best_model",
        )
    },
    **{
        f"transformers.trainer:Trainer.{name}": f"{_HERE}.hub:{function}"
        for name, function in (
            ("init_hf_repo", "init_hf_repo"),
            ("push_to_hub", "trainer_push_to_hub"),
            ("_push_from_checkpoint", "push_from_checkpoint"),
        )
    },
    "transformers.trainer:Trainer._save": f"{_HERE}.cards:save",
    "transformers.trainer:Trainer.create_model_card": f"{_HERE}.cards:create_model_card",
    "trl.trainer.base_trainer:_BaseTrainer.create_model_card": f"{_HERE}.cards:create_model_card",
    "transformers.trainer:get_last_checkpoint": f"{_HERE}.checkpoints:get_last_checkpoint",
    "transformers.trainer:compare_trainer_and_checkpoint_args": f"{_HERE}.checkpoints:compare_arguments",
    "transformers.trainer:Trainer._has_mixed_mesh_grads": f"{_HERE}.trainer:has_mixed_mesh_grads",
    "transformers.trainer:Trainer._sync_replicated_trainable_parameters": (
        f"{_HERE}.trainer:sync_replicated_trainable_parameters"
    ),
    "transformers.trainer:Trainer._get_num_items_in_batch": f"{_HERE}.trainer:get_num_items_in_batch",
    "transformers.trainer:Trainer.prediction_step": f"{_HERE}.evaluation:prediction_step",
    "transformers.trainer:Trainer.training_step": f"{_HERE}.pipeline:training_step",
    f"{_ACCELERATOR}.__init__": f"{_HERE}.accelerate:init",
    f"{_ACCELERATOR}.prepare_model": f"{_HERE}.accelerate:prepare_model",
    f"{_ACCELERATOR}._prepare_tp": f"{_HERE}.accelerate:prepare_tp",
    f"{_ACCELERATOR}.prepare_optimizer": f"{_HERE}.optimizer:prepare_optimizer",
    "accelerate.optimizer:AcceleratedOptimizer.step": f"{_HERE}.optimizer:optimizer_step",
    "torch.amp.grad_scaler:GradScaler._unscale_grads_": f"{_HERE}.optimizer:unscale_grads",
    "torch.nn.utils.clip_grad:clip_grad_norm_": f"{_HERE}.optimizer:clip_grad_norm_",
    "torch.nn.utils:clip_grad_norm_": f"{_HERE}.optimizer:clip_grad_norm_",
    f"{_ACCELERATOR}.prepare_scheduler": f"{_HERE}.accelerate:prepare_scheduler",
    f"{_ACCELERATOR}.clip_grad_norm_": f"{_HERE}.accelerate:clip_grad_norm_",
    f"{_ACCELERATOR}.gather": f"{_HERE}.gathering:gather",
    f"{_ACCELERATOR}.gather_for_metrics": f"{_HERE}.gathering:gather_for_metrics",
    f"{_ACCELERATOR}.reduce": f"{_HERE}.gathering:reduce",
    f"{_ACCELERATOR}.save_state": f"{_HERE}.state:save_state",
    f"{_ACCELERATOR}.load_state": f"{_HERE}.state:load_state",
    f"{_ACCELERATOR}.get_state_dict": f"{_HERE}.accelerate:get_state_dict",
    "accelerate.data_loader:DataLoaderShard.__iter__": f"{_HERE}.data:iterate",
    "torch.distributed.distributed_c10d:_get_default_timeout": f"{_HERE}.accelerate:default_timeout",
    "torch.nn.parallel.distributed:DistributedDataParallel.__init__": f"{_HERE}.refusals:data_parallel",
    "peft.peft_model:PeftModel.__init__": f"{_HERE}.refusals:peft",
    "peft.tuners.tuners_utils:BaseTuner.__init__": f"{_HERE}.refusals:peft",
    **{
        f"trl.trainer.{name.lower()}_trainer:{name}Trainer.__init__": f"{_HERE}.refusals:trl"
        for name in ("KTO", "GRPO", "RLOO", "Reward", "Distillation")
    },
    **{
        f"trl.trainer.{name.lower()}_trainer:{target}": f"{_HERE}.trl:{function}"
        for name in ("SFT", "DPO")
        for target, function in (
            (f"{name}Trainer.__init__", "init"),
            ("add_fused_lm_head", "add_fused_lm_head"),
            ("create_model_from_path", "create_model_from_path"),
        )
    },
    "trl.trainer.dpo_trainer:hash_module": f"{_HERE}.trl:hash_module",
}

# Registered for the whole process when a module is imported: module -> the function that does so and returns a handle.
HOOKS: Mapping[str, str] = {"transformers.modeling_utils": f"{_HERE}.optimizer:refuse_unprepared_steps"}
