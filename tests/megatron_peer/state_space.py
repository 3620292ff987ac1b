"""Reference implementation in torch of the mamba_ssm functions that megatron-core's MambaMixer imports.

The kernels of mamba_ssm require a GPU. `provide_mamba_ssm()` must run before megatron.core.ssm is imported.
"""

import sys
from types import ModuleType

import torch
import torch.nn.functional as F


class RMSNormGated(torch.nn.Module):
    """RMSNorm over groups of `group_size` channels, after the gate."""

    def __init__(self, width, eps, group_size, norm_before_gate, device, dtype):
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(width, device=device, dtype=dtype))

    def forward(self, hidden, gate):
        groups = (hidden * F.silu(gate)).unflatten(-1, (-1, self.group_size))
        return F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


def mamba_chunk_scan_combined(x, dt, a, b, c, chunk_size, D, dt_bias, dt_softplus, **unused):  # noqa: N803 - theirs
    """Sequential scan: state = exp(dt a) state + dt x b, output = c state + D x.

    Shapes: x [batch, steps, heads, width], dt [batch, steps, heads], a [heads], b and c [batch, steps, groups, state].
    """
    assert dt_softplus
    assert all(value is None or value is False for value in unused.values()), unused
    dt = F.softplus(dt + dt_bias)
    b, c = (each.repeat_interleave(x.shape[2] // each.shape[2], dim=2) for each in (b, c))
    state = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[-1])
    steps = []
    for step in range(x.shape[1]):
        update = (dt[:, step, :, None] * x[:, step])[..., None] * b[:, step, :, None]
        state = state * torch.exp(dt[:, step] * a)[..., None, None] + update
        steps.append((state * c[:, step, :, None]).sum(-1) + D[:, None] * x[:, step])
    return torch.stack(steps, 1)


def raise_not_implemented(*args, **kwargs):
    """Placeholder for functions of inference and of the path that `use_mamba_mem_eff_path=False` disables."""
    raise NotImplementedError


def provide_mamba_ssm() -> None:
    """Registers the modules that megatron-core imports."""
    content = {
        "mamba_ssm": (),
        "mamba_ssm.ops": (),
        "mamba_ssm.ops.triton": (),
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNormGated},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
            "mamba_split_conv1d_scan_combined": raise_not_implemented,
        },
        # The original module imports triton.
        "megatron.core.inference.contexts.attention_context.triton.tensor_ops": dict.fromkeys(
            ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"), raise_not_implemented
        ),
    }
    for name, values in content.items():
        module = ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module
