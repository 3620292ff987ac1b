"""Fits the planner's time constants to published runs, and reports its error on each of them.

    python benchmarks/calibrate_planner.py --out benchmarks/results/planner_calibration.json
    python benchmarks/calibrate_planner.py --only-check

Coordinate search on mean + 0.15 max of the absolute log error of tokens per second and device. `--only-check` skips the
fit and reports the errors of the library's current constants. Leave-one-source-out errors come from a fit on the other
sources; a constant that only the left-out source determines is then replaced by its substitute in `UNTOLD`.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from planner_rows import Pieces, Row, pipeline_seconds, read_rows, step_pieces, tokens_per_second

from hf_megatron.planner.devices import Device, device
from hf_megatron.planner.time_model import PUBLISHED, Efficiency

# torchtitan's H100 has 500 W instead of 700 W and slower memory; its clock is fitted, its name is no built-in device's.
SLOWED, CLOCK = "h100-500w", 0.799
# Shares of the peak that large matrix products reach, by device and precision.
SHARES = ("h100 bf16", "h100 fp8", "b200 bf16", "gb200 bf16")
# Constant -> lower and upper bound.
BOUNDS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(SHARES, (0.3, 1.0)),
    "h100-500w clock": (0.5, 1.0),
    "half_width": (32.0, 1000.0),
    "attention": (0.2, 0.9),
    "moved_share": (0.2, 1.0),
    "kernel_share": (0.1, 1.0),
    "exposed tp": (0.05, 1.0),
    "exposed ep": (0.05, 1.0),
    "exposed dp": (0.0, 0.5),
}
# Start of every search.
START: Mapping[str, float] = {
    "h100 bf16": 0.63,
    "h100 fp8": 0.62,
    "b200 bf16": 0.43,
    "gb200 bf16": 0.48,
    "h100-500w clock": 0.7,
    "half_width": 296.0,
    "attention": 0.47,
    "moved_share": 0.69,
    "kernel_share": 0.55,
    "exposed tp": 0.39,
    "exposed ep": 0.6,
    "exposed dp": 0.07,
}
# Substitutes for constants that the given rows do not determine: another constant's value, or a number.
UNTOLD: Mapping[str, str | float] = {
    "h100 bf16": 0.6,
    "h100 fp8": "h100 bf16",
    "b200 bf16": "h100 bf16",
    "gb200 bf16": "b200 bf16",
    "h100-500w clock": 500 / 700,
    "exposed ep": 1.0,
}
FAILS = 0.15
WORST_WEIGHT = 0.15
# Fp8 products need twice the size to be as efficient.
FP8_WIDTH = 2.0
_NUDGE = 1e-4
_STEPS = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002)

Constants = dict[str, float]


def committed() -> Constants:
    """Returns the library's current constants."""
    shares = {}
    for key in SHARES:
        name, precision = key.split()
        shares[key] = device(name).matmul_share[precision]
    own = {
        "h100-500w clock": CLOCK,
        "half_width": PUBLISHED.half_width["bf16"],
        "attention": PUBLISHED.attention,
        "moved_share": PUBLISHED.moved_share,
        "kernel_share": PUBLISHED.kernel_share,
    }
    return shares | own | {f"exposed {axis}": PUBLISHED.exposed[axis] for axis in ("tp", "ep", "dp")}


def applied(constants: Constants, name: str) -> tuple[Device, Efficiency]:
    """Returns the device of a row and the efficiency, with these constants applied."""
    built_in = "h100" if name == SLOWED else name
    found = device(built_in)
    shares = {precision: constants.get(f"{built_in} {precision}", 1.0) for precision in found.matmul_share}
    found = replace(found, matmul_share=shares)
    if name == SLOWED:
        clock = constants["h100-500w clock"]
        peaks = {precision: peak * clock for precision, peak in found.peak_tflops.items()}
        found = replace(found, peak_tflops=peaks, memory_tb_s=found.memory_tb_s * clock)
    exposed = {axis: constants[f"exposed {axis}"] for axis in ("tp", "ep", "dp")}
    width = constants["half_width"]
    efficiency = replace(
        PUBLISHED,
        half_width={"bf16": width, "fp8": FP8_WIDTH * width},
        attention=constants["attention"],
        moved_share=constants["moved_share"],
        kernel_share=constants["kernel_share"],
        exposed={**PUBLISHED.exposed, **exposed},
    )
    return found, efficiency


