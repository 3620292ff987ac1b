"""Optimizers of the table in docs/data_parallel.md, what each does on a layout, and the table itself.

`tests/integration/data_parallel/test_optimizers_on_layouts.py` tests every cell. Classes that users copy into their
scripts are written here as they are published, without the parts that no test reaches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Heading -> layout of `parse_layout`.
LAYOUTS = {
    "tp2": "tp2",
    "tp2+sp": "tp2+sp",
    "pp2": "pp2",
    "cp2": "cp2",
    "ep2": "dp2+ep2",
    "dp2, stage 0": "dp2+zero0",
    "1": "dp2+zero1",
    "2": "dp2+zero2",
    "3": "dp2+zero3",
    "tp2+dp2": "tp2+dp2",
}
# Round-off of fp32 sums in another order.
LIMIT = 2e-4
# Products in bf16 and 8-bit states amplify round-off of the gradients.
ROUNDED_LIMIT = 5e-2


class MoonlightMuon(torch.optim.Optimizer):
    """Muon of MoonshotAI/Moonlight: one class for matrices and others, told apart by a flag in the state."""

    def __init__(self, lr=1e-3, wd=0.1, muon_params=None, momentum=0.95, ns_steps=5, adamw_params=None, adamw_eps=1e-8):
        defaults = {"lr": lr, "wd": wd, "momentum": momentum, "ns_steps": ns_steps, "adamw_eps": adamw_eps}
        muon_params, adamw_params = list(muon_params), list(adamw_params or ())
        super().__init__([*muon_params, *adamw_params], {**defaults, "adamw_betas": (0.9, 0.95)})
        for parameter in muon_params:
            assert parameter.ndim == 2, parameter.ndim
            self.state[parameter]["use_muon"] = True
        for parameter in adamw_params:
            self.state[parameter]["use_muon"] = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr = group["lr"]
            for parameter in [p for p in group["params"] if self.state[p]["use_muon"]]:
                if parameter.grad is None:
                    continue
                state, grad = self.state[parameter], parameter.grad
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(grad)
                momentum = state["momentum_buffer"]
                momentum.mul_(group["momentum"]).add_(grad)
                update = newton_schulz(grad.add(momentum, alpha=group["momentum"]), group["ns_steps"])
                scale = 0.2 * max(parameter.shape[:2]) ** 0.5
                parameter.data.mul_(1 - lr * group["wd"])
                parameter.data.add_(update, alpha=-lr * scale)
            beta1, beta2 = group["adamw_betas"]
            for parameter in [p for p in group["params"] if not self.state[p]["use_muon"]]:
                if parameter.grad is None:
                    continue
                state, grad = self.state[parameter], parameter.grad
                if "step" not in state:
                    state["step"] = 0
                    state["moment1"], state["moment2"] = torch.zeros_like(grad), torch.zeros_like(grad)
                state["step"] += 1
                state["moment1"].lerp_(grad, 1 - beta1)
                state["moment2"].lerp_(grad.square(), 1 - beta2)
                update = state["moment1"] / (group["adamw_eps"] + state["moment2"].sqrt())
                scale = (1 - beta1 ** state["step"]) / (1 - beta2 ** state["step"]) ** 0.5
                parameter.data.mul_(1 - lr * group["wd"])
                parameter.data.add_(update, alpha=-lr / scale)


def newton_schulz(gradient, steps):
    """Returns the orthogonalized matrix, of the same shape, in bf16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    matrix = gradient.bfloat16()
    if gradient.size(0) > gradient.size(1):
        matrix = matrix.T
    matrix = matrix / (matrix.norm() + 1e-7)
    for _ in range(steps):
        square = matrix @ matrix.T
        matrix = a * matrix + (b * square + c * square @ square) @ matrix
    return matrix.T if gradient.size(0) > gradient.size(1) else matrix


