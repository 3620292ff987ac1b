"""What MambaMixer of megatron-core imports of mamba_ssm, whose kernels want a GPU: computed by torch as it is defined.

`provide_mamba_ssm()` must run before megatron.core.ssm is imported.
"""

import sys
from types import ModuleType

import torch
import torch.nn.functional as F


class RMSNormGated(torch.nn.Module):
    """A norm over each group of `group_size`, of what a gate was applied to."""

    def __init__(self, width, eps, group_size, norm_before_gate, device, dtype):
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(width, device=device, dtype=dtype))

    def forward(self, hidden, gate):
        groups = (hidden * F.silu(gate)).unflatten(-1, (-1, self.group_size))
        return F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


def mamba_chunk_scan_combined(x, dt, a, b, c, chunk_size, D, dt_bias, dt_softplus, **unused):  # noqa: N803 - theirs
    """One step after the other: the state fades by exp(dt a) and takes dt x b in, c reads it.

    Shapes: x [batch, steps, heads, width], dt [batch, steps, heads], a [heads], b and c [batch, steps, groups, state].
    """
    assert dt_softplus
    assert all(value is None or value is False for value in unused.values()), unused
    dt = F.softplus(dt + dt_bias)
    b, c = (each.repeat_interleave(x.shape[2] // each.shape[2], dim=2) for each in (b, c))
    state = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[-1])
    steps = []
    for step in range(x.shape[1]):
        taken = (dt[:, step, :, None] * x[:, step])[..., None] * b[:, step, :, None]
        state = state * torch.exp(dt[:, step] * a)[..., None, None] + taken
        steps.append((state * c[:, step, :, None]).sum(-1) + D[:, None] * x[:, step])
    return torch.stack(steps, 1)


def not_run(*args, **kwargs):
    """What is imported for inference, and for the path that `use_mamba_mem_eff_path=False` leaves."""
    raise NotImplementedError


def provide_mamba_ssm() -> None:
    """Put the functions where megatron-core looks for them."""
    content = {
        "mamba_ssm": (),
        "mamba_ssm.ops": (),
        "mamba_ssm.ops.triton": (),
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNormGated},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
            "mamba_split_conv1d_scan_combined": not_run,
        },
        # This one imports triton.
        "megatron.core.inference.contexts.attention_context.triton.tensor_ops": dict.fromkeys(
            ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"), not_run
        ),
    }
    for name, values in content.items():
        module = ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module
