"""Compilation of a parallelized model layer by layer, for `TrainingArguments(torch_compile=True)` and Accelerate.

Communication at the ends of a model, lazy logits and checks of a call run on the host; a graph of the complete model
would break at each of them, while a layer is one graph without breaks that all layers of a kind share.
"""

from typing import Any

from torch import nn

from ...compat.torch_modules import is_compiled
from ...data_parallel.fsdp import outermost_layers
from ...tensor_parallel.vocab_parallel_head import VocabParallelHead


def compile_layers(model: Any, **kwargs: Any) -> None:
    """Compiles the layers, the norms beside them and the head; modules that are compiled already are kept.

    A vocab-parallel head computes its loss in chunks, without a forward to compile.

    Args:
        model (`PreTrainedModel`): the parallelized model.
        kwargs: arguments of `torch.compile`, such as `backend` and `mode`.
    """
    for module in find_compiled_modules(model):
        if not is_compiled(module):
            module.compile(**kwargs)


def find_compiled_modules(model: Any) -> list[nn.Module]:
    """Returns the modules that are compiled, each once: layers, norms beside them, and a plain head."""
    layers = outermost_layers(model)
    identities = {id(layer) for layer in layers}
    modules: dict[int, nn.Module] = {id(layer): layer for layer in layers}
    for owner in model.modules():
        if any(id(layer) in identities for stack in owner.children() for layer in stack.children()):
            modules |= {id(child): child for child in owner.children() if _is_norm(child)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if isinstance(head, nn.Linear) and not isinstance(head, VocabParallelHead):
        modules[id(head)] = head
    return list(modules.values())


def _is_norm(module: nn.Module) -> bool:
    """Returns whether a module has vectors `[hidden]` as its only parameters and no submodules."""
    parameters = list(module.parameters())
    is_leaf = next(module.children(), None) is None
    return is_leaf and bool(parameters) and all(parameter.dim() == 1 for parameter in parameters)
