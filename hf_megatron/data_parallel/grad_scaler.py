"""fp16 loss scaling: one verdict on overflow for all ranks.

Each rank sees its own shards. torch's scaler asks only those, and a rank without an overflow would step while another
skips: the weights diverge in silence.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from .distributed_optimizer import ShardedOptimizer
from .grad_norm import local_gradients


@torch.no_grad()
def unscale(optimizer: ShardedOptimizer, inv_scale: Tensor, found_inf: Tensor) -> dict[torch.device, Tensor]:
    """Does `GradScaler._unscale_grads_` on an optimizer's reduced gradients; returns device -> `found_inf`.

    Args:
        inv_scale (`Tensor`): a scalar, one over the loss scale.
        found_inf (`Tensor`): a scalar 0, taken as 1 if any rank's gradient is not finite.
    """
    shares = local_gradients(optimizer.parameters())
    inf_flag = found_inf.clone()
    for shards in shares.values():
        torch._amp_foreach_non_finite_check_and_unscale_(shards, inf_flag, inv_scale)
    dist.all_reduce(inf_flag, op=dist.ReduceOp.MAX)
    optimizer.engine.step_status.record_scaler()
    optimizer.collect()
    optimizer.engine.step_status.count(skipped=bool(inf_flag))
    return {inf_flag.device: inf_flag}
