"""Tests of gradients through local views of DTensor parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from hf_megatron.compat.torch_dtensor import dtensor_local_view
from hf_megatron.core.communication.collectives import copy_to_ranks
from hf_megatron.core.fork_harness import run_ranks

ADDENDS = {"as they are": lambda tensor: tensor, "views": lambda tensor: tensor.view(1, 3)}


@pytest.mark.parametrize("seen", ADDENDS)
def test_addends_have_separate_gradients(seen):
    # Autograd passes the same gradient tensor to both and accumulates the second microbatch into each in place.
    def on_rank():
        mesh = init_device_mesh("cpu", (1,))
        addends = [nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Replicate()])) for _ in range(2)]
        for _ in range(2):
            one, other = (ADDENDS[seen](dtensor_local_view(addend)) for addend in addends)
            ((one + other) * torch.ones(3)).sum().backward()
        return [addend.grad.to_local() for addend in addends]

    [gradients] = run_ranks(on_rank, 1)
    assert all(torch.equal(gradient, torch.full((3,), 2.0)) for gradient in gradients)


def test_all_reduce_affects_only_its_addend():
    def on_rank():
        one, other = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
        (copy_to_ranks(one, dist.group.WORLD, is_addend=True) + other).sum().backward()
        return one.grad, other.grad

    for summed, local in run_ranks(on_rank, 2):
        assert summed.tolist() == [2.0] * 3 and local.tolist() == [1.0] * 3
