"""Tiny models shared by all workers of a test session: each is built and measured once."""

import fcntl
import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from hf_megatron.testing import parity
from hf_megatron.testing.parity import TinyModel


def make_tiny_model(config: PreTrainedConfig, **arguments: Any) -> TinyModel:
    """Cached `hf_megatron.testing.parity.make_tiny_model`; other tests read the same files."""
    key = json.dumps([type(config).__name__, config.to_dict(), arguments], sort_keys=True)
    file = Path(os.environ["SHARED_TINY_MODELS"], hashlib.sha256(key.encode()).hexdigest())
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            tiny_model = parity.make_tiny_model(config, **arguments)
            tiny_model.directory = Path(shutil.move(tiny_model.directory, file.with_suffix(".model")))
            partial = file.with_suffix(".partial")
            partial.write_bytes(pickle.dumps(tiny_model))
            partial.rename(file)
    return pickle.loads(file.read_bytes())
