"""Small weights with Megatron-Core names, written to and read from the legacy checkpoint format."""

import itertools
from pathlib import Path

import torch

from hf_megatron.conversion.interfaces import WEIGHT, Key, MegatronModel, TargetOptions
from hf_megatron.conversion.megatron_legacy.reader import MegatronLegacyReader
from hf_megatron.conversion.megatron_legacy.writer import MegatronLegacyWriter
from hf_megatron.conversion.output_folder import Output
from hf_megatron.core.io.safetensors import TensorMeta

FILE = "model_optim_rng.pt"
FIRST = f"iter_0000007/mp_rank_00/{FILE}"
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
NORM = "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"


def model(layers: int = 4, tied: bool = False, **further) -> MegatronModel:
    arguments = {
        "num_layers": layers,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_query_groups": 1,
        "untie_embeddings_and_output_weights": not tied,
        "params_dtype": torch.bfloat16,
    }
    return MegatronModel({**arguments, **further}, gated=True)


def make_weights(
    layers: int = 4, tied: bool = False, experts: int = 4, latent: bool = False
) -> dict[Key, torch.Tensor]:
    """Returns random weights of mixed dtypes, with experts in every second layer."""
    h, f, vocabulary = 16, 8, 24
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (vocabulary, h)}
    for layer_idx in range(layers):
        layer = f"decoder.layers.{layer_idx}"
        attention, mlp = f"{layer}.self_attention", f"{layer}.mlp"
        if latent:
            shapes |= {
                f"{layer}.input_layernorm.weight": (h,),
                f"{attention}.linear_q_down_proj.weight": (8, h),
                f"{attention}.linear_q_up_proj.layer_norm_weight": (8,),
                f"{attention}.linear_q_up_proj.weight": (24, 8),
                f"{attention}.linear_kv_down_proj.weight": (12, h),
                f"{attention}.linear_kv_up_proj.layer_norm_weight": (8,),
                f"{attention}.linear_kv_up_proj.weight": (32, 8),
            }
        else:
            shapes |= {
                f"{attention}.linear_qkv.layer_norm_weight": (h,),
                f"{attention}.linear_qkv.layer_norm_bias": (h,),
                f"{attention}.linear_qkv.weight": (24, h),
                f"{attention}.linear_qkv.bias": (24,),
                f"{attention}.core_attention.softmax_offset": (4,),
            }
        shapes[f"{attention}.linear_proj.weight"] = (h, 16)
        shapes[f"{attention}.linear_proj.bias"] = (h,)
        if experts and layer_idx % 2:
            shapes |= {
                f"{layer}.pre_mlp_layernorm.weight": (h,),
                f"{mlp}.router.weight": (experts, h),
                f"{mlp}.experts.experts.linear_fc1.weight": (experts, 2 * f, h),
                f"{mlp}.experts.experts.linear_fc1.bias": (experts, 2 * f),
                f"{mlp}.experts.experts.linear_fc2.weight": (experts, h, f),
                f"{mlp}.experts.experts.linear_fc2.bias": (experts, h),
                f"{mlp}.shared_experts.linear_fc1.weight": (2 * f, h),
                f"{mlp}.shared_experts.linear_fc2.weight": (h, f),
                f"{mlp}.shared_experts.gate_weight": (1, h),
            }
        else:
            shapes |= {
                f"{mlp}.linear_fc1.layer_norm_weight": (h,),
                f"{mlp}.linear_fc1.weight": (2 * f, h),
                f"{mlp}.linear_fc2.weight": (h, f),
            }
    shapes["decoder.final_layernorm.weight"] = (h,)
    if not tied:
        shapes["output_layer.weight"] = (vocabulary, h)
    generator = torch.Generator().manual_seed(0)
    dtypes = itertools.cycle([torch.bfloat16, torch.float32, torch.float16])
    return {
        Key(WEIGHT, name): torch.randn(shape, generator=generator).to(next(dtypes)) for name, shape in shapes.items()
    }


def write_checkpoint(
    target: Path, tensors, of: MegatronModel, layout: TargetOptions | None = None, iteration: int | None = 7, **options
):
    plan = {key: TensorMeta.of(tensor) for key, tensor in tensors.items()}
    with Output(target) as output:
        writer = MegatronLegacyWriter(output, plan, of, layout or TargetOptions(), iteration, **options)
        for key, tensor in tensors.items():
            writer.write(key, tensor)
        writer.finish()


def read_checkpoint(source: Path, of: MegatronModel) -> dict[Key, torch.Tensor]:
    with MegatronLegacyReader(source, of) as reader:
        tensors = {key: reader.read(key) for key in reader.entries}
        assert {key: TensorMeta.of(tensor) for key, tensor in tensors.items()} == dict(reader.entries)
        return tensors


def check_equal(found, expected) -> None:
    assert list(found) == list(expected)
    assert [str(key) for key in found if not torch.equal(found[key], expected[key])] == []


def edit_rank_file(path: Path, edit) -> None:
    """Loads a rank's file with torch, applies `edit` to its content and saves it again."""
    content = torch.load(path, weights_only=False)
    edit(content)
    torch.save(content, path)


def set_value(path, value):
    """Returns an edit that sets the entry at `path` in nested dicts."""
    *parts, last = path

    def edit(content):
        for part in parts:
            content = content[part]
        content[last] = value

    return edit
