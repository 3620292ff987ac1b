"""`MegatronPlugin`: the layout as an argument of `Accelerator`."""

from typing import Any

from ..config import MegatronConfig
from ..errors import ConfigError


class MegatronPlugin:
    """Tells an `Accelerator` which ranks share a batch, before or after the model is loaded.

        plugin = MegatronPlugin(tp_size=2)
        accelerator = Accelerator(megatron_lm_plugin=plugin)
        model = AutoModelForCausalLM.from_pretrained(path, megatron_config=plugin.config)

    Args:
        config (`MegatronConfig`, `dict` or path of a YAML file, *optional*): the layout.
        fields: fields of `MegatronConfig`, instead of `config`. With neither, what the launcher says
            (`config_from_environment()`); otherwise exactly what is passed.

    Raises:
        ConfigError: both a config and fields, or a field with a value out of range.
    """

    config: MegatronConfig

    def __init__(self, config: Any = None, **fields: Any):
        if config is not None and fields:
            raise ConfigError(f"MegatronPlugin(config, {', '.join(fields)}): pass a config or its fields, not both.")
        if config is not None:
            self.config = MegatronConfig.coerce(config)
        elif fields:
            self.config = MegatronConfig.from_dict(fields)
        else:
            from .accelerate import config_from_environment

            self.config = config_from_environment()

    def __repr__(self) -> str:
        return f"MegatronPlugin({self.config!r})"


__all__ = ["MegatronPlugin"]
