"""Training loop for a single process and for the ranks of a layout, with hooks for loop patterns.

The reproduction scripts of `python -m tests.fuzz` contain the source of this file. It imports only public names of
this library.
"""

import contextlib
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_megatron.config import MegatronConfig
from hf_megatron.core.off_stage import local_named_parameters
from hf_megatron.data_parallel.distributed_optimizer import prepare_optimizer
from tests.fuzz.generators import draw_batches, make_config
from tests.fuzz.pattern import LoopPattern


def to_float(value: Any) -> float:
    """Converts a scalar tensor or number to `float`."""
    return float(value.detach() if isinstance(value, Tensor) else value)


class Loop:
    """A training loop.

    Args:
        case: case drawn by `cases.draw_case`.
        loop_patterns: patterns that change the loop.
        folder: folder of the model; with `case["way"] == "from_config"` the random model is saved there.
        on_ranks (`bool`): parallelizes the model.

    Attributes:
        steps: number of optimizer steps done.
        logged: names and values, in order.
    """

    def __init__(self, case: Mapping[str, Any], loop_patterns: Sequence[LoopPattern], folder: str, on_ranks: bool):
        self.case, self.loop_patterns, self.on_ranks = case, loop_patterns, on_ranks
        self.folder = folder
        layout = case["layout"] if on_ranks else {}
        self.replica_ranks = math.prod(layout.get(f"{axis}_size", 1) for axis in ("tp", "cp", "pp"))
        self.rank = dist.get_rank() if on_ranks else 0
        self.dp_size = dist.get_world_size() // self.replica_ranks if on_ranks else 1
        self.dp_rank = self.rank // self.replica_ranks
        self.steps = 0
        self.logged: list[tuple[str, float]] = []
        self.accelerator: Any = None
        # State that patterns keep between hooks.
        self.kept: dict[str, Any] = {}
        self.random = any(loop_pattern.random for loop_pattern in loop_patterns)

    def log(self, name: str, value: Any) -> None:
        """Logs a value that must match the single-process run on every rank."""
        self.logged.append((name, to_float(value)))

    def log_loss(self, name: str, loss: Tensor) -> None:
        """Logs a loss, which some patterns compute as a local term of the global loss."""
        local = any(loop_pattern.local for loop_pattern in self.loop_patterns)
        self.log(name, self.total(loss) / self.dp_size if local else loss)

    def total(self, value: Tensor) -> Tensor:
        """Sums a local value over the data-parallel ranks."""
        if self.dp_size == 1:
            return value
        value = value.detach().clone()
        dist.all_reduce(value)
        return value / self.replica_ranks

    def load(self) -> None:
        """Loads the model, parallelized with the case's layout on ranks."""
        builder = getattr(transformers, self.case["class"])
        arguments: dict[str, Any] = {"dtype": getattr(torch, self.case["dtype"])}
        if self.case["dtype"] == "float64":
            # The grouped matmul of torch does not support float64.
            arguments["experts_implementation"] = "eager"
        if self.on_ranks:
            layout = self.case["layout"]
            arguments["megatron_config"] = MegatronConfig(**layout, unverified="raise", timeout=60.0)
        if self.on_ranks and self.case["way"] == "from_config":
            self.model = builder.from_config(make_config(self.case, self.loop_patterns), **arguments)
            self.model.save_pretrained(self.folder)
        else:
            self.model = builder.from_pretrained(self.folder, **arguments)
        if "disturbed" in self.case:
            self._disturb(self.case["disturbed"])
        self.model.train()

    @torch.no_grad()
    def _disturb(self, seed: int) -> None:
        """Perturbs the weights by rounding errors."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            noise = 2 * torch.rand(parameter.shape, generator=generator) - 1
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * noise.to(parameter.dtype))

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Creates the case's optimizer without preparing it."""
        if self.case["optimizer"] == "adamw":
            return torch.optim.AdamW(parameters, lr=self.case["rate"] * 1e-2, eps=1e-4)
        return torch.optim.SGD(parameters, lr=self.case["rate"] / self.case["norm"], momentum=0.9, weight_decay=1e-2)

    def prepare(self, optimizer: torch.optim.Optimizer) -> Any:
        """Prepares an optimizer with Accelerate or this library, depending on the kind of loop."""
        if self.accelerator is not None:
            return self.accelerator.prepare(optimizer)
        return prepare_optimizer(optimizer) if self.on_ranks else optimizer

    def parameters(self) -> list[nn.Parameter]:
        """Returns the trainable parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def vocabulary(self) -> list[nn.Parameter]:
        """Returns the weights `[vocabulary, hidden]` of embeddings and LM head."""
        vocab_size = self.model.config.get_text_config().vocab_size
        return [
            parameter for parameter in self.model.parameters() if parameter.dim() == 2 and len(parameter) == vocab_size
        ]

    def local_samples(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the samples of this data-parallel rank."""
        return {name: value.tensor_split(self.dp_size)[self.dp_rank] for name, value in batch.items()}

    def all(self, place: str) -> None:
        """Calls the hooks of all patterns for `place`."""
        for loop_pattern in self.loop_patterns:
            if getattr(loop_pattern, place) is not None:
                getattr(loop_pattern, place)(self)

    def call_override(self, place: str, plain: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the first pattern that overrides `place`, or the plain implementation."""
        overrides = [
            getattr(loop_pattern, place)
            for loop_pattern in self.loop_patterns
            if getattr(loop_pattern, place) is not None
        ]
        return overrides[0](self, *arguments) if overrides else plain(*arguments)

    def evaluate(self) -> Tensor:
        """Returns the evaluation loss of one global batch, equal on all ranks; resets the model to training mode."""
        self.model.eval()
        with torch.no_grad():
            loss = self.model(**self.batches[0][0]).loss
        self.model.train()
        return loss

    def run(self) -> None:
        """Runs the full training loop."""
        if self.random:
            torch.manual_seed(1234 + self.rank)
        self.load()
        self.batches = draw_batches(self.case, self.loop_patterns)
        if self.case["loop"] == "accelerate":
            import accelerate

            accumulation = len(self.batches[0])
            self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
            self.model = self.accelerator.prepare(self.model)
        self.all("made")
        if self.case["loop"] == "trainer":
            self.train_with_trainer()
        else:
            self.optimizer = self.prepare(self.make_optimizer(self.parameters()))
            self.all("prepared")
            for microbatches in self.batches:
                self.run_step(microbatches)

    def run_step(self, microbatches: list[dict[str, Tensor]]) -> None:
        """Runs one optimizer step."""
        for index, batch in enumerate(microbatches):
            with self.not_the_last(index < len(microbatches) - 1):
                loss = self.call_override("forward", self.plain_forward, self.local_samples(batch))
                self.log_loss("loss", loss)
                self.call_override(
                    "backward", self.plain_backward, loss if self.accelerator else loss / len(microbatches)
                )
        self.all("before_step")
        self.call_override("step", self.optimizer.step)
        self.steps += 1
        self.call_override("clear", self.optimizer.zero_grad)
        self.all("after_step")

    def not_the_last(self, waits: bool) -> Any:
        """Returns the context of a microbatch: `no_sync` for all but the last, or Accelerate's `accumulate`."""
        if self.accelerator is not None:
            return self.accelerator.accumulate(self.model)
        return self.model.no_sync() if waits and self.dp_size > 1 else contextlib.nullcontext()

    def plain_forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the model's loss of a batch."""
        return self.model(**batch).loss

    def plain_backward(self, loss: Tensor) -> None:
        """Runs backward directly or through Accelerate."""
        loss.backward() if self.accelerator is None else self.accelerator.backward(loss)

    def train_with_trainer(self) -> None:
        """Trains with stock Trainer and copies its log."""
        samples = [
            {name: value[index] for name, value in batch.items()}
            for microbatches in self.batches
            for batch in microbatches
            for index in range(len(batch["labels"]))
        ]
        batch_config = self.case["batch"]
        size = max(1, batch_config["rows"] // self.dp_size)
        arguments = transformers.TrainingArguments(
            output_dir=self.folder + "_trainer",
            use_cpu=True,
            report_to=[],
            max_steps=batch_config["steps"],
            per_device_train_batch_size=size,
            per_device_eval_batch_size=size,
            gradient_accumulation_steps=batch_config["accumulation"],
            optim="sgd",
            learning_rate=self.case["rate"] / self.case["norm"],
            lr_scheduler_type="constant",
            max_grad_norm=0.5 * self.case["norm"],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            self.model, arguments, train_dataset=samples, eval_dataset=samples[: 2 * batch_config["rows"]]
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        self.model = trainer.model
        for entry in trainer.state.log_history:
            for name in ("loss", "grad_norm"):
                if name in entry:
                    self.log(name, entry[name])
        self.log("eval_loss", trainer.evaluate()["eval_loss"])


def compute_fingerprints(model: nn.Module) -> dict[str, int]:
    """Returns checksums of the local shards, which must be equal on ranks with the same shard (key)."""
    checksums = {}
    for name, parameter in local_named_parameters(model):
        key, local = name, parameter.detach()
        if isinstance(parameter, DTensor):
            shards = zip(parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=False)
            coordinates = [place for place, placement in shards if not placement.is_replicate()]
            key, local = f"{name}{coordinates}", parameter.to_local().detach()
        checksums[key] = (
            zlib.crc32(local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if local.numel() else 0
        )
    return checksums


def run_loop(
    case: Mapping[str, Any], loop_patterns: Sequence[LoopPattern], folder: str, out: str, on_ranks: bool
) -> dict[str, Any]:
    """Trains and saves the weights in `out`; returns the values to compare, or the error and its traceback."""
    loop = Loop(case, loop_patterns, folder, on_ranks)
    try:
        loop.run()
        marks = compute_fingerprints(loop.model) if on_ranks else {}
        loop.model.save_pretrained(out)
        if not loop.random:
            loop.log("eval loss", loop.evaluate())
        loop.all("ended")
        return {"logged": loop.logged, "marks": marks, "steps": loop.steps}
    except Exception as error:  # noqa: BLE001, what was raised is the result
        import traceback

        kinds = [kind.__name__ for kind in type(error).__mro__]
        text = "".join(traceback.format_exception(error))
        return {"error": f"{kinds[0]}: {error}", "kinds": kinds, "steps": loop.steps, "traceback": text[-3000:]}


def compute_gradient_norm(case: Mapping[str, Any], loop_patterns: Sequence[LoopPattern], folder: str) -> float:
    """Returns the single-process gradient norm of the plain loss, rounded to a power of two."""
    model = getattr(transformers, case["class"]).from_pretrained(folder, dtype=torch.float32).train()
    model(**draw_batches(case, loop_patterns)[0][0]).loss.backward()
    total = sum(float(p.grad.pow(2).sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    return 2.0 ** round(math.log2(total)) if total > 0 and math.isfinite(total) else 1.0
