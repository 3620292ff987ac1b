"""Ways to train one Llama that the benchmarks compare. Each builder runs inside the worker process of one rank.

A builder returns the parameters for the optimizer and a function that computes the loss of one step. Dependencies of a
variant beyond torch and transformers are imported inside its builder, because they are optional.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Job:
    """Work of one rank: a model saved in `folder` and its fixed batch."""

    folder: str
    dtype: str
    batch_size: int
    sequence_length: int
    rank: int
    ranks: int

    def token_ids(self, config):
        generator = torch.Generator().manual_seed(1)
        return torch.randint(0, config.vocab_size, (self.batch_size, self.sequence_length), generator=generator)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4)


def prepared_adamw(parameters):
    import hf_megatron

    return hf_megatron.prepare_optimizer(adamw(parameters))


@dataclass(frozen=True)
class Variant:
    build: Callable
    ranks: int
    threads: int
    needs_group: bool = True
    optimizer: Callable = adamw


def load_model(job, **kwargs):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(job.folder, dtype=DTYPES[job.dtype], **kwargs).train()


def read_loss(model, ids):
    return lambda: model(input_ids=ids, labels=ids).loss


def stock(job):
    model = load_model(job)
    return list(model.parameters()), read_loss(model, job.token_ids(model.config))


def half_batch(job):
    model = load_model(job)
    ids = job.token_ids(model.config).chunk(job.ranks)[job.rank]
    return list(model.parameters()), read_loss(model, ids)


def transformers_tp(job):
    from transformers.distributed import DistributedConfig

    model = load_model(job, distributed_config=DistributedConfig(tp_size=job.ranks))
    return list(model.parameters()), read_loss(model, job.token_ids(model.config))


def hf_megatron_with(**options):
    def build(job):
        import hf_megatron

        model = load_model(job, megatron_config=hf_megatron.MegatronConfig(tp_size=job.ranks, **options))
        return list(model.parameters()), read_loss(model, job.token_ids(model.config))

    return build


def load_state_dict(job):
    """The saved tensors in the job's dtype, read lazily from the file: only the slices that are copied take memory."""
    from safetensors.torch import load_file
    from transformers import AutoConfig

    state_dict = load_file(os.path.join(job.folder, "model.safetensors"))
    return AutoConfig.from_pretrained(job.folder), {k: v.to(DTYPES[job.dtype]) for k, v in state_dict.items()}


def plain_megatron(job):
    from plain_megatron import PlainMegatronLlama

    config, state_dict = load_state_dict(job)
    model = PlainMegatronLlama(config, state_dict, job.rank, job.ranks)
    ids = job.token_ids(config)
    return list(model.weights.values()), lambda: model.loss(ids)


def megatron_core(job):
    import megatron_core_cpu

    config, state_dict = load_state_dict(job)
    model = megatron_core_cpu.build_gpt_model(config, DTYPES[job.dtype], job.ranks, job.sequence_length)
    megatron_core_cpu.load_llama_weights(model, config, state_dict, job.rank, job.ranks)
    ids = job.token_ids(config)
    positions = torch.arange(job.sequence_length).expand_as(ids)
    future = torch.ones(1, 1, job.sequence_length, job.sequence_length, dtype=torch.bool).triu(1)
    labels = ids.roll(-1, 1)  # the last position wraps around and is excluded from the mean

    def loss():
        return model(ids, positions, future, labels=labels)[:, :-1].float().mean()

    return list(model.parameters()), loss


VARIANTS = {
    "one_process_2_threads": Variant(stock, ranks=1, threads=2, needs_group=False),
    "one_process_1_thread": Variant(stock, ranks=1, threads=1, needs_group=False),
    "two_processes_no_communication": Variant(half_batch, ranks=2, threads=1, needs_group=False),
    "transformers_tp": Variant(transformers_tp, ranks=2, threads=1),
    "megatron_core": Variant(megatron_core, ranks=2, threads=1),
    "plain_megatron": Variant(plain_megatron, ranks=2, threads=1),
    "hf_megatron": Variant(hf_megatron_with(), ranks=2, threads=1, optimizer=prepared_adamw),
    "hf_megatron_chunked": Variant(hf_megatron_with(loss_chunk_size=128), ranks=2, threads=1, optimizer=prepared_adamw),
    "hf_megatron_sp": Variant(hf_megatron_with(sequence_parallel=True), ranks=2, threads=1, optimizer=prepared_adamw),
}
