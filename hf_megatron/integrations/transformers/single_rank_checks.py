"""Settings that a job of one rank, whose models are transformers' own, would leave out in silence."""

from ...config import MegatronConfig
from ...errors import ConfigError

_OF_ROUTERS = ("router_aux_loss_scope", "router_z_loss_coef", "router_bias_update_rate", "replay_routing")


def fit_for_one_rank(config: MegatronConfig) -> MegatronConfig:
    """Returns the layout; raises `ConfigError` for settings by which several ranks train otherwise than one."""
    default = MegatronConfig()
    for name in _OF_ROUTERS:
        value, stock = getattr(config, name), getattr(default, name)
        if value != stock and not config.is_parallel:
            raise ConfigError(
                f"MegatronConfig.{name} = {value!r} in a job of one rank, whose models are transformers' own: it would "
                "train otherwise than a job of several. Run it on two ranks or more (dp_size), or leave "
                f"{name} at {stock!r}."
            )
    return config
