"""Cases: model, layout, loop patterns, batches and load method, drawn from a seed and a number."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from tests.fuzz.models import MODELS, draw_features, has, is_random, simplest
from tests.fuzz.patterns import LOOP_PATTERNS, get_patterns

BATCH: Mapping[str, Any] = {
    "rows": 4,
    "length": 9,
    "accumulation": 1,
    "uneven": False,
    "steps": 3,
    "last_rows": 0,
    "padding": "none",
    "mask": "some",
}
# Layout name -> fields, sampling weight.
LAYOUTS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "tp2": ({"tp_size": 2}, 4),
    "tp2+sp": ({"tp_size": 2, "sequence_parallel": True}, 2),
    "dp2+zero0": ({"dp_size": 2, "zero_stage": 0}, 1),
    "dp2": ({"dp_size": 2, "zero_stage": 1}, 4),
    "dp2+zero2": ({"dp_size": 2, "zero_stage": 2}, 1),
    "dp2+zero3": ({"dp_size": 2, "zero_stage": 3}, 1),
    "pp2": ({"pp_size": 2}, 4),
    "pp2+mb2": ({"pp_size": 2, "num_microbatches": 2}, 1),
    "tp2+pp2": ({"tp_size": 2, "pp_size": 2}, 1),
    "tp4": ({"tp_size": 4}, 1),
    "tp2+dp2": ({"tp_size": 2, "dp_size": 2}, 1),
    "dp2+pp2": ({"dp_size": 2, "pp_size": 2}, 1),
    "dp3": ({"dp_size": 3}, 1),
    # Weight 0 until the other weights change: existing seeds keep their cases.
    "cp2": ({"cp_size": 2}, 0),
    "cp2+zero3": ({"cp_size": 2, "zero_stage": 3}, 0),
    "tp2+sp+dp2+zero3": ({"tp_size": 2, "sequence_parallel": True, "dp_size": 2, "zero_stage": 3}, 1),
}


def count_ranks(layout: Mapping[str, Any]) -> int:
    """Returns the number of ranks of a layout."""
    return math.prod(layout.get(f"{axis}_size", 1) for axis in ("tp", "cp", "pp", "dp"))


def fits(case: Mapping[str, Any], name: str) -> bool:
    """Returns whether a loop pattern applies to a case's model and kind of loop."""
    loop_pattern = LOOP_PATTERNS[name]
    if case["loop"] == "trainer" and (
        loop_pattern.loop or not loop_pattern.made or loop_pattern.before_step or loop_pattern.after_step
    ):
        return False
    return all(has(case, need) for need in loop_pattern.needs) and loop_pattern.loop in ("", case["loop"])


def together(names: Sequence[str], layout: Mapping[str, Any]) -> bool:
    """Returns whether loop patterns override different steps and agree on the loss of a layout."""
    taken: set[str] = set()
    loop_patterns = get_patterns(names)
    has_parts = layout.get("dp_size", 1) > 1 and any(loop_pattern.local for loop_pattern in loop_patterns)
    if has_parts and any(loop_pattern.of_full for loop_pattern in loop_patterns):
        return False
    for loop_pattern in loop_patterns:
        overrides = {
            place for place in ("forward", "backward", "step", "clear", "batch") if getattr(loop_pattern, place)
        }
        if taken & overrides:
            return False
        taken |= overrides
    return True


def simple_case(layout: str, loop_pattern: str, model: str = "llama", **changes: Any) -> dict[str, Any]:
    """Returns a case with one loop pattern on one layout."""
    case = simplest(model) | {
        "layout": dict(LAYOUTS[layout][0]),
        "loop_patterns": [loop_pattern],
        "batch": dict(BATCH),
        "way": "from_pretrained",
        "loop": LOOP_PATTERNS[loop_pattern].loop or "plain",
        "optimizer": "sgd",
        "dtype": "float32",
        "seed": 0,
        "rate": 1.0,
    }
    return case | changes


def draw_case(seed: int, number: int, only: Sequence[str] = (), layouts: Sequence[str] = ()) -> dict[str, Any]:
    """Draws a case, which depends only on its arguments.

    Args:
        seed, number (`int`): seed and number of the case.
        only: model types and loop patterns to draw from; all by default.
        layouts: names in `LAYOUTS`; all by default.
    """
    chance = random.Random(f"{seed}/{number}")
    models = [name for name in MODELS if name in only] or list(MODELS)
    chosen = list(layouts) or list(LAYOUTS)
    case = draw_features(chance, models)
    if not layouts and case["task"] != "causal" and chance.random() < 0.95:
        # Few of these models support pipelines.
        chosen = [name for name in chosen if "pp" not in name]
    layout = chance.choices(chosen, [LAYOUTS[name][1] for name in chosen])[0]
    case["layout"] = dict(LAYOUTS[layout][0])
    case["dtype"] = "bfloat16" if chance.random() < 0.12 else "float32"
    case["loop"] = chance.choices(("plain", "accelerate", "trainer"), (10, 1, 1))[0]
    if case["class"] == "AutoModelForSequenceClassification" and case["type"] == "bert":
        case["loop"] = chance.choice(("plain", "trainer"))
    batch = dict(BATCH)
    dp_size = case["layout"].get("dp_size", 1)
    batch["rows"] = chance.choice((4, 2 * dp_size, 3, 5, 6)) if case["loop"] != "trainer" else 2 * dp_size
    batch["rows"] = max(batch["rows"], dp_size)
    batch["length"] = chance.choice((9, 8, 7, 12, 13))
    batch["padding"] = chance.choice(("none", "none", "right", "left"))
    batch["mask"] = chance.choice(("some", "some", "half", "rows", "borders", "none"))
    batch["accumulation"] = chance.choice((1, 1, 1, 2, 3))
    if case["loop"] == "plain":
        batch["uneven"] = batch["accumulation"] > 1 and chance.random() < 0.5
        batch["last_rows"] = max(chance.choice((0, 0, 2, 3)), dp_size) if chance.random() < 0.5 else 0
    case["batch"] = batch
    case["way"] = "from_config" if chance.random() < 0.12 else "from_pretrained"
    case["optimizer"] = chance.choice(("sgd", "sgd", "sgd", "adamw"))
    case["seed"] = chance.randrange(1_000_000)
    case["rate"] = 1.0
    possible = [name for name in LOOP_PATTERNS if fits(case, name) and not LOOP_PATTERNS[name].slow]
    requested = [name for name in possible if name in only]
    loop_patterns = [chance.choice(requested or possible)]
    if not requested and chance.random() < 0.4:
        second = chance.choice(possible)
        if second not in loop_patterns and together([*loop_patterns, second], case["layout"]):
            loop_patterns.append(second)
    case["loop_patterns"] = loop_patterns
    return case


def draws(case: Mapping[str, Any]) -> bool:
    """Returns whether a case is random, so that only its ranks can be compared."""
    loop_patterns = get_patterns(case["loop_patterns"])
    return is_random(case["config"]) or any(loop_pattern.random for loop_pattern in loop_patterns)
