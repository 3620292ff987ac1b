"""What only a GPU can show; skipped without one (see allowed_skips.txt)."""

import pytest
import torch
import torch.distributed as dist

from hf_megatron.tensor_parallel.cross_entropy import CrossEntropyOptions, linear_cross_entropy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def nccl():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("chunk_size", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_equals_torch(nccl, dtype, chunk_size):
    torch.manual_seed(0)
    hidden = torch.randn(256, 64, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(1000, 64, device="cuda", dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 1000, (256,), device="cuda")
    labels[::5] = -100
    options = CrossEntropyOptions(nccl, 0, 1000, chunk_size=chunk_size)
    loss = linear_cross_entropy(hidden, weight, None, labels, None, options)
    loss.backward()
    gradients = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    expected = torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), labels)
    expected.backward()
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradients[0], hidden.grad, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradients[1], weight.grad, rtol=tolerance, atol=tolerance)
