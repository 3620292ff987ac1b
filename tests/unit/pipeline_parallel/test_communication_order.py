"""Simulates the streams of an accelerator: a schedule's messages must not wait for each other in a cycle."""

from collections import defaultdict

import pytest

from hf_megatron.pipeline_parallel.p2p import IN_FLIGHT
from hf_megatron.pipeline_parallel.schedules import SCHEDULES, Kind, assign_stage_ranks, check_schedule, rank_actions

SENDS = {Kind.SEND_FORWARD: 1, Kind.SEND_BACKWARD: -1}
RECEIVES = {Kind.RECEIVE_FORWARD: -1, Kind.RECEIVE_BACKWARD: 1}
SIZES = [(2, 4), (2, 8), (3, 6), (4, 8), (4, 16)]


def describe_message(action):
    """Returns the direction, receiving stage and microbatch of a send or receive."""
    is_forward = action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
    return is_forward, action.stage + SENDS.get(action.kind, 0), action.microbatch


def find_unfinished(orders, placement, streams):
    """Returns the operations that never finish, as (rank, stream, position).

    NCCL runs the messages of a communicator one after the other, each as soon as both sides have reached it. An
    operation starts after the computations that its rank issued before it, and computations wait for the messages that
    they read and, before a rank sends more, for all but the last `IN_FLIGHT` sends.

    Args:
        orders: each rank's actions.
        streams: (direction, this rank, other rank) -> the communicator of a message.
    """
    # Per rank: the compute stream, whose entries are sets of messages to wait for, and the communicators' streams.
    compute, sending = [[] for _ in orders], [[] for _ in orders]
    queues = [defaultdict(list) for _ in orders]
    for rank, actions in enumerate(orders):
        for action in actions:
            if not action.kind.communicates:
                reads = [(True, action.stage, action.microbatch), (False, action.stage, action.microbatch)]
                compute[rank].append(set(reads[action.kind is not Kind.FORWARD :][:1]))
                continue
            message = describe_message(action)
            peer = placement[action.stage + {**SENDS, **RECEIVES}[action.kind]]
            queues[rank][streams(message[0], rank, peer)].append((message, len(compute[rank])))
            if action.kind in SENDS:
                sending[rank].append(message)
                if len(sending[rank]) > IN_FLIGHT:
                    compute[rank].append({sending[rank].pop(0)})
    exchanged = {message for rank in queues for queue in rank.values() for message, _ in queue}
    done, computed = set(), [0] * len(orders)
    heads = [dict.fromkeys(rank, 0) for rank in queues]
    while True:
        ready = defaultdict(list)
        for rank, rank_queues in enumerate(queues):
            entries = compute[rank]
            while computed[rank] < len(entries) and entries[computed[rank]] & exchanged <= done:
                computed[rank] += 1
            for stream, queue in rank_queues.items():
                if heads[rank][stream] < len(queue):
                    message, issued_after = queue[heads[rank][stream]]
                    if computed[rank] >= issued_after:
                        ready[message].append((rank, stream))
        matched = {message: ends for message, ends in ready.items() if len(ends) == 2}
        if not matched:
            break
        for message, ends in matched.items():
            done.add(message)
            for rank, stream in ends:
                heads[rank][stream] += 1
    unfinished = [
        (rank, "compute", computed[rank]) for rank, entries in enumerate(compute) if computed[rank] < len(entries)
    ]
    return unfinished + [
        (rank, stream, heads[rank][stream])
        for rank, rank_queues in enumerate(queues)
        for stream, queue in rank_queues.items()
        if heads[rank][stream] < len(queue)
    ]


STREAMS = {
    "a communicator per pair and direction": lambda forward, rank, peer: (forward, *sorted((rank, peer))),
    "a communicator per direction": lambda forward, rank, peer: forward,
    "one communicator": lambda forward, rank, peer: None,
}


def list_plans(name):
    for ranks, microbatches in SIZES:
        for stages_per_rank in {SCHEDULES[name].stages_per_rank, SCHEDULES[name].fixed or 3}:
            check_schedule(name, ranks, stages_per_rank, microbatches)
            placement = assign_stage_ranks(name, ranks, stages_per_rank)
            yield rank_actions(name, ranks, stages_per_rank, microbatches), placement


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_do_not_wait_in_a_cycle(name, streams):
    for orders, placement in list_plans(name):
        assert not find_unfinished(orders, placement, STREAMS[streams])


@pytest.mark.parametrize("streams", STREAMS)
def test_fault_messages_in_another_order(streams):
    """A rank that receives two activations in the reverse order of their sends waits forever."""
    [orders, placement] = next(list_plans("1f1b"))
    last = list(orders[1])
    first, second = [index for index, action in enumerate(last) if action.kind is Kind.RECEIVE_FORWARD][:2]
    last[first], last[second] = last[second], last[first]
    assert find_unfinished((orders[0], tuple(last)), placement, STREAMS[streams])