@dataclass(frozen=True)
class Line:
    """A row's pipeline time, linear in its pieces: exact as long as the critical path stays the same."""

    row: Row
    model: dict
    parts: tuple[float, ...]

    def error(self, constants: Constants) -> float:
        """Returns the logarithm of predicted over published throughput."""
        found, efficiency = applied(constants, self.row.device)
        pieces = step_pieces(self.row, self.model, found, efficiency)
        pipeline = sum(part * size for part, size in zip(self.parts, _sizes(pieces), strict=True))
        return math.log(tokens_per_second(self.row, pieces, pipeline, efficiency) / self.row.published)


def _sizes(pieces: Pieces) -> tuple[float, ...]:
    return (*pieces.layer, *pieces.head, pieces.send)


def line_of(row: Row, model: dict, constants: Constants) -> Line:
    """Counts how often each piece is on the critical path, from the increase of the step time per increase of it."""
    pieces = step_pieces(row, model, *applied(constants, row.device))
    sizes = _sizes(pieces)
    seconds = pipeline_seconds(row, model, pieces)
    parts = []
    for index, size in enumerate(sizes):
        nudge = size * _NUDGE
        more = [value + nudge * (number == index) for number, value in enumerate(sizes)]
        longer = replace(pieces, layer=(more[0], more[1]), head=(more[2], more[3]), send=more[4])
        parts.append((pipeline_seconds(row, model, longer) - seconds) / nudge if nudge else 0.0)
    return Line(row, model, tuple(parts))


def loss(lines: list[Line], constants: Constants) -> float:
    errors = [abs(line.error(constants)) for line in lines]
    return statistics.mean(errors) + WORST_WEIGHT * max(errors)


def fitted(lines: list[Line], start: Constants, free: list[str]) -> Constants:
    """Searches along one constant at a time, with decreasing step sizes."""
    best, least = dict(start), loss(lines, start)
    for step in _STEPS:
        improved = True
        while improved:
            improved = False
            for name in free:
                for factor in (1 + step, 1 / (1 + step)):
                    low, high = BOUNDS[name]
                    tried = {**best, name: min(max(best[name] * factor, low), high)}
                    found = loss(lines, tried)
                    if found < least - 1e-7:
                        best, least, improved = tried, found, True
    return best


def without_effect_on(lines: list[Line], constants: Constants) -> list[str]:
    """Returns the constants that have no effect on these rows."""
    before = [line.error(constants) for line in lines]
    return [
        name for name in BOUNDS if before == [line.error({**constants, name: constants[name] * 0.99}) for line in lines]
    ]


def fit_without(source: str | None, lines: list[Line], start: Constants) -> Constants:
    """Fits on all rows except a source's; constants that no row determines are kept or replaced by a substitute."""
    rest = [line for line in lines if line.row.source != source]
    unknown = without_effect_on(rest, start)
    found = fitted(rest, start, [name for name in BOUNDS if name not in unknown])
    # The order matters for chained substitutes: the first in the chain is set first.
    for name in (name for name in UNTOLD if name in unknown):
        value = UNTOLD[name]
        found[name] = found[value] if isinstance(value, str) else value
    return found


def exact_errors(rows: list[Row], models: dict[str, dict], constants: Constants) -> list[float]:
    """Returns predicted over published minus 1, with the simulator's own pipeline time."""
    found = []
    for row in rows:
        pieces = step_pieces(row, models[row.model], *applied(constants, row.device))
        efficiency = applied(constants, row.device)[1]
        pipeline = pipeline_seconds(row, models[row.model], pieces)
        found.append(tokens_per_second(row, pieces, pipeline, efficiency) / row.published - 1)
    return found


