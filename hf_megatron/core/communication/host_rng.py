"""Random states of Python and numpy, from which some models draw: layers to leave out, spans to mask in sounds."""

import math
import random

import numpy
import torch
from torch import Tensor

# Words and place of Python's twister, and the normal number that waits for its turn.
_PYTHON = numpy.dtype([("words", "u4", 625), ("gauss", "f8")])
_NUMPY = numpy.dtype([("words", "u4", 624), ("place", "i8"), ("has_gauss", "i8"), ("gauss", "f8"), ("is_known", "?")])
_TWISTER = "MT19937"


def host_state() -> Tensor:
    """Packs both states into bytes `[n]`, as many on every rank; of numpy's that of its default generator alone."""
    _, words, gauss = random.getstate()
    python = numpy.array([(words, math.nan if gauss is None else gauss)], _PYTHON)
    state = numpy.random.get_state(legacy=False)
    own = numpy.zeros(1, _NUMPY)
    if state["bit_generator"] == _TWISTER:
        twister = state["state"]
        own[0] = twister["key"], twister["pos"], state["has_gauss"], state["gauss"], True
    return torch.from_numpy(numpy.concatenate([python.view("u1"), own.view("u1")]))


def set_host_state(packed: Tensor) -> None:
    """Sets both states to what `host_state` packed, on this rank or another."""
    flat = packed.numpy()
    python, own = flat[: _PYTHON.itemsize].view(_PYTHON)[0], flat[_PYTHON.itemsize :].view(_NUMPY)[0]
    gauss = float(python["gauss"])
    random.setstate((3, tuple(python["words"].tolist()), None if math.isnan(gauss) else gauss))
    if own["is_known"]:
        words, place, has_gauss = own["words"].copy(), int(own["place"]), int(own["has_gauss"])
        numpy.random.set_state((_TWISTER, words, place, has_gauss, float(own["gauss"])))
