"""Published runs in `planner_rows.json`, and their predictions by the planner's time model from layer shapes alone.

Layers are the ones of GPT, Llama and Qwen3-MoE. Matrix products are counted as fused in the published stacks, bytes and
kernels as in stock transformers modules.
"""

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from hf_megatron.pipeline_parallel.schedule_simulator import StageCosts, simulated_seconds
from hf_megatron.planner.devices import Device
from hf_megatron.planner.time_model import Efficiency, Times, communication_seconds, exposed_reduction, seconds
from hf_megatron.planner.unit_work import Work

ROWS = Path(__file__).with_name("planner_rows.json")
# Memory traffic of a stock Llama layer's forward, in units of [tokens, hidden] in bf16: two norms in fp32 (36), rotary
# embedding of queries and keys (10), gate and product (16), two sums (6); and its number of kernel launches.
MOVED, KERNELS = 68, 40
# Bytes per element of the logits, and kernels of the loss.
LOSS_BYTES, LOSS_KERNELS = 16, 8
# FLOPs of backward relative to forward, for matrix products and for attention.
BACKWARD, ATTENTION_BACKWARD = 2.0, 2.5
# Bytes that AdamW reads and writes per local parameter, with fp32 moments, gradients and main params.
OPTIMIZER_BYTES = 28


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    cp: int = 1
    vp: int = 1
    ep: int = 1


@dataclass(frozen=True)
class Row:
    """One published run; `published` is in tokens per second and device, `sharded` means FSDP.

    Rows with `held_out` are predicted but never used for fitting.
    """

    source: str
    model: str
    device: str
    devices: int
    precision: str
    global_batch: int
    microbatch: int
    sequence: int
    layout: Layout
    published: float
    sharded: bool = False
    recompute: str = "none"
    held_out: bool = False

    @property
    def name(self) -> str:
        """Model, device and layout as text."""
        dp = self.data_parallel
        sizes = [*vars(self.layout).items(), ("fsdp" if self.sharded else "dp", dp)]
        parts = [f"{axis.upper()}{size}" for axis, size in sizes if size > 1]
        return f"{self.model}, {self.device}, {' '.join(parts) or 'one device'}"

    @property
    def data_parallel(self) -> int:
        return self.devices // (self.layout.tp * self.layout.pp * self.layout.cp)

    @property
    def microbatches(self) -> int:
        return self.global_batch // (self.data_parallel * self.microbatch)

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one rank."""
        return self.microbatch * self.sequence // self.layout.cp


@dataclass(frozen=True)
class Pieces:
    """Seconds of a step's parts: forward and backward of a layer and of the head, a send, and once-per-step costs."""

    layer: tuple[float, float]
    head: tuple[float, float]
    send: float
    reduction: float
    optimizer: float


def read_rows() -> tuple[dict[str, str], dict[str, dict], list[Row]]:
    """Reads sources, models and rows."""
    file = json.loads(ROWS.read_text(encoding="utf-8"))
    rows = [Row(**{**row, "layout": Layout(**row["layout"])}) for row in file["rows"]]
    return file["sources"], file["models"], rows


def layer_products(model: dict, row: Row) -> tuple[Counter, Counter]:
    """Returns the matrix products of a layer's forward as smallest dim -> FLOPs, and the parameters on a rank.

    Parameters are counted as replicated over the data-parallel group ("dense") or as experts ("experts").
    """
    hidden, tp, tokens = model["hidden"], row.layout.tp, row.tokens
    queries, keys = model["heads"] * model["head"], model["groups"] * model["head"]
    products, parameters = Counter(), Counter()

    def product(m: float, k: float, n: float, copies: float = 1, kind: str = "dense") -> None:
        products[max(1, int(min(m, k, n)))] += 2.0 * m * k * n * copies
        parameters[kind] += k * n * copies

    product(tokens, hidden, (queries + 2 * keys) / tp)
    product(tokens, queries / tp, hidden)
    wide = model["intermediate"] * (2 if model["gated"] else 1)
    if "experts" not in model:
        product(tokens, hidden, wide / tp)
        product(tokens, model["intermediate"] / tp, hidden)
    else:
        product(tokens / tp, hidden, model["experts"])
        here = model["experts"] / row.layout.ep
        # Assumes balanced routing: each rank receives as many tokens as it sends.
        each = tokens / tp * model["experts_per_token"] / here
        product(each, hidden, wide, here, "experts")
        product(each, model["intermediate"], hidden, here, "experts")
    return products, parameters


