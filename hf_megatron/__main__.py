"""`python -m hf_megatron [--config FILE] SCRIPT [ARGUMENTS ...]`: see `hf_megatron.integrations.launched`."""

from .integrations.launched import launch

launch()
