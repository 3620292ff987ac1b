"""Patches to run megatron-core 0.16.1 on CPU over gloo, without TransformerEngine.

`patch_torch()` must run before the first import of megatron, `patch_megatron()` after it. Both change torch globally:
call them in a separate process, never in the test runner.
"""

import contextlib
import queue

import torch


class NullStream:
    """Placeholder of torch.cuda.Stream and torch.cuda.Event."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, *args):
        pass

    def wait_event(self, *args):
        pass

    def synchronize(self):
        pass

    def record_event(self, *args):
        return self


def patch_torch() -> None:
    """Replaces the torch.cuda functions that megatron-core calls with CPU versions."""
    cuda, cpu = torch.cuda, torch.device("cpu")
    cuda.current_device = lambda: cpu
    # One function object per name: torch._dynamo refuses an object that is registered under two names.
    for owner, name in [
        (cuda, "synchronize"),
        (cuda, "empty_cache"),
        (cuda, "manual_seed"),
        (cuda, "set_rng_state"),
        (cuda.nvtx, "range_push"),
        (cuda.nvtx, "range_pop"),
    ]:
        setattr(owner, name, lambda *args, _name=name, **kwargs: None)
    cuda.get_rng_state = lambda *args, **kwargs: torch.zeros(8, dtype=torch.uint8)
    cuda.random.get_rng_state = lambda *args, **kwargs: torch.zeros(8, dtype=torch.uint8)
    cuda.Stream = NullStream
    cuda.current_stream = lambda *args, **kwargs: NullStream()
    cuda.default_stream = lambda *args, **kwargs: NullStream()
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self

    # Masks, schedules and the optimizer pass device="cuda" literally.
    for name in ("zeros", "ones", "empty", "full", "tensor", "arange", "zeros_like", "empty_like", "randn"):
        setattr(torch, name, _without_cuda(getattr(torch, name)))

    # The optimizers compare `parameter.type()` with "torch.cuda.FloatTensor".
    tensor_type = torch.Tensor.type

    def type_with_cuda(self, *args, **kwargs):
        type_name = tensor_type(self, *args, **kwargs)
        return type_name if args or kwargs else type_name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_with_cuda


def _without_cuda(factory):
    def make(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def patch_megatron() -> None:
    """Patches the parts of megatron-core that fail without CUDA or TransformerEngine."""
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random as tensor_parallel_random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    tensor_parallel_random._set_cuda_rng_state = lambda *args, **kwargs: None
    # The flag is True although the imported classes are None, which leads to isinstance(module, None).
    multi_latent_attention.HAVE_TE = False
    # Without TransformerEngine the router's gating reads a name that is never defined.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # megatron-core sets this event only with a real CUDA stream.
    token_dispatcher.MoEAlltoAllTokenDispatcher.d2h_event = NullStream()

    # megatron-core converts split sizes to lists only for tokens on CUDA.
    all_to_all_single = torch.distributed.all_to_all_single

    def all_to_all_with_lists(output, input, output_split_sizes=None, input_split_sizes=None, **kwargs):
        sizes = [s.tolist() if torch.is_tensor(s) else s for s in (output_split_sizes, input_split_sizes)]
        return all_to_all_single(output, input, *sizes, **kwargs)

    torch.distributed.all_to_all_single = all_to_all_with_lists

    # torch's AdamW has a 'step' per parameter, which checkpoints of the distributed optimizer do not contain.
    def set_loaded_states(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][order]
        with torch.no_grad():
            for name, value in {**self.optimizer.state[main_param], "param": main_param}.items():
                if name in tensors:
                    value.copy_(tensors[name])

    optimizer = distrib_optimizer.DistributedOptimizer
    optimizer._set_main_param_and_optimizer_states = set_loaded_states

    # Loading shares ONE 'step' tensor among all parameters: each update would then count as many steps as parameters.
    load_state_dict = optimizer.load_state_dict

    def load_with_separate_steps(self, state_dict):
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    optimizer.load_state_dict = load_with_separate_steps
    _write_in_this_process()


def _write_in_this_process() -> None:
    """Writes torch_dist files without helper processes, whose start takes seconds per save."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    writer = filesystem_async.FileSystemWriterAsync

    def write_all(transforms, use_msc, rank, buckets, results_queue):
        local = queue.Queue()
        results = {}
        for index, bucket in enumerate(buckets):
            pending = queue.Queue()
            pending.put(index)
            writer.write_preloaded_data(transforms, index, bucket, local, pending, use_fsync=False)
            done, outcome = local.get()
            if isinstance(outcome, Exception):
                raise outcome
            results[done] = outcome
        results_queue.put(results)

    results = queue.Queue()
    filesystem_async._get_write_results_queue = lambda: results
    writer.write_preloaded_data_multiproc = staticmethod(write_all)
