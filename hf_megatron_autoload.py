"""Parallelizes the models of TRL's commands (`trl sft --config recipe.yaml`), whose scripts do not import hf_megatron.

torch calls this at the end of its import through the entry point `torch.backends`, in every process with both
installed, so it imports the package only if Accelerate has started one of TRL's scripts with a Megatron-LM layout.
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` disables it.
"""

import os
import sys
from pathlib import PurePath


def parallelize_trl_scripts() -> None:
    """Applies the launched layout to the models of this process if it runs one of TRL's scripts."""
    is_trl = PurePath(sys.argv[0] if sys.argv else "").parent.parts[-2:] == ("trl", "scripts")
    if is_trl and os.environ.get("ACCELERATE_USE_MEGATRON_LM", "false").lower() in ("true", "1"):
        from hf_megatron.integrations.accelerate.launched_script import follow_launcher

        follow_launcher()
