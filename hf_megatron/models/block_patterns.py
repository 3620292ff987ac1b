"""Recognition of attention and MLP blocks by the names and sizes of their linears in transformers models."""

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

_QUERY_KEY_VALUE = (
    *(("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("q_lin", "k_lin", "v_lin")),
    *(("query_proj", "key_proj", "value_proj"), ("linear_q", "linear_k", "linear_v"), ("wq", "wk", "wv")),
    *(("query_layer", "key_layer", "value_layer"), ("to_q", "to_k", "to_v")),
)
# One linear for query, key and value.
_FUSED = ("Wqkv", "qkv_proj", "query_key_value", "c_attn", "qkv")
# Output gate per head entry, projected like the query.
_GATES = ("g_proj", "gate_proj")
OUTPUT_LINEARS = ("o_proj", "out_proj", "dense", "o", "out_lin", "linear_out", "Wo", "wo", "out", "c_proj", "proj")
# Input linears of an MLP, and its output linear.
_MLP = (
    *((("gate_proj", "up_proj"), "down_proj"), (("up_proj",), "down_proj"), (("fc1",), "fc2"), (("lin1",), "lin2")),
    *((("wi_0", "wi_1"), "wo"), (("wi",), "wo"), (("w1", "w3"), "w2"), (("w1",), "w2"), (("c_fc",), "c_proj")),
    *((("linear1",), "linear2"), (("intermediate_dense",), "output_dense"), (("dense_h_to_4h",), "dense_4h_to_h")),
    *((("Wi",), "Wo"), (("gate_up_proj",), "down_proj"), (("dense_in",), "dense_out"), (("fc_in",), "fc_out")),
    *((("linear_1",), "linear_2"), (("c_fc_0", "c_fc_1"), "c_proj"), (("ffn",), "ffn_output")),
)
HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "num_query_heads", "heads")
KEY_VALUE_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_per_head")
_WIDTHS = ("all_head_size", "inner_dim", "embed_dim", "hidden_size", "dim", "d_model", "split_size", "embed_size")
# Attention score biases with one entry per head, computed once for all layers.
_BIASES_OF_HEADS = ("position_bias", "alibi")
# Cross-attention: names of modules, and forward arguments, whose keys and values come from other tokens.
_CROSS = re.compile(r"cross|enc", re.IGNORECASE)
_OF_OTHERS = ("key_value_states", "encoder_hidden_states")
# Relative position embeddings, which the query and key linears read as a second input.
_OF_POSITIONS = "rel_embeddings"
# Reshape with heads before the three blocks: query, key and value of each head are adjacent.
_HEADS_FIRST = re.compile(r"heads, (3\b|3 \*|self\.head_\w+ \* 3)")


@dataclass
class FoundBlocks:
    """Recognized blocks as spec entries, by module name."""

    plan: dict[str, str] = field(default_factory=dict)
    local_attributes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    regions: dict[str, str] = field(default_factory=dict)
    local_arguments: dict[str, tuple[str, ...]] = field(default_factory=dict)
    multi_input_blocks: list[str] = field(default_factory=list)
    # Parents of cross-attention modules whose output linear is in a sibling module.
    around_several: set[str] = field(default_factory=set)
    # Blocks and their output linears, which may be outside the block.
    blocks: set[str] = field(default_factory=set)


def find_blocks(model: nn.Module) -> FoundBlocks:
    """Recognizes the attention and MLP blocks of a model on any device, including meta."""
    structure, modules = FoundBlocks(), dict(model.named_modules())
    for name, module in modules.items():
        _attention(structure, name, module, modules)
    for name, module in modules.items():
        _mlp(structure, name, module)
    # A class that owns a bias table passes on the bias of the local heads only, so the argument is not sliced again.
    owners = [name.rpartition(".")[0] for name, part in modules.items() if isinstance(part, nn.Embedding)]
    tables = {type(modules[name]) for name in owners}
    for name in [name for name in structure.local_arguments if type(modules[name]) in tables]:
        del structure.local_arguments[name]
    return structure


def _linear(module: nn.Module, name: str) -> Any | None:
    """Returns a submodule if it is a plain `nn.Linear` or `Conv1D`, else `None`."""
    try:
        submodule = module.get_submodule(name)
    except AttributeError:
        return None
    return submodule if type(submodule) is nn.Linear or type(submodule).__name__ == "Conv1D" else None


def get_widths(module: nn.Module) -> tuple[int, int] | None:
    """Returns the input and output widths of an `nn.Linear` or transformers' `Conv1D`, `None` for other modules."""
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        return _width_in(module), _width_out(module)
    return None


def _width_in(linear: Any) -> int:
    return int(linear.in_features if isinstance(linear, nn.Linear) else linear.weight.shape[0])


def _width_out(linear: Any) -> int:
    return int(linear.out_features if isinstance(linear, nn.Linear) else linear.nf)


def _attention(structure: FoundBlocks, name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    columns, styles, is_fused = _projections(module)
    if not columns:
        return
    width = _width_out(columns[0]) // (3 if is_fused else 1)
    row = next((n for n in OUTPUT_LINEARS if (of := _linear(module, n)) is not None and _width_in(of) == width), None)
    full_row = f"{name}.{row}" if row is not None else _sibling_row_linear(name, width, modules)
    heads, size = _count(module, HEAD_COUNTS), _count(module, _HEAD_SIZES)
    if full_row is None or not (heads or size) or (heads and width % heads):
        return
    size = size or width // (heads or 1)
    known = set(styles) | {row}
    if module._parameters or not _fits(module, known, {width} - {size}):
        return
    if not is_fused and _shapes_by_width(type(module)):
        # The forward derives its output width from its input, so heads cannot be sharded; shard the weights only.
        structure.plan |= {f"{name}.{child}": "colwise_gather_output" for child in styles} | {
            full_row: "rowwise_split_input"
        }
        return
    structure.plan |= {f"{name}.{child}": style for child, style in styles.items()} | {full_row: "rowwise"}
    for child, other in module.named_children():
        if child in known:
            continue
        if isinstance(other, nn.Embedding) and other.embedding_dim == width // size:
            structure.plan[f"{name}.{child}.weight"] = "shard_dim_-1"
        elif next(other.parameters(), None) is not None:
            structure.plan[f"{name}.{child}"] = "replicated_with_grad_allreduce"
    counts = {count for count in (width // size, _count(module, KEY_VALUE_HEAD_COUNTS)) if count}
    read = _attributes_read(type(module))
    local = [
        key
        for key, value in vars(module).items()
        if key in read
        and (key in (*HEAD_COUNTS, *KEY_VALUE_HEAD_COUNTS) and value in counts or key in _WIDTHS and value == width)
    ]
    # Head counts that the forward reads from the config instead of its own attributes.
    local += [
        f"config.{key}"
        for key in sorted(_attributes_read(type(module), owner="config") & {*HEAD_COUNTS, *KEY_VALUE_HEAD_COUNTS})
        if getattr(module.config, key, None) in counts
    ]
    if local:
        structure.local_attributes[name] = tuple(local)
    arguments = inspect.signature(type(module).forward).parameters
    biases = tuple(argument for argument in _BIASES_OF_HEADS if argument in arguments)
    if biases:
        structure.local_arguments[name] = biases
    if _OF_POSITIONS in arguments:
        # With the relative embeddings as second input, the block and its containers need the full sequence.
        structure.multi_input_blocks.append(name)
        if "pos_dropout" in module._modules:
            structure.plan[f"{name}.pos_dropout"] = "synced_dropout"
        return
    structure.blocks |= {name, full_row}
    if row is None:
        structure.regions[name] = full_row
    elif any(isinstance(child, nn.Embedding) for child in module.children()):
        # A position table does not read the block's input, so the region is listed explicitly.
        structure.regions[name] = full_row
    role = name.rpartition(".")[2] if row else name.split(".")[-2]
    if _CROSS.search(role) and not arguments.keys().isdisjoint(_OF_OTHERS):
        structure.multi_input_blocks.append(name)
        structure.regions.pop(name, None)
        structure.around_several |= set() if row else {name.rpartition(".")[0]}


def _projections(module: nn.Module) -> tuple[list[Any], dict[str, str], bool]:
    """Returns the input linears of an attention, their styles, and whether one linear computes query, key and value."""
    for names in _QUERY_KEY_VALUE:
        linears = [_linear(module, name) for name in names]
        if all(linear is not None for linear in linears):
            gates = [name for name in _GATES if _linear(module, name) is not None]
            gates = [name for name in gates if _width_out(_linear(module, name)) == _width_out(linears[0])]
            return linears, dict.fromkeys((*names, *gates), "colwise"), False
    for name in _FUSED:
        linear = _linear(module, name)
        if linear is not None and _width_out(linear) == 3 * _width_in(linear):
            source = inspect.getsource(type(module))
            return [linear], {name: "colwise" if _HEADS_FIRST.search(source) else "fused_qkv"}, True
    return [], {}, False


def _sibling_row_linear(name: str, width: int, modules: Mapping[str, nn.Module]) -> str | None:
    """Returns the name of the output linear of a BERT-style attention `self`, which is in its sibling `output`."""
    parent, _, last_name = name.rpartition(".")
    row = f"{parent}.output.dense"
    is_there = last_name == "self" and type(modules.get(row)) is nn.Linear and _width_in(modules[row]) == width
    return row if is_there else None


def _fits(module: nn.Module, known: set[str | None], wide: set[int]) -> bool:
    """Returns whether all other children with parameters are per-head norms or embeddings."""
    for name, child in module.named_children():
        sizes = [tuple(parameter.shape) for parameter in child.parameters()]
        if name in known or not sizes:
            continue
        is_norm = all(len(size) == 1 for size in sizes) and not any(size[0] in wide for size in sizes)
        if not is_norm and not isinstance(child, nn.Embedding):
            return False
    return True


def _mlp(structure: FoundBlocks, name: str, module: nn.Module) -> None:
    prefix = f"{name}." if name else ""
    if not name or any(f"{prefix}{child}" in structure.plan for child in ("self", "intermediate.dense")):
        return
    pairs = [*_MLP, (("intermediate.dense",), "output.dense")]
    for firsts, last in pairs:
        linears, row = [_linear(module, first) for first in firsts], _linear(module, last)
        if row is None or any(linear is None for linear in linears) or prefix + last in structure.plan:
            continue
        wide, narrow = _width_in(row), _width_out(row)
        if any(_width_in(linear) != narrow for linear in linears):
            continue
        if _width_out(linears[0]) == wide:
            style = "colwise"
        elif len(firsts) == 1 and _width_out(linears[0]) == 2 * wide:
            style = "packed_colwise"
        else:
            continue
        if _has_norm_width(module, wide) and wide != narrow:
            continue
        structure.plan |= {prefix + first: style for first in firsts} | {prefix + last: "rowwise"}
        # The linears may be children of the layer next to its norms, or be in separate modules; both need a region.
        others = [
            child
            for child_name, child in module.named_children()
            if child_name not in (*firsts, last) and next(child.parameters(), None) is not None
        ]
        if "." in last:
            owner = firsts[0].rpartition(".")[0]
            # If the module has a norm too, that reads the input first: the block is then the linear alone.
            parts = [
                part for part in module.get_submodule(owner).children() if next(part.parameters(), None) is not None
            ]
            block = prefix + (owner if len(parts) == 1 else firsts[0])
            structure.regions[block] = prefix + last
            structure.blocks |= {block, prefix + last}
        elif others and len(firsts) == 1:
            structure.regions[prefix + firsts[0]] = prefix + last
            structure.blocks |= {prefix + firsts[0], prefix + last}
        else:
            structure.blocks |= {name}
        return


def _has_norm_width(module: nn.Module, width: int) -> bool:
    return any(
        [tuple(parameter.shape) for parameter in child.parameters()][:1] == [(width,)]
        for child in module.children()
        if type(child) is not nn.Linear
    )


def _count(module: nn.Module, names: tuple[str, ...]) -> int | None:
    values = (vars(module).get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value), None)


def _shapes_by_width(cls: type) -> bool:
    """Returns whether a forward reshapes its output to the width that it unpacked from its input's shape."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))  # type: ignore[attr-defined]
    widths: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(targets := node.targets[0], ast.Tuple):
            read = node.value.func if isinstance(node.value, ast.Call) else node.value
            if isinstance(read, ast.Attribute) and read.attr in ("size", "shape") and len(targets.elts) == 3:
                widths |= {last.id for last in targets.elts[2:] if isinstance(last, ast.Name)}
    shaped = (
        node.args[-1]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
        if node.func.attr in ("reshape", "view")
    )
    return any(isinstance(last, ast.Name) and last.id in widths for last in shaped)


def _attributes_read(cls: type, owner: str | None = None) -> set[str]:
    """Returns the attributes of `self`, or of `self.<owner>`, that a class reads outside its constructor."""

    def matches_owner(node: ast.expr) -> bool:
        if owner is not None:
            return isinstance(node, ast.Attribute) and node.attr == owner and _is_self(node.value)
        return _is_self(node)

    read: set[str] = set()
    for base in cls.__mro__:
        if base is nn.Module:
            break
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
        read |= {
            node.attr
            for function in functions
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute) and matches_owner(node.value)
        }
    return read


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
