"""Checks of module settings whose results depend on the number of ranks: backward hooks and embedding options."""

from itertools import chain

from torch import nn

from ..compat.torch_autograd import has_global_backward_hooks
from ..core.mesh import ParallelMesh
from ..errors import UnsupportedError


class ModuleGuards:
    """Checks a model's modules before every forward, without walking them again after `scan`."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._is_scanned = False

    def scan(self) -> None:
        """Collects the hook tables and embeddings of all modules."""
        self._is_scanned = True
        modules = list(self.model.modules())
        self._backward = [hooks for m in modules for hooks in (m._backward_hooks, m._backward_pre_hooks)]
        self._forward = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._embeddings = [(name, m) for name, m in self.model.named_modules() if isinstance(m, nn.Embedding)]

    def _require_scan(self) -> None:
        # Modules are replaced until the model is parallelized.
        if not self._is_scanned:
            self.scan()

    def forward_hooks(self) -> int:
        """Returns a number that changes when forward hooks are added or replaced."""
        # Hook ids increase over all modules of the process.
        self._require_scan()
        return sum(chain.from_iterable(self._forward))

    def reject_backward_hooks(self, mesh: ParallelMesh) -> None:
        """Raises `UnsupportedError` for user hooks on the gradients of activations."""
        self._require_scan()
        if (any(self._backward) or has_global_backward_hooks()) and (mesh.reduces_gradients or mesh.tp_size > 1):
            raise UnsupportedError(
                "A backward hook of a module is not supported: with dp_size or cp_size > 1 gradients of activations "
                "are multiplied by a factor, and with tp_size > 1 a rank may have only a shard of them. Remove it, and "
                "read or change `parameter.grad` between backward() and step(), or train with pipeline parallelism "
                "only."
            )

    def reject_embeddings(self, mesh: ParallelMesh, microbatches: int | None) -> None:
        """Raises `UnsupportedError` for embedding options that depend on all tokens of a batch."""
        self._require_scan()
        several = mesh.dp_size > 1 or (mesh.pp_size > 1 and microbatches != 1)
        for name, embedding in self._embeddings:
            # Each rank would renormalize, or count, the tokens of its local samples only.
            if (embedding.max_norm is not None and mesh.dp_size > 1) or (embedding.scale_grad_by_freq and several):
                option = "scale_grad_by_freq" if embedding.scale_grad_by_freq else "max_norm"
                raise UnsupportedError(
                    f"{name}.{option} = {getattr(embedding, option)} is not supported: data-parallel ranks and "
                    "microbatches have different tokens, so the embedding's weights would differ from a single "
                    "process. Disable it, or train with dp_size=1 and pp_size=1."
                )
