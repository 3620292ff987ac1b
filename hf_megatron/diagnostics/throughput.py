"""Throughput of training steps: tokens and model FLOPs, independent of how the model is executed.

FLOPs are counted as in PaLM (Chowdhery et al., 2022, appendix B) and Megatron-LM: products with weights and the two of
attention, halved if causal, times three for forward and backward. Recomputation does not count, and only the experts
that process a token count.
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
    """Work of a forward, in multiply-adds.

    Attributes:
        per_token: products with weights.
        per_pair: attention products per query-key pair, summed over the layers with full attention.
        windows: (sliding window in tokens, attention products per pair summed over the layers with that window).
    """

    per_token: float
    per_pair: float
    windows: tuple[tuple[int, float], ...] = ()

    def flops(self, rows: int, length: int) -> float:
        """Returns the FLOPs of a forward of `rows` sequences of `length` tokens, with causal attention."""
        tokens = rows * length
        pairs = tokens * length / 2
        total = self.per_token * tokens + self.per_pair * pairs
        for window, work in self.windows:
            total += work * min(pairs, tokens * window)
        return 2 * total


def estimate_model_work(config: Any) -> ModelWork | None:
    """Returns the work of a causal language model; `None` for other models, whose inputs are not only text tokens.

    Args:
        config: of the model, which is instantiated on the meta device without quantization.
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
    head_dim = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    keys = head_dim
    if getattr(text, "qk_nope_head_dim", None):
        # Multi-head latent attention: keys have an additional part for positions.
        keys = text.qk_nope_head_dim + text.qk_rope_head_dim
    values = getattr(text, "v_head_dim", None) or head_dim
    kinds = list(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)
    one = float(heads * (keys + values))
    window = getattr(text, "sliding_window", None)
    looking_back = [kind for kind in kinds if kind == "sliding_attention"] if window else []
    full_attention_layers = [kind for kind in kinds if kind not in looking_back and not kind.startswith(_NO_ATTENTION)]
    return ModelWork(
        per_token,
        one * len(full_attention_layers),
        ((int(window), one * len(looking_back)),) if window and looking_back else (),
    )


class Throughput:
    """Measures the tokens that a model is trained on, their FLOPs, and the time of steps.

    Tokens are counted from the batches of the model's calls, padding included, times the number of data-parallel ranks.

    Args:
        model: parallelized or single-process.
    """

    def __init__(self, model: Any):
        inner, state = unwrap_parallel_model(model), parallel_state(model)
        self.work = estimate_model_work(inner.config)
        # With a stock model every process is a replica with its own samples.
        self.devices = dist.get_world_size() if dist.is_initialized() else 1
        self._replicas = self.devices if state is None else state.mesh.dp_size
        self._model, self._state = model, state
        self._seconds, self._since = 0.0, time.monotonic()
        self._tokens = self._flops = 0.0
        self._hook = inner.register_forward_pre_hook(self._count, with_kwargs=True)

    def stop(self) -> None:
        """Removes the hook."""
        self._hook.remove()

    def begin_pause(self) -> None:
        """Excludes the time since the last step, such as an evaluation, from the next step."""
        self._since = time.monotonic()

    def end_step(self) -> None:
        """Adds the time since the last step or pause."""
        now = time.monotonic()
        self._seconds, self._since = self._seconds + now - self._since, now

    def _count(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not torch.is_grad_enabled() or in_backward() or not isinstance(ids, Tensor) or ids.dim() != 2:
            return
        if is_rerunning_step(self._state):
            # A rerun that locates non-finite values repeats calls that were already counted.
            return
        rows, length = ids.shape
        self._tokens += rows * length
        if self.work is not None:
            self._flops += self.work.flops(rows, length) * self._passes()

    def _passes(self) -> float:
        """Returns FLOPs of forward and backward in units of a forward: 3, or less as frozen weights get no gradient."""
        sizes = [(parameter.numel(), parameter.requires_grad) for _, parameter in local_named_parameters(self._model)]
        total = sum(size for size, _ in sizes)
        return 2 + sum(size for size, trains in sizes if trains) / total if total else 3

    def take(self, peak_tflops: float | None = None) -> dict[str, float]:
        """Returns tokens per second, and FLOP/s per device, since the last call.

        Args:
            peak_tflops (`float`, *optional*): peak of one device, for the MFU.
        """
        seconds, tokens, flops = self._seconds, self._tokens * self._replicas, self._flops * self._replicas
        self._seconds = self._tokens = self._flops = 0.0
        if not seconds or not tokens:
            return {}
        rates = {"tokens_per_second": tokens / seconds, "tokens_per_second_per_device": tokens / seconds / self.devices}
        if flops:
            rates["tflops_per_device"] = flops / seconds / self.devices / 1e12
            if peak_tflops is not None:
                rates["mfu"] = rates["tflops_per_device"] / peak_tflops
        return rates
