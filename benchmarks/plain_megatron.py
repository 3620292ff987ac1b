"""Megatron's tensor-parallel Llama on plain tensors, written by hand: the lower bound for a library's overhead.

Parameters are this rank's slices under their transformers names; the default process group is the tensor-parallel one.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

# Weights split by rows are column parallel, weights split by columns are row parallel; norms are replicated.
CUT_DIM = dict.fromkeys(("embed_tokens", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"), 0)
CUT_DIM |= {"o_proj": 1, "down_proj": 1}


class CopyToRegion(torch.autograd.Function):
    """Identity whose gradient is all-reduced; one at a block's input serves all of its projections."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient := gradient.contiguous())
        return gradient


class ReduceFromRegion(torch.autograd.Function):
    """All-reduce, in place because the row-parallel product before it does not save its output."""

    @staticmethod
    def forward(ctx, partial):
        dist.all_reduce(partial)
        ctx.mark_dirty(partial)
        return partial

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of `targets` [tokens] under `logits` [tokens, local vocabulary], without gathering logits."""

    @staticmethod
    def forward(ctx, logits, targets, first_id):
        ctx.dtype, logits = logits.dtype, logits.float()
        dist.all_reduce(largest := logits.amax(-1, keepdim=True), dist.ReduceOp.MAX)
        logits = logits - largest
        local = (targets - first_id).unsqueeze(-1)
        mine = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        # One all-reduce for both sums; the target's logit is read before the exponential overwrites it.
        dist.all_reduce(sums := torch.cat([logits.gather(-1, local) * mine, logits.exp_().sum(-1, keepdim=True)], -1))
        ctx.save_for_backward(logits.div_(sums[:, 1:]), local, mine)
        return (sums[:, 1].log() - sums[:, 0]).mean()

    @staticmethod
    def backward(ctx, gradient):
        probabilities, local, mine = ctx.saved_tensors
        probabilities.scatter_add_(-1, local, -mine.to(probabilities.dtype))
        return probabilities.mul_(gradient / len(local)).to(ctx.dtype), None, None


class PlainMegatronLlama:
    def __init__(self, config, state_dict, rank, ranks):
        self.config, self.weights, self.first_id = config, {}, rank * config.vocab_size // ranks
        for name, weight in state_dict.items():
            dim = CUT_DIM.get(name.split(".")[-2])
            self.weights[name] = torch.nn.Parameter((weight if dim is None else weight.chunk(ranks, dim)[rank]).clone())

    def linear(self, name, hidden):
        return F.linear(hidden, self.weights[name + ".weight"])

    def norm(self, name, hidden):
        floats = hidden.float()
        floats = floats * torch.rsqrt(floats.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return CopyToRegion.apply(self.weights[name + ".weight"] * floats.to(hidden.dtype))

    def layer(self, name, hidden, cos, sin):
        entry, heads = self.norm(f"{name}.input_layernorm", hidden), (-1, self.config.head_dim)
        q, k, v = (self.linear(f"{name}.self_attn.{x}_proj", entry).unflatten(-1, heads).transpose(1, 2) for x in "qkv")
        q, k = (x * cos + torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * sin for x in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        hidden = hidden + ReduceFromRegion.apply(self.linear(f"{name}.self_attn.o_proj", mixed))
        entry = self.norm(f"{name}.post_attention_layernorm", hidden)
        gate, up = self.linear(f"{name}.mlp.gate_proj", entry), self.linear(f"{name}.mlp.up_proj", entry)
        return hidden + ReduceFromRegion.apply(self.linear(f"{name}.mlp.down_proj", F.silu(gate) * up))

    def loss(self, ids):
        table, size = self.weights["model.embed_tokens.weight"], self.config.head_dim
        mine = (ids >= self.first_id) & (ids < self.first_id + len(table))
        hidden = ReduceFromRegion.apply(F.embedding((ids - self.first_id) * mine, table) * mine.unsqueeze(-1))
        frequencies = self.config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2, device=ids.device) / size)
        angles = torch.arange(ids.shape[1], device=ids.device).outer(frequencies).repeat(1, 2)
        cos, sin = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        for i in range(self.config.num_hidden_layers):
            hidden = self.layer(f"model.layers.{i}", hidden, cos, sin)
        logits = self.linear("lm_head", self.norm("model.norm", hidden[:, :-1]))
        return VocabParallelCrossEntropy.apply(logits.flatten(0, 1), ids[:, 1:].flatten(), self.first_id)
