"""Training-loop patterns that provoke an error on the ranks, follow its cure, and match the single-process run."""

import contextlib
import re

import pytest

from hf_megatron import UnsupportedError
from hf_megatron.parallelize import parallel_state
from tests.helpers.training import PatternRuns


class CurePatterns:
    """Patterns of a test file, each with the layouts that it runs on."""

    def __init__(self):
        self._layouts = {}

    def __call__(self, *layouts):
        """Registers a pattern, a function of a `Loop`."""

        def register(function):
            self._layouts[function.__name__] = function, layouts
            return function

        return register

    @property
    def parameters(self):
        """Pairs of a pattern's name and a layout."""
        return [(name, text) for name, (_, layouts) in self._layouts.items() for text in layouts]

    def make_runs(self, path):
        """Returns the runs of all patterns, by layout."""
        return {
            text: PatternRuns(
                path, {name: function for name, (function, layouts) in self._layouts.items() if text in layouts}
            )
            for text in {text for _, text in self.parameters}
        }


def is_parallel(loop):
    return parallel_state(loop.model) is not None


@contextlib.contextmanager
def expect_error(message, kind=UnsupportedError):
    """Expects an error whose text contains `message`."""
    with pytest.raises(kind, match=re.escape(message)):
        yield
