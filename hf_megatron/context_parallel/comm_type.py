"""Default communication scheme of context parallel attention."""

import dataclasses
from typing import Any

from ..config import MegatronConfig
from ..errors import ConfigError


def with_scheme(config: MegatronConfig, model_config: Any) -> MegatronConfig:
    """Returns a config with `cp_comm_type` and its group sizes filled in, for a model of this config.

    All-to-all over heads balances attention for any mask and sends least, but needs enough heads: as many ranks as the
    key/value heads divide by exchange heads, and the remaining factor of cp_size is a ring.

    Raises:
        ConfigError: heads that the ranks cannot share.
    """
    if config.cp_size == 1:
        return config
    text = model_config.get_text_config()
    # A model without attention has no heads to share.
    heads = getattr(text, "num_attention_heads", None) or config.tp_size * config.cp_size
    groups = getattr(text, "num_key_value_heads", None) or heads
    # Heads per tp rank, which the cp ranks share.
    heads, groups = (max(count // config.tp_size, 1) for count in (heads, groups))
    fitting = [size for size in range(1, config.cp_size + 1) if config.cp_size % size == 0 and heads % size == 0]
    scheme, sizes = config.cp_comm_type, config.hierarchical_context_parallel_sizes
    if scheme == "a2a" and config.cp_size not in fitting:
        raise ConfigError(
            f"MegatronConfig.cp_comm_type = 'a2a': cp_size = {config.cp_size} does not divide the {heads} "
            f"attention heads of a tp rank; valid cp_size: divisors of {heads}. Or use 'p2p'."
        )
    if scheme == "a2a+p2p" and sizes is None:
        # Both schemes in the name must have more than one rank.
        inner = max((size for size in fitting if 1 < size < config.cp_size), default=None)
        if inner is None:
            raise ConfigError(
                f"MegatronConfig.cp_comm_type = 'a2a+p2p': no proper divisor of cp_size = {config.cp_size} except 1 "
                f"divides the {heads} attention heads of a tp rank. Use 'p2p' or 'a2a'."
            )
        sizes = inner, config.cp_size // inner
    if scheme == "a2a+p2p" and sizes is not None and heads % sizes[0]:
        raise ConfigError(
            f"MegatronConfig.hierarchical_context_parallel_sizes = {sizes}: {sizes[0]} does not divide the {heads} "
            f"attention heads of a tp rank; valid: {', '.join(map(str, fitting))}."
        )
    if scheme is None:
        # Largest all-to-all group without repeating key/value heads.
        inner = max(size for size in fitting if groups % size == 0)
        scheme = {1: "p2p", config.cp_size: "a2a"}.get(inner, "a2a+p2p")
        sizes = (inner, config.cp_size // inner) if scheme == "a2a+p2p" else None
    return dataclasses.replace(config, cp_comm_type=scheme, hierarchical_context_parallel_sizes=sizes)
