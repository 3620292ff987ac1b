"""`python -m hf_megatron [--config FILE] SCRIPT [ARGUMENTS ...]`; see `integrations/accelerate/launched_script.py`."""

from .integrations.accelerate.launched_script import launch

launch()
