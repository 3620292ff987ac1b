"""Private symbols of torch.distributed.pipelining."""

from typing import Any


class _StageNumbers:
    """What torch's pipeline schedules read of a stage to make their order: numbers, no module."""

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
    """Lists what each rank computes in a schedule of torch's pipelining: (computation, stage, microbatch).

    Computations are torch's letters: F, B, I and W (`pipeline_order` and `_Action`, private in torch 2.11 to 2.13). An
    overlapped forward and backward counts as its parts, one after the other; idle slots are left out.
    """
    from torch.distributed import pipelining

    stages = ranks * stages_per_rank
    # The order is made for all ranks alike; only the number of the local stages is read, whatever the placement.
    local = [_StageNumbers(index, ranks, stages) for index in range(0, stages, ranks)]
    # The constructor goes on to prepare the order for torch's own executor, in quadratic time.
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
    orders: tuple[tuple[tuple[str, int, int], ...], ...], rank_of_stage: tuple[int, ...]
) -> tuple[tuple[tuple[str, int, int], ...], ...]:
    """Puts SEND_F, RECV_F, SEND_B and RECV_B into orders, between stages of different ranks.

    A receive is put into its rank's order at the moment its send is put into the other's, so blocking on either cannot
    deadlock (`_add_send_recv`, private in torch 2.11 to 2.13).
    """
    from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _ComputationType

    actions: dict[int, list[Any]] = {
        rank: [_Action(stage, _ComputationType(kind), microbatch) for kind, stage, microbatch in order]
        for rank, order in enumerate(orders)
        if order
    }
    # The function empties the lists it is given, and takes none that is empty from the start.
    lowered: dict[int, list[Any]] = _add_send_recv(actions, rank_of_stage.__getitem__, len(rank_of_stage))
    return tuple(
        tuple((action.computation_type.value, action.stage_index, action.microbatch_index) for action in order)
        for order in (lowered.get(rank, []) for rank in range(len(orders)))
    )


def backward_inputs(roots: list[Any], seeds: list[Any], inputs: tuple[Any, ...], parameters: list[Any]) -> Any:
    """Computes `inputs[i].grad` alone (torch's `stage_backward_input`); returns what `backward_weights` needs."""
    from torch.distributed.pipelining._backward import stage_backward_input

    return stage_backward_input(roots, seeds, list(inputs), iter(parameters))[1]


def backward_weights(parameters: list[Any], groups: Any) -> None:
    """Adds the gradients that `backward_inputs` left out to `.grad`, without the parameters' hooks."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(parameters), groups)
