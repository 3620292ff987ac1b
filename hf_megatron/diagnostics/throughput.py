"""Tokens and model FLOPs of training steps: what a model has to compute for its tokens, however it is computed.

Counted as in PaLM (Chowdhery et al., 2022, appendix B) and as Megatron-LM does: products of weights and attention's
two, half of it where it is causal, three times for forward and backward; nothing that is computed again, and of
experts those that see a token.
"""

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.torch_autograd import in_backward
from ..core.off_stage import local_named_parameters
from ..models.auto_class import auto_class
from ..models.layer_cost import estimate_cost
from ..models.modalities.sample_index import reads_modalities
from ..parallel_state import is_rerunning_step, parallel_state, unwrap_parallel_model

_NO_ATTENTION = ("linear_attention", "mamba", "recurrent", "conv")


@dataclass(frozen=True)
class ModelWork:
    """What forward computes, in multiply-adds.

    Attributes:
        per_token: in products of weights.
        per_pair: in attention's products, of all layers that see a whole row, for each query and key.
        windows: (tokens that a layer looks back at, the same of the layers that do).
    """

    per_token: float
    per_pair: float
    windows: tuple[tuple[int, float], ...] = ()

    def flops(self, rows: int, length: int) -> float:
        """Returns the FLOPs of a forward of rows of so many tokens, with causal attention."""
        tokens = rows * length
        pairs = tokens * length / 2
        found = self.per_token * tokens + self.per_pair * pairs
        for window, work in self.windows:
            found += work * min(pairs, tokens * window)
        return 2 * found


def work_of_model(config: Any) -> ModelWork | None:
    """Returns what a causal model of text computes for a token; `None` for others, whose inputs are more than that.

    Args:
        config: of the model; it is made once more without weights, and without codes in their place.
    """
    if config.is_encoder_decoder:
        return None
    plain = copy.deepcopy(config)
    vars(plain).pop("quantization_config", None)
    with torch.device("meta"):
        model = auto_class(plain).from_config(plain)
    if reads_modalities(model) or not model.can_generate():
        return None
    text, head = config.get_text_config(), model.get_output_embeddings()
    per_token = estimate_cost(model.base_model, text) + (0.0 if head is None else estimate_cost(head, text))
    heads = getattr(text, "num_attention_heads", 0) or 0
    own = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    keys = own
    if getattr(text, "qk_nope_head_dim", None):
        # Attention of latents: keys have a part of their own for positions.
        keys = text.qk_nope_head_dim + text.qk_rope_head_dim
    values = getattr(text, "v_head_dim", None) or own
    kinds = list(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)
    one = float(heads * (keys + values))
    window = getattr(text, "sliding_window", None)
    looking_back = [kind for kind in kinds if kind == "sliding_attention"] if window else []
    unsharded = [kind for kind in kinds if kind not in looking_back and not kind.startswith(_NO_ATTENTION)]
    return ModelWork(
        per_token, one * len(unsharded), ((int(window), one * len(looking_back)),) if window and looking_back else ()
    )


class Throughput:
    """Counts the tokens that a model is trained on, what they compute, and the time that steps take.

    Tokens are those of the batches that the model is called with, padding included, times its data parallel ranks.

    Args:
        model: laid out, or a model in one process.
    """

    def __init__(self, model: Any):
        inner, state = unwrap_parallel_model(model), parallel_state(model)
        self.work = work_of_model(inner.config)
        # Of a stock model every process has rows of its own.
        self.devices = dist.get_world_size() if dist.is_initialized() else 1
        self._replicas = self.devices if state is None else state.mesh.dp_size
        self._model, self._state = model, state
        self._seconds, self._since = 0.0, time.monotonic()
        self._tokens = self._flops = 0.0
        self._hook = inner.register_forward_pre_hook(self._count, with_kwargs=True)

    def stop(self) -> None:
        """Takes the hook away."""
        self._hook.remove()

    def begin_pause(self) -> None:
        """Has what follows count for no step, as an evaluation."""
        self._since = time.monotonic()

    def end_step(self) -> None:
        """Counts the time since the last step or pause."""
        now = time.monotonic()
        self._seconds, self._since = self._seconds + now - self._since, now

    def _count(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not torch.is_grad_enabled() or in_backward() or not isinstance(ids, Tensor) or ids.dim() != 2:
            return
        if is_rerunning_step(self._state):
            # The same calls, which look for what was not finite.
            return
        rows, length = ids.shape
        self._tokens += rows * length
        if self.work is not None:
            self._flops += self.work.flops(rows, length) * self._passes()

    def _passes(self) -> float:
        """Counts backward as two passes, of which weights that are not trained need one."""
        sizes = [(parameter.numel(), parameter.requires_grad) for _, parameter in local_named_parameters(self._model)]
        total = sum(size for size, _ in sizes)
        return 2 + sum(size for size, trains in sizes if trains) / total if total else 3

    def take(self, peak_tflops: float | None = None) -> dict[str, float]:
        """Returns tokens per second, and FLOPs, since the last time.

        Args:
            peak_tflops (`float`, *optional*): of one device, which their share is said of.
        """
        seconds, tokens, flops = self._seconds, self._tokens * self._replicas, self._flops * self._replicas
        self._seconds = self._tokens = self._flops = 0.0
        if not seconds or not tokens:
            return {}
        found = {"tokens_per_second": tokens / seconds, "tokens_per_second_per_device": tokens / seconds / self.devices}
        if flops:
            found["tflops_per_device"] = flops / seconds / self.devices / 1e12
            if peak_tflops is not None:
                found["mfu"] = found["tflops_per_device"] / peak_tflops
        return found
