"""fp16 loss scaling with one overflow check (`found_inf`) for all ranks.

Each rank sees only its gradient shards. torch's `GradScaler` checks only those, so a rank without an overflow would
step while another one skips the step, and the weights would diverge silently.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .distributed_optimizer import ShardedOptimizer
from .grad_norm import local_gradients


@torch.no_grad()
def unscale(optimizers: Sequence[ShardedOptimizer], inv_scale: Tensor, found_inf: Tensor) -> dict[torch.device, Tensor]:
    """Unscales the reduced gradients of an optimizer, as `GradScaler._unscale_grads_` does; collective.

    Args:
        optimizers: the optimizer, or the parts of a combined one.
        inv_scale (`Tensor`): scalar, 1 / loss scale.
        found_inf (`Tensor`): scalar 0.

    Returns:
        device -> `found_inf`, a scalar that is 1 on all ranks if any gradient of any rank is not finite.
    """
    engine = optimizers[0].engine
    shares = local_gradients([parameter for optimizer in optimizers for parameter in optimizer.parameters()])
    # The kernel writes 1 into its second argument: work on a copy.
    inf_flag = found_inf.clone()
    for shards in shares.values():
        torch._amp_foreach_non_finite_check_and_unscale_(shards, inf_flag, inv_scale)
    dist.all_reduce(inf_flag, op=dist.ReduceOp.MAX)
    engine.step_status.record_scaler()
    # Main params get the unscaled gradients.
    for optimizer in optimizers:
        optimizer.collect()
    engine.step_status.count(skipped=bool(inf_flag))
    return {inf_flag.device: inf_flag}
