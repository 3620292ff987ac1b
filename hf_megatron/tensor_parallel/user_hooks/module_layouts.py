"""Layout over the tp ranks of each module's inputs and outputs, as far as its position and style determine it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from ...compat.shared import Shared
from ...compat.transformers_models import computes_own_attention, fetches_attention_core
from ...core.placement import ParameterSharding
from ..install_regions import Regions
from ..region import SequenceStack, UniformRegion
from ..structure import Structure
from ..styles import style
from .tensor_layouts import WHOLE, Addends, Columns, Form, Heads, InsideMLP, Logits, Tokens

_ADDENDS = ("partial_sum", "moe_inner_sum")
_SUMS = (*_ADDENDS, "all_reduce")


@dataclass(frozen=True)
class Forms:
    """Layouts of one module's hidden states, or the reason why they are unknown.

    Attributes:
        given: in the caller's arguments.
        inside: in the module's forward.
        returned: in the output that the caller gets.
        maps (*optional*): of further outputs with four dims, such as attention maps.
    """

    given: Form | str
    inside: Form | str
    returned: Form | str
    maps: Form | None = None

    @property
    def is_replicated(self) -> bool:
        """Whether the module takes and returns full tensors; a head's logits are gathered when they are read."""
        return self.given is WHOLE and (self.returned is WHOLE or isinstance(self.returned, Logits))