def right_orders(rows: list[Row], errors: list[float]) -> dict[str, bool]:
    """Returns for each source whether predicted and published step times are in the same order."""
    found = {}
    for source in dict.fromkeys(row.source for row in rows):
        own = [(r, error) for r, error in zip(rows, errors, strict=True) if r.source == source and not r.held_out]
        tokens = [row.global_batch * row.sequence / row.devices for row, _ in own]
        published = [count / row.published for count, (row, _) in zip(tokens, own, strict=True)]
        predicted = [time / (1 + error) for time, (_, error) in zip(published, own, strict=True)]
        places: list[Callable[[int], float]] = [published.__getitem__, predicted.__getitem__]
        orders = [sorted(range(len(own)), key=place) for place in places]
        found[source] = orders[0] == orders[1]
    return found


def summary(errors: list[float]) -> str:
    sizes = [abs(error) for error in errors]
    within = sum(size <= FAILS for size in sizes)
    return f"median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}, {within} of {len(sizes)} within {FAILS:.0%}"


def table(entries: list[dict]) -> str:
    """Returns the recorded rows as a Markdown table."""
    lines = ["| run | published | error | left out |", "|---|---|---|---|"]
    for entry in entries:
        mark = " !" if abs(entry["error"]) > FAILS else ""
        other = entry["left_out"]
        left_out_error = "never fitted" if other is None else f"{other:+.1%}" + (" !" if abs(other) > FAILS else "")
        lines.append(
            f"| {entry['source']}: {entry['name']}, {entry['precision']} | {entry['published']:g} "
            f"| {entry['error']:+.1%}{mark} | {left_out_error} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for constants and errors")
    parser.add_argument("--only-check", action="store_true", help="fit nothing, show the library's constants")
    parser.add_argument("--rounds", type=int, default=2, help="fits, each on the longest chains that the last one left")
    parser.add_argument("--table", type=Path, help="print the rows of such a JSON file in Markdown, and nothing else")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text(encoding="utf-8"))["rows"]))
        return
    sources, models, rows = read_rows()
    constants, left_out = committed(), [math.nan] * len(rows)
    fitted_rows = [row for row in rows if not row.held_out]
    without_effect = without_effect_on([line_of(row, models[row.model], constants) for row in fitted_rows], constants)
    if not options.only_check:
        constants = dict(START)
        for _ in range(options.rounds):
            lines = [line_of(row, models[row.model], constants) for row in fitted_rows]
            constants = fit_without(None, lines, constants)
        constants = {name: float(f"{value:.3g}") for name, value in constants.items()}
        lines = [line_of(row, models[row.model], dict(START)) for row in fitted_rows]
        for source in sources:
            own = [index for index, row in enumerate(rows) if row.source == source and not row.held_out]
            without = fit_without(source, lines, dict(START))
            for index, error in zip(own, exact_errors([rows[i] for i in own], models, without), strict=True):
                left_out[index] = error
    errors = exact_errors(rows, models, constants)
    orders = right_orders(rows, errors)
    for row, error, other in zip(rows, errors, left_out, strict=True):
        mark = ("! fails" if abs(error) > FAILS else "") + (" (held out)" if row.held_out else "")
        left_out_error = " " * 8 if math.isnan(other) else f"{other:+8.1%}"
        print(f"{row.source} {row.precision} {row.name:54} {row.published:8g} {error:+7.1%} {left_out_error} {mark}")
    print(f"fit: {summary([error for row, error in zip(rows, errors, strict=True) if not row.held_out])}")
    if not options.only_check:
        print(f"one source left out: {summary([error for error in left_out if not math.isnan(error)])}")
    print("order of step times right:", ", ".join(f"{source} {right}" for source, right in orders.items()))
    print("constants:", ", ".join(f"{name} {value:.3g}" for name, value in constants.items()))
    print("told by no row:", ", ".join(without_effect) or "none")
    if options.out:
        entries = [
            {"source": row.source, "name": row.name, "precision": row.precision, "published": row.published}
            | {
                "held_out": row.held_out,
                "error": round(error, 4),
                "left_out": None if math.isnan(other) else round(other, 4),
            }
            for row, error, other in zip(rows, errors, left_out, strict=True)
        ]
        versions = {name: metadata.version(name) for name in ("torch", "hf_megatron")}
        found = {
            "versions": versions,
            "constants": constants,
            "told_by_no_row": without_effect,
            "orders_right": orders,
            "rows": entries,
        }
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