def layer_work(model: dict, row: Row) -> tuple[Work, Work]:
    """Returns forward and backward of a layer for one microbatch on one rank."""
    hidden, layout, tokens = model["hidden"], row.layout, row.tokens
    activation = 2.0 * tokens * hidden / layout.tp
    traffic = {}
    if layout.tp > 1:
        # Sequence parallel: gathered and scattered around attention and around the MLP.
        traffic["tp"] = (4, 4 * activation * (layout.tp - 1))
    if layout.cp > 1:
        ring = 2.0 * tokens * 2 * model["groups"] * model["head"] / layout.tp
        traffic["cp"] = (layout.cp - 1, ring * (layout.cp - 1))
    if layout.ep > 1:
        sent = activation * model["experts_per_token"] * (layout.ep - 1) / layout.ep
        traffic["ep"] = (2, 2 * sent)
    products, _ = layer_products(model, row)
    attention = 2.0 * tokens * row.sequence * model["heads"] * model["head"] / layout.tp
    forward = Work(products, attention, MOVED * activation, KERNELS, traffic)
    backward = Work(
        {width: flops * BACKWARD for width, flops in products.items()},
        attention * ATTENTION_BACKWARD,
        2 * forward.moved,
        2 * KERNELS,
        {axis: (calls, size * (2 if axis == "cp" else 1)) for axis, (calls, size) in traffic.items()},
    )
    if row.recompute == "full":
        backward += forward
    elif row.recompute == "selective":
        # Half of the products are recomputed, and all memory-bound operations between them.
        again = {width: flops / 2 for width, flops in products.items()}
        backward += replace(forward, matmuls=again, attention=0.0, traffic={})
    return forward, backward


def head_work(model: dict, row: Row) -> tuple[Work, Work]:
    """Returns forward and backward of the head and the loss."""
    hidden, tp, tokens, columns = model["hidden"], row.layout.tp, row.tokens, model["vocabulary"] / row.layout.tp
    width = int(min(tokens, hidden, columns))
    flops = 2.0 * tokens * hidden * columns
    traffic = {"tp": (1, 2.0 * tokens * hidden / tp * (tp - 1))} if tp > 1 else {}
    forward = Work({width: flops}, 0.0, LOSS_BYTES * tokens * columns, LOSS_KERNELS, traffic)
    return forward, replace(forward, matmuls={width: flops * BACKWARD})


def step_pieces(row: Row, model: dict, device: Device, efficiency: Efficiency) -> Pieces:
    """Returns the seconds of a step's parts."""
    layout, dp = row.layout, row.data_parallel
    # Megatron's rank order: tensor parallel innermost, then context, data, pipeline.
    links = {
        "tp": device.connection(layout.tp),
        "cp": device.connection(layout.tp * layout.cp),
        "ep": device.connection(layout.ep),
        "dp": device.connection(layout.tp * layout.cp * dp),
        "pp": device.connection(row.devices),
    }

    def both(works: tuple[Work, Work], precision: str) -> tuple[float, float]:
        found: list[Times] = [seconds(work, device, efficiency, precision, links) for work in works]
        return found[0].total, found[1].total

    activation = 2.0 * row.tokens * model["hidden"] / layout.tp
    send = communication_seconds("pp", 1, activation, device, efficiency, links) * efficiency.exposed["pp"]
    layers = max(layers_of_stages(model["layers"], 1, layout.pp))
    _, parameters = layer_products(model, row)
    # The first and last stage hold embedding or head; without a pipeline one rank holds both.
    ends = model["vocabulary"] * model["hidden"] / layout.tp * (1 if layout.pp > 1 else 2)
    dense = layers * parameters["dense"] + ends
    copies = max(1, dp * layout.cp * layout.tp // layout.ep) if layout.ep > 1 else dp * layout.cp
    experts = layers * parameters["experts"]
    # Weights are gathered and gradients scattered in bf16; with FSDP, per microbatch: weights twice, gradients once.
    each = 6 * row.microbatches if row.sharded else 4
    dp_cp = dp * layout.cp
    sent = each * (dense * (dp_cp - 1) / dp_cp + experts * (copies - 1) / copies)
    reduction = communication_seconds("dp", 1, sent, device, efficiency, links)
    kept = dense / dp_cp + experts / copies
    optimizer = OPTIMIZER_BYTES * kept / (device.memory_tb_s * 1e12 * device.memory_share)
    # The head stays in bf16.
    layer = both(layer_work(model, row), row.precision)
    return Pieces(layer, both(head_work(model, row), "bf16"), send, reduction, optimizer)


def layers_of_stages(layers: int, stages_per_rank: int, ranks: int) -> list[int]:
    """Distributes layers over stages; if they do not divide, embedding and head count as one layer, as in recipes."""
    stages = ranks * stages_per_rank
    if layers % stages and (layers + 2) % stages == 0:
        each = [(layers + 2) // stages] * stages
        each[0] -= 1
        each[-1] -= 1
        return each
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def pipeline_seconds(row: Row, model: dict, pieces: Pieces) -> float:
    """Returns the seconds of all microbatches, without data-parallel communication and the optimizer."""
    layout = row.layout
    if layout.pp == 1:
        return row.microbatches * (model["layers"] * sum(pieces.layer) + sum(pieces.head))
    forward, backward = pieces.layer
    counts = layers_of_stages(model["layers"], layout.vp, layout.pp)
    costs = [StageCosts(count * forward, count * backward / 2, count * backward / 2) for count in counts]
    last, (forward, backward) = costs[-1], pieces.head
    costs[-1] = StageCosts(last.forward + forward, last.inputs + backward / 2, last.weights + backward / 2)
    name = "1f1b" if layout.vp == 1 else "interleaved_1f1b"
    return simulated_seconds(name, layout.pp, layout.vp, row.microbatches, costs, pieces.send)


def tokens_per_second(row: Row, pieces: Pieces, pipeline: float, efficiency: Efficiency) -> float:
    """Returns tokens per second and device."""
    step = pipeline + exposed_reduction(pieces.reduction, pipeline, efficiency) + pieces.optimizer
    return row.global_batch * row.sequence / row.devices / step
