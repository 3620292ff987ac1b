"""Switch for models that one rank loads without a layout, for example to merge an adapter."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...core.runtime import RUNTIME


@contextmanager
def load_unsharded() -> Iterator[None]:
    """Loads stock models inside its `with` block, in a script that is launched with a layout.

        if trainer.is_world_process_zero():
            with hf_megatron.load_unsharded():
                base = AutoModelForCausalLM.from_pretrained(path)

    The ranks that call it hold the full model, without communication. `megatron_config=` still takes precedence.
    """
    launch, RUNTIME.launch = RUNTIME.launch, None
    try:
        yield
    finally:
        RUNTIME.launch = launch
