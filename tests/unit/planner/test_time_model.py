"""Tests of the time model: analytic limits and monotonicity."""

from dataclasses import replace

import pytest

from hf_megatron.errors import ConfigError
from hf_megatron.planner.devices import device
from hf_megatron.planner.time_model import (
    AXES,
    PUBLISHED,
    STOCK,
    Times,
    communication_seconds,
    exposed_reduction,
    seconds,
)
from hf_megatron.planner.unit_work import Work

H100 = device("h100")
LINKS = dict.fromkeys(AXES, "link")
WORK = Work({2048: 4e12, 512: 1e12}, 2e11, 3e9, 40, {"tp": (4, 2e8), "ep": (2, 1e8)})


def compute(work, efficiency=PUBLISHED, precision="bf16", on=H100):
    return seconds(work, on, efficiency, precision, LINKS).compute


def test_limits():
    share = H100.matmul_share["bf16"]
    # Large matmuls reach the device's share of the peak; at the half width they reach half of it.
    assert compute(Work({10**9: 1e15})) == pytest.approx(1e15 / (989e12 * share), rel=1e-5)
    half = int(PUBLISHED.half_width["bf16"])
    width = PUBLISHED.half_width["bf16"]
    assert compute(Work({half: 1e15})) == pytest.approx(1e15 / (989e12 * share) * (1 + width / half))
    assert compute(Work(attention=1e12)) == pytest.approx(1e12 / (989e12 * PUBLISHED.attention))
    assert compute(Work(moved=10**9)) == pytest.approx(1e9 * PUBLISHED.moved_share / (3.35e12 * 0.8))
    assert seconds(Work(), H100, PUBLISHED, "bf16", {}) == Times()


def test_launch_time_is_a_lower_bound():
    small, large = (seconds(Work({2048: flops}, kernels=100), H100, STOCK, "bf16", LINKS) for flops in (1e6, 1e15))
    assert small.compute == pytest.approx(100 * H100.launch_us * 1e-6) and small.by_floor > 0.9 * small.compute
    assert large.by_floor == 0 and large.compute == compute(Work({2048: 1e15}), STOCK)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("efficiency", [PUBLISHED, STOCK])
def test_more_work_takes_longer(efficiency, precision):
    before = seconds(WORK, H100, efficiency, precision, LINKS)
    more = [
        replace(WORK, matmuls={**WORK.matmuls, 2048: 5e12}),
        replace(WORK, attention=3e11),
        replace(WORK, moved=4e9),
        replace(WORK, kernels=10**5),
        replace(WORK, traffic={**WORK.traffic, "tp": (4, 3e8)}),
        # The same operations in narrower matmuls.
        replace(WORK, matmuls={1024: 4e12, 512: 1e12}),
    ]
    for work in more:
        assert seconds(work, H100, efficiency, precision, LINKS).total > before.total
    two = seconds(WORK + WORK, H100, efficiency, precision, LINKS)
    assert two.total == pytest.approx((before + before).total) == pytest.approx(before.repeated(2).total)


def test_faster_devices_and_precisions_are_faster():
    assert compute(WORK, on=device("a100-80")) > compute(WORK) > compute(WORK, on=device("b200"))
    assert compute(WORK, precision="fp32") > compute(WORK) > compute(WORK, precision="fp8")
    with pytest.raises(ConfigError, match="precision = 'fp8'"):
        compute(WORK, precision="fp8", on=device("a100-40"))


def test_stock_modules_are_slower_than_published_stacks():
    stock, published = (seconds(WORK, H100, efficiency, "bf16", LINKS) for efficiency in (STOCK, PUBLISHED))
    assert stock.compute > published.compute
    assert all(stock.exposed[axis] > published.exposed[axis] for axis in ("tp", "ep"))


def test_communication():
    slow = {**LINKS, "ep": "network"}
    exposed, other = (seconds(WORK, H100, STOCK, "bf16", links).exposed for links in (LINKS, slow))
    assert other["ep"] > exposed["ep"] and other["tp"] == exposed["tp"]
    expected = 2e8 / (450e9 * STOCK.link_share) + 4 * STOCK.call_us * 1e-6
    assert exposed["tp"] == pytest.approx(expected)
    assert communication_seconds("dp", 0, 5e9, H100, PUBLISHED, {"dp": "network"}) == pytest.approx(
        0.1 / PUBLISHED.network_share
    )
    for links in ({"tp": "link"}, {"tp": "link", "ep": "radio"}):
        with pytest.raises(ConfigError, match=r"links\['ep'\] = .*: expected one of link, network"):
            seconds(WORK, H100, STOCK, "bf16", links)
    with pytest.raises(ConfigError, match=r"links\['sp'\]"):
        seconds(Work(traffic={"sp": (1, 1.0)}), H100, STOCK, "bf16", {"sp": "link"})


def test_reductions_beyond_the_step_are_exposed():
    share = PUBLISHED.exposed["dp"]
    assert exposed_reduction(0.0, 1.0, PUBLISHED) == 0
    assert exposed_reduction(0.5, 1.0, PUBLISHED) == pytest.approx(0.5 * share)
    assert exposed_reduction(2.0, 1.0, PUBLISHED) == pytest.approx(2.0 * share + 1.1)


def test_work_addition_and_scaling():
    both = WORK + Work({512: 1e12}, 1e11, 1e9, 2, {"tp": (1, 1e8), "dp": (1, 5.0)})
    assert both.matmuls == {2048: 4e12, 512: 2e12} and both.kernels == 42
    assert both.traffic == {"tp": (5, 3e8), "ep": (2, 1e8), "dp": (1, 5.0)}
    half = WORK.scaled(0.5)
    assert half.flops == WORK.flops / 2 and half.kernels == WORK.kernels and half.traffic["tp"] == (4, 1e8)
