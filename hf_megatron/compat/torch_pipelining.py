"""Private symbols of torch.distributed.pipelining."""

from typing import Any

from .graph_leaves import collect_leaf_gradients, with_leaves


class _StageNumbers:
    """Minimal pipeline stage with the attributes that torch's schedules read to compute their order; has no module."""

    submod = None
    has_backward = True

    def __init__(self, index: int, ranks: int, stages: int):
        self.stage_index = index
        self.group_rank = 0
        self.group_size = ranks
        self.num_stages = stages
        self.is_first = index == 0
        self.is_last = index == stages - 1


def pipeline_orders(
    schedule_class: str, ranks: int, stages_per_rank: int, microbatches: int
) -> tuple[tuple[tuple[str, int, int], ...], ...]:
    """Returns each rank's sequence in one of torch's pipeline schedules: (computation, stage, microbatch).

    Computations are torch's letters: F, B, I and W (`pipeline_order` and `_Action`, private). An
    overlapped forward and backward is listed as its parts in sequence; idle slots are omitted.
    """
    from torch.distributed import pipelining

    stages = ranks * stages_per_rank
    # The order covers all ranks; only the number of local stages is read, whatever their placement.
    local = [_StageNumbers(index, ranks, stages) for index in range(0, stages, ranks)]
    # Skip the constructor's preparation for torch's own executor, which takes quadratic time.
    unprepared = {"_prepare_schedule_with_comms": lambda self, actions: None}
    order = type(schedule_class, (getattr(pipelining, schedule_class),), unprepared)(local, microbatches).pipeline_order
    return tuple(
        tuple(
            (part.computation_type.value, part.stage_index, part.microbatch_index)
            for action in order[rank]
            if action is not None
            for part in action.sub_actions or (action,)
        )
        for rank in range(ranks)
    )


def add_sends_and_receives(
    orders: tuple[tuple[tuple[str, int, int], ...], ...], stage_ranks: tuple[int, ...]
) -> tuple[tuple[tuple[str, int, int], ...], ...]:
    """Inserts SEND_F, RECV_F, SEND_B and RECV_B into orders, between stages of different ranks.

    Each receive is inserted into its rank's order at the same time as the send into the other's, so blocking on either
    cannot deadlock (`_add_send_recv`, private).
    """
    from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _ComputationType

    actions: dict[int, list[Any]] = {
        rank: [_Action(stage, _ComputationType(kind), microbatch) for kind, stage, microbatch in order]
        for rank, order in enumerate(orders)
        if order
    }
    # The function consumes its input lists, and rejects lists that are empty initially.
    lowered: dict[int, list[Any]] = _add_send_recv(actions, stage_ranks.__getitem__, len(stage_ranks))
    return tuple(
        tuple((action.computation_type.value, action.stage_index, action.microbatch_index) for action in order)
        for order in (lowered.get(rank, []) for rank in range(len(orders)))
    )


def backward_inputs(roots: list[Any], seeds: list[Any], inputs: tuple[Any, ...], parameters: list[Any]) -> Any:
    """Computes only `inputs[i].grad` (torch's `stage_backward_input`); returns the arguments of `backward_weights`."""
    from torch.distributed.pipelining._backward import stage_backward_input

    return stage_backward_input(roots, seeds, list(inputs), iter(with_leaves(parameters)))[1]


def backward_weights(parameters: list[Any], groups: Any) -> None:
    """Accumulates the gradients skipped by `backward_inputs` into `.grad`, without calling the parameters' hooks."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(with_leaves(parameters)), groups)
    collect_leaf_gradients(parameters)
