"""What a caller set on a model's modules that would give other numbers on several ranks: backward hooks, options."""

from itertools import chain

from torch import nn

from ..compat.torch_autograd import has_global_backward_hooks
from ..core.mesh import ParallelMesh
from ..core.off_stage import is_off_stage
from ..errors import UnsupportedError


class ModuleGuards:
    """The modules of a model as they were found by `scan`, looked at before every forward without walking them."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._is_scanned = False

    def scan(self) -> None:
        self._is_scanned = True
        modules = list(self.model.modules())
        self._backward = [hooks for m in modules for hooks in (m._backward_hooks, m._backward_pre_hooks)]
        self._forward = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._embeddings = [(name, m) for name, m in self.model.named_modules() if isinstance(m, nn.Embedding)]

    def _require_scan(self) -> None:
        # Modules are exchanged until the model is laid out.
        if not self._is_scanned:
            self.scan()

    def forward_hooks(self) -> int:
        """Returns a number that changes when forward hooks are added or others take their place."""
        # Ids of hooks are counted up over all modules.
        self._require_scan()
        return sum(chain.from_iterable(self._forward))

    def reject_backward_hooks(self, mesh: ParallelMesh) -> None:
        """Raises `UnsupportedError` for hooks of the loop's on the gradients that modules pass on."""
        self._require_scan()
        if (any(self._backward) or has_global_backward_hooks()) and (mesh.reduces_gradients or mesh.tp_size > 1):
            raise UnsupportedError(
                "A backward hook of a module: with dp_size or cp_size > 1 gradients of activations carry a factor, and "
                "with tp_size > 1 a rank has a part of them. Remove it, and change or read `parameter.grad` between "
                "backward() and step(), or train with pipeline stages alone."
            )

    def reject_embeddings(self, mesh: ParallelMesh, microbatches: int | None) -> None:
        """Raises `UnsupportedError` for embeddings whose options look at all tokens of a batch."""
        self._require_scan()
        several = mesh.dp_size > 1 or (mesh.pp_size > 1 and microbatches != 1)
        for name, embedding in self._embeddings:
            if (embedding.max_norm is not None and mesh.dp_size > 1) or (embedding.scale_grad_by_freq and several):
                option = "scale_grad_by_freq" if embedding.scale_grad_by_freq else "max_norm"
                raise UnsupportedError(
                    f"{name}.{option} = {getattr(embedding, option)}: dp ranks and microbatches have other tokens, and "
                    "the rows of their weights would differ. Set it off, or train with dp_size=1 and pp_size=1."
                )


def _has_own(module: nn.Module) -> bool:
    return any(parameter is not None and not is_off_stage(parameter) for parameter in module._parameters.values())


class ParameterList:
    """The parameters that a model has at present.

    Moving a model, or a caller, may put another parameter under the same name; modules added later are found by `scan`.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._holders: list[dict[str, nn.Parameter | None]] | None = None

    def scan(self) -> None:
        self._holders = [module._parameters for module in self.model.modules() if _has_own(module)]

    def current(self) -> list[nn.Parameter]:
        """Lists each parameter once, in the order of `model.parameters()`; of a pipeline this rank's."""
        if self._holders is None:
            self.scan()
        assert self._holders is not None
        values = (value for holder in self._holders for value in holder.values() if value is not None)
        # A head on the first stage may have the tied weight, and its bias elsewhere.
        found = {id(value): value for value in values if not is_off_stage(value)}
        return list(found.values())