class MuonWithAuxAdam(torch.optim.Optimizer):
    """Single-device Muon of KellerJordan/Muon: groups with `use_muon`, and gradients of zeros where there is none."""

    def __init__(self, param_groups):
        for group in param_groups:
            defaults = {"lr": 0.02, "momentum": 0.95} if group["use_muon"] else {"lr": 3e-4, "eps": 1e-10}
            for key, value in {**defaults, "weight_decay": 0}.items():
                group.setdefault(key, value)
        super().__init__(param_groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                state, grad = self.state[parameter], parameter.grad
                if group["use_muon"]:
                    if len(state) == 0:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
                    momentum = state["momentum_buffer"]
                    momentum.lerp_(grad, 1 - group["momentum"])
                    assert grad.ndim >= 2
                    update = newton_schulz(grad.lerp(momentum, group["momentum"]), 5)
                    update = update * max(1, grad.size(-2) / grad.size(-1)) ** 0.5
                else:
                    if len(state) == 0:
                        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
                        state["step"] = 0
                    state["step"] += 1
                    state["exp_avg"].lerp_(grad, 1 - 0.9)
                    state["exp_avg_sq"].lerp_(grad.square(), 1 - 0.95)
                    average, square = (
                        state[key] / (1 - beta ** state["step"])
                        for key, beta in (("exp_avg", 0.9), ("exp_avg_sq", 0.95))
                    )
                    update = average / (square.sqrt() + group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.reshape(parameter.shape), alpha=-group["lr"])


class Shampoo(torch.optim.Optimizer):
    """Matrices are preconditioned from both sides, with state of other shapes than the parameter's."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, grad = self.state[parameter], parameter.grad
                if grad.dim() != 2:
                    parameter.add_(grad / (grad.norm() + 0.1), alpha=-group["lr"])
                    continue
                if not state:
                    state["step"] = 0
                    state["left"], state["right"] = (torch.eye(size) * 1e-2 for size in grad.shape)
                state["step"] += 1
                state["left"] += grad @ grad.T
                state["right"] += grad.T @ grad
                left, right = (_inverse_root(state[side]) for side in ("left", "right"))
                parameter.add_(left @ grad @ right, alpha=-group["lr"] / state["step"])


def _inverse_root(matrix):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.pow(-0.25)) @ vectors.T


class SOAP(torch.optim.Optimizer):
    """Adam in the eigenbasis of Shampoo's preconditioners, whose matrices are lists in the state (nikhilvyas/SOAP)."""

    def __init__(self, parameters, lr, betas=(0.9, 0.95), eps=1e-4, precondition_frequency=2):
        options = {"lr": lr, "betas": betas, "eps": eps, "precondition_frequency": precondition_frequency}
        super().__init__(parameters, options)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                grad, state = parameter.grad, self.state[parameter]
                if "step" not in state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
                    state["GG"] = [grad.new_zeros(size, size) if grad.dim() > 1 else [] for size in grad.shape]
                    state["Q"] = None
                    self.update_preconditioner(grad, state, group)
                    # As published, the first step only initializes the preconditioner.
                    continue
                beta1, beta2 = group["betas"]
                state["step"] += 1
                projected = self.project(grad, state)
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).add_(projected.square(), alpha=1 - beta2)
                update = self.project(state["exp_avg"], state) / (state["exp_avg_sq"].sqrt() + group["eps"])
                scale = (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
                parameter.add_(self.project(update, state, back=True), alpha=-group["lr"] * scale)
                self.update_preconditioner(grad, state, group)

    @staticmethod
    def project(tensor, state, back=False):
        for basis in state["Q"]:
            if len(basis):
                tensor = torch.tensordot(tensor, basis, dims=([0], [1 if back else 0]))
            else:
                tensor = tensor.movedim(0, -1)
        return tensor

    @staticmethod
    def update_preconditioner(grad, state, group):
        for dim, matrix in enumerate(state["GG"]):
            if len(matrix):
                other = [index for index in range(grad.dim()) if index != dim]
                matrix.lerp_(torch.tensordot(grad, grad, dims=(other, other)), 1 - group["betas"][1])
        if state["Q"] is None or state["step"] % group["precondition_frequency"] == 0:
            # Published with one small number on the diagonal. Different ones determine the eigenvectors also where the
            # gradient has a smaller rank; otherwise its round-off would.
            state["Q"] = [
                torch.linalg.eigh(matrix + torch.linspace(0.01, 0.02, len(matrix)).diag()).eigenvectors.flip(1)
                if len(matrix)
                else []
                for matrix in state["GG"]
            ]


def list_matrices(model: nn.Module) -> list[Tensor]:
    """Returns the parameters that Muon is meant for: matrices, of any shape, other than embeddings and the head."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
    ]


def list_others(model: nn.Module) -> list[Tensor]:
    """Returns the parameters, of any shape, that `list_matrices` leaves out."""
    matrices = {id(parameter) for parameter in list_matrices(model)}
    return [parameter for parameter in model.parameters() if id(parameter) not in matrices]


def _torch_muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Muon(list_matrices(model), lr=1e-2, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(list_others(model), lr=1e-3, eps=1e-4),
    ]


def _moonlight(model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = {"muon_params": list_matrices(model), "adamw_params": list_others(model)}
    return [MoonlightMuon(lr=1e-3, adamw_eps=1e-4, **parameters)]


def _keller(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = {"params": list_matrices(model), "use_muon": True, "weight_decay": 0.1}
    others = {"params": list_others(model), "use_muon": False, "lr": 1e-3, "eps": 1e-4}
    return [MuonWithAuxAdam([matrices, others])]


def _transformers_adafactor(model: nn.Module) -> list[torch.optim.Optimizer]:
    from transformers import Adafactor

    return [Adafactor(model.parameters(), scale_parameter=True, warmup_init=True)]


def _bitsandbytes_8bit(model: nn.Module) -> list[torch.optim.Optimizer]:
    import bitsandbytes

    return [bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-3, eps=1e-4, min_8bit_size=256)]


def _bitsandbytes(model: nn.Module) -> list[torch.optim.Optimizer]:
    import bitsandbytes

    return [bitsandbytes.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)]


def _torchao(model: nn.Module) -> list[torch.optim.Optimizer]:
    from torchao.optim import AdamW8bit

    return [AdamW8bit(model.parameters(), lr=1e-3, eps=1e-4)]


def _schedule_free(name: str, **options: Any) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        import schedulefree

        return [getattr(schedulefree, name)(model.parameters(), warmup_steps=2, **options)]

    return make


@dataclass(frozen=True)
class TableRow:
    """Row of the table: an optimizer, and what it does on every layout.

    Attributes:
        make: returns the optimizers of a model.
        description: first column.
        limit: largest relative error of the weights.
        layer_wise: whether users declare it with `prepare_optimizer(optimizer, layer_wise=True)`.
        raises: pattern of the error that `prepare_optimizer` raises on every layout.
        cure: what the table says to do instead.
        unsaved: pattern of the error of saving, if the state cannot resume on other layouts.
    """

    make: Callable[[nn.Module], Sequence[torch.optim.Optimizer]]
    description: str
    limit: float = LIMIT
    layer_wise: bool = False
    raises: str | None = None
    cure: str = ""
    unsaved: str | None = None


ROWS = {
    "AdamW": TableRow(lambda model: [torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)], "torch's AdamW"),
    "SGD": TableRow(
        lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)], "torch's SGD with momentum"
    ),
    "Adafactor": TableRow(lambda model: [torch.optim.Adafactor(model.parameters(), lr=1e-2)], "torch's Adafactor"),
    "Muon": TableRow(_torch_muon, "torch's Muon, with AdamW for the other parameters", ROUNDED_LIMIT),
    "MoonlightMuon": TableRow(_moonlight, "Moonlight's `Muon` (d)", ROUNDED_LIMIT, layer_wise=True),
    "MuonWithAuxAdam": TableRow(
        _keller, "Keller Jordan's `SingleDeviceMuonWithAuxAdam` (d)", ROUNDED_LIMIT, layer_wise=True
    ),
    "Shampoo": TableRow(
        lambda model: [Shampoo(model.parameters(), lr=1e-2)], "a Shampoo by matrix (d)", layer_wise=True
    ),
    "SOAP": TableRow(lambda model: [SOAP(model.parameters(), lr=1e-3)], "SOAP (d)", layer_wise=True),
    "transformers Adafactor": TableRow(_transformers_adafactor, "transformers' Adafactor"),
    "bitsandbytes AdamW": TableRow(_bitsandbytes, "bitsandbytes' AdamW"),
    "bitsandbytes AdamW8bit": TableRow(_bitsandbytes_8bit, "bitsandbytes' AdamW8bit", ROUNDED_LIMIT),
    "torchao AdamW8bit": TableRow(
        _torchao,
        "torchao's AdamW8bit",
        ROUNDED_LIMIT,
        cure="saving raises `CheckpointError`. Use bitsandbytes' AdamW8bit to save and resume 8-bit states.",
        unsaved=r"cannot be saved. Use bitsandbytes.optim.AdamW8bit to save and resume 8-bit states\.",
    ),
    "AdamWScheduleFree": TableRow(
        _schedule_free("AdamWScheduleFree", lr=1e-2, eps=1e-4), "schedulefree's AdamWScheduleFree"
    ),
    "SGDScheduleFree": TableRow(_schedule_free("SGDScheduleFree", lr=1.0), "schedulefree's SGDScheduleFree"),
    "LBFGS": TableRow(
        lambda model: [torch.optim.LBFGS(model.parameters())],
        "torch's LBFGS",
        raises="LBFGS is not supported",
        cure="`UnsupportedError`. Use an optimizer that steps without a closure, such as AdamW.",
    ),
}


def render_table() -> str:
    """Renders the rows as Markdown, then what to do where one raises."""
    lines = [f"| optimizer | {' | '.join(LAYOUTS)} | state resumes |", "|---" * (len(LAYOUTS) + 2) + "|"]
    for row in ROWS.values():
        cell = "raises" if row.raises else "=" if row.limit == LIMIT else "≈"
        resumes = "" if row.raises else "raises" if row.unsaved else "yes"
        lines.append(f"| {row.description} | {' | '.join([cell] * len(LAYOUTS))} | {resumes} |")
    cures = [f"- {row.description}: {row.cure}" for row in ROWS.values() if row.raises or row.unsaved]
    return "\n".join([*lines, "", *cures]) + "\n"