class Activations(Shared):
    """Layouts of a model's modules, by name."""

    def __init__(
        self,
        structure: Structure,
        styles: Mapping[str, str],
        shardings: Mapping[str, ParameterSharding],
        regions: Regions,
        kinds: Mapping[str, type],
    ):
        self.structure, self.styles, self.shardings, self.regions = structure, styles, shardings, regions
        self.group = regions.group
        self.attention = {name for name, kind in kinds.items() if _is_attention(kind)}
        self.split_blocks = {block for block in structure.unsharded if self._has(block, "splits")}
        rows = {name.rpartition(".")[0] for name, of in styles.items() if style(of).is_row}
        self.with_parts = {*regions.stacks} | {*structure.uniform, *self.split_blocks, *rows}

    def of(self, name: str, module: nn.Module) -> Forms:
        """Returns the layouts of a module that existed when the model was parallelized."""
        # The first and last layer of a stack are called with, or return, full sequences.
        forms = self._of(name, module)
        has_maps = any(_is_attention(type(part)) for part in module.modules()) and self._has(name, "is_column")
        ends = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
        starts = [getattr(hook, "__self__", None) for hook in module._forward_hooks.values()]
        return Forms(
            WHOLE if any(isinstance(end, SequenceStack) for end in ends) else forms.given,
            forms.inside,
            WHOLE if any(isinstance(start, SequenceStack) for start in starts) else forms.returned,
            Heads(self.group) if has_maps else None,
        )

    def see_parts(self, name: str) -> bool:
        """Returns whether functions of a module may be called with shards of tensors."""
        is_block = name in self.with_parts and name not in self.regions.stacks
        return is_block or self._within(name, self.with_parts) is not None

    def _of(self, name: str, module: nn.Module) -> Forms:
        style_name, outer = self.styles.get(name, "replicated"), self._outer(name)
        rules, region = style(style_name), self.regions.of_linear.get(name)
        if self._within(name, [other for other, of in self.styles.items() if of in _SUMS]):
            return unknown("experts are sharded along their width and return partial sums")
        if self._within(name, [other for other, of in self.styles.items() if of == "expert_parallel"]):
            return unknown("experts receive tokens of all expert-parallel ranks")
        # The caller's tokens go in and come back: dispatch happens inside.
        if style_name == "expert_parallel":
            return Forms(outer, outer, outer)
        if style_name == "vocab_parallel_head":
            return Forms(WHOLE, WHOLE, Logits())
        if rules.is_column:
            # Input [..., in] replicated with partial gradients; output [..., out / tp].
            before = WHOLE if region is None else Addends(self.group)
            return Forms(before, before, self._columns(name))
        if rules.is_row:
            # Input [..., in / tp]; output reduced, or reduce-scattered along the sequence.
            before = self._width(name)
            return Forms(before, before, self._trailing(region))
        if style_name == "mla_kv_a_proj":
            return Forms(outer, outer, "only this rank's heads read a part of its output")
        if style_name in _SUMS:
            return Forms(outer, Addends(self.group) if style_name in _ADDENDS else outer, outer)
        if style_name in ("colwise_gather_output", "rowwise_split_input") or (
            rules.splits and isinstance(module, nn.Embedding)
        ):
            return Forms(outer, outer, outer)
        if block := self._within(name, self.structure.uniform):
            return self._inside(name, block, module)
        if not self._has(name, "splits"):
            return self._replicated(name, module, outer)
        if name in self.structure.uniform:
            row = self.structure.uniform[name]
            inside = row.startswith(f"{name}.")
            return Forms(outer, Addends(self.group), outer if inside else self._width(row))
        if self._ends_what_it_splits(name):
            return Forms(outer, WHOLE if name in self.regions.unsharded else outer, outer)
        return unknown("its weights are sharded, and the layout of its activations is unknown")

    def _inside(self, name: str, block: str, module: nn.Module) -> Forms:
        if block in self.attention or any(True for _ in module.parameters()):
            return unknown(f"it receives only this rank's heads or features of {block}")
        row = self.structure.uniform[block]
        form = InsideMLP(self.regions.uniform[block], self._width(row), self._trailing(self.regions.uniform[block]))
        return Forms(form, form, form)

    def _replicated(self, name: str, module: nn.Module, outer: Form) -> Forms:
        shardings = [self.shardings[f"{name}.{parameter}"] for parameter, _ in module.named_parameters()]
        if not shardings and (block := self._within(name, self.split_blocks)):
            return unknown(f"it may receive shards of tensors inside {block}")
        # A gradient that is summed over tp implies local heads, features or tokens.
        partial = [sharding.gradient.sum is not None for sharding in shardings]
        if any(partial) and (not outer.is_split or any(style(c.style).works_on_heads for c in shardings)):
            return unknown("it receives only this rank's heads, features or tokens")
        return Forms(outer, outer, outer)

    def _outer(self, name: str) -> Form:
        stack = self._within(name, self.regions.stacks)
        if stack is None or self._within(name, (*self.structure.unsharded, *self.structure.stack_of)):
            return WHOLE
        return Tokens(self.regions.stacks[stack])

    def _columns(self, name: str) -> Form | str:
        sharding = self.shardings[f"{name}.weight"]
        [split] = sharding.placement.splits
        if split.copies > 1:
            return "several ranks have the same key and value heads, each with a partial gradient"
        return Columns(sharding.shape[split.dim], self.group, split.groups)

    def _width(self, row: str) -> Columns:
        sharding = self.shardings[f"{row}.weight"]
        return Columns(sharding.shape[sharding.placement.splits[0].dim], self.group)

    def _trailing(self, region: UniformRegion | None) -> Form:
        return WHOLE if region is None or region.stack is None else Tokens(region.stack)

    def _within(self, name: str, others: Iterable[str]) -> str | None:
        return next((other for other in others if name.startswith(f"{other}.")), None)

    def _has(self, name: str, what: str) -> bool:
        inside = (of for other, of in self.styles.items() if f"{other}.".startswith(f"{name}."))
        return any(getattr(style(of), what) for of in inside)

    def _ends_what_it_splits(self, name: str) -> bool:
        """Returns whether a block contains both linears that split its tensors and ones that reduce or gather them."""
        inside = {of for other, of in self.styles.items() if other.startswith(f"{name}.")}
        splits = any(style(of).is_column or of == "colwise_gather_output" for of in inside)
        joins = any(style(of).is_row or of == "rowwise_split_input" for of in inside)
        return (splits and joins) or not inside.isdisjoint((*_SUMS, "expert_parallel"))


def unknown(reason: str) -> Forms:
    """Returns layouts that are unknown, for a reason."""
    return Forms(reason, reason, reason)


def _is_attention(kind: type) -> bool:
    return fetches_attention_core(kind) or computes_own_attention(kind)
