"""Tensors and stores for tests of distributed checkpoints."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hf_megatron import CheckpointError


def make_tensor(shape, dtype=torch.float32, seed=0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10).to(dtype)


def save_store(folder: Path, state: dict, **options) -> Path:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
    return folder


def assert_rejected(read, *needles: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read()
    for needle in needles:
        assert needle in str(caught.value), caught.value
