"""One forward and backward pass on any layout, compared with the single-process pass."""

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.parallel_state import unwrap_parallel_model
from hf_megatron.testing.measure import _full, _gradients
from tests.helpers.dp_training import load_model, make_batch, shard_batch
from tests.helpers.references import run_single_process


def measure_step(model, backward=lambda loss: loss.backward()):
    """Returns the loss and, on rank 0, the full gradients of a step on the global batch."""
    inner = unwrap_parallel_model(model)
    loss = model(**shard_batch(inner, make_batch())).loss
    backward(loss)
    gradients = _full(inner, _gradients(inner))
    model.zero_grad()
    return loss.item(), {name: gradient for name, gradient in gradients.items() if gradient is not None}


def load_and_measure(path):
    return measure_step(load_model(path))


def assert_step_matches(results, expected):
    """Compares the steps of all ranks with the single-process step."""
    assert results[0][1].keys() == expected[1].keys() and expected[1]
    for loss, gradients in results:
        assert abs(loss / expected[0] - 1) < 1e-5
        for name, gradient in gradients.items():
            error = (gradient - expected[1][name]).norm() / expected[1][name].norm().clamp(min=1e-6)
            assert error < 1e-4, (name, error)


def compare_steps(path, on_rank, ranks=2, *args):
    """Runs `on_rank`, which returns one or several steps, and compares them with the single-process step."""
    expected = run_single_process(load_and_measure, path)
    results = run_ranks(on_rank, ranks, *args)
    for steps in zip(*(each if isinstance(each, list) else [each] for each in results), strict=True):
        assert_step_matches(steps, expected)
