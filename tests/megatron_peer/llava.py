"""Logits of megatron-core's LLaVAModel with converted weights: `python -m tests.megatron_peer.llava HF OUT TP
FOLDER...`.

HF is the folder of a transformers LlavaForConditionalGeneration, FOLDER an iteration folder in `torch_dist`. OUT is a
safetensors file with the logits per FOLDER, `0`, `1` and so on, for the inputs `ids`, with a single image token per
image, and `pixels` in HF/inputs.safetensors.
"""

import functools
import os
import sys
import tempfile
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# Compiling the activations, which are wrapped in torch.compile, would dominate the run time.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from tests.megatron_peer.patches import patch_megatron, patch_torch  # noqa: E402

patch_torch()
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.fusions.fused_bias_geglu import quick_gelu  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.multimodal.llava_model import LLaVAModel  # noqa: E402
from megatron.core.models.vision import clip_vit_model  # noqa: E402
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.mlp import MLPSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from tests.megatron_peer.models import ON_CPU, te_keys  # noqa: E402

patch_megatron()
PADDED = 256


class _Norm(torch.nn.LayerNorm):
    """LayerNorm before CLIP's layers, with the constructor arguments of TransformerEngine's norm."""

    def __init__(self, config, hidden_size, eps):
        super().__init__(hidden_size, eps)


def build(hf, tp: int) -> LLaVAModel:
    text, vision = hf.text_config, hf.vision_config
    make = functools.partial(
        TransformerConfig,
        tensor_model_parallel_size=tp,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        **ON_CPU,
    )
    language = make(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        ffn_hidden_size=text.intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        layernorm_epsilon=text.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
    )
    encoder_config = make(
        num_layers=vision.num_hidden_layers,
        hidden_size=vision.hidden_size,
        ffn_hidden_size=vision.intermediate_size,
        num_attention_heads=vision.num_attention_heads,
        layernorm_epsilon=vision.layer_norm_eps,
        activation_func=quick_gelu,
        normalization="LayerNorm",
    )
    encoder_config.vision_model_type = "clip"
    projector = make(
        num_layers=1,
        hidden_size=text.hidden_size,
        ffn_hidden_size=text.hidden_size,
        num_attention_heads=text.num_attention_heads,
        activation_func=torch.nn.functional.gelu,
    )
    language_spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    encoder_spec = get_vit_layer_with_local_spec()
    # The local spec is causal, unlike the TransformerEngine spec, which models are trained with.
    encoder_spec.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.no_mask}
    for spec in (language_spec, encoder_spec):
        attention = spec.submodules.self_attention.submodules
        spec.submodules.sharded_state_dict_keys_map = te_keys(False, moe=False, attention=attention)
    # Patched in place, since default arguments are bound when the class is defined.
    clip_vit_model.CLIPViTModel.__init__.__defaults__ = tuple(
        _Norm if default is torch.nn.LayerNorm else default
        for default in clip_vit_model.CLIPViTModel.__init__.__defaults__
    )
    return LLaVAModel(
        language_transformer_config=language,
        language_transformer_layer_spec=language_spec,
        language_vocab_size=PADDED,
        language_max_sequence_length=text.max_position_embeddings,
        vision_transformer_config=encoder_config,
        vision_transformer_layer_spec=encoder_spec,
        drop_vision_class_token=hf.vision_feature_select_strategy == "default",
        vision_projection_config=projector,
        vision_projection_layer_spec=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        parallel_output=False,
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        language_position_embedding_type="rope",
        language_rotary_base=text.rope_parameters["rope_theta"],
        img_h=vision.image_size,
        img_w=vision.image_size,
        patch_dim=vision.patch_size,
        image_token_index=hf.image_token_id,
    ).eval()


def load(model: LLaVAModel, folder: Path) -> None:
    """Loads strictly: missing or unexpected keys raise."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sharded = model.sharded_state_dict(metadata={"dp_cp_group": group})
    state = dist_checkpointing.load({"model": sharded}, str(folder))["model"]
    model.load_state_dict(state, strict=True)


def run(rank: int, store: str, hf: str, out: str, tp: int, folders: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tp)
    parallel_state.initialize_model_parallel(tp)
    model_parallel_cuda_manual_seed(0)
    inputs, outputs = load_file(Path(hf) / "inputs.safetensors"), {}
    for index, folder in enumerate(folders):
        model = build(AutoConfig.from_pretrained(hf), tp)
        load(model, Path(folder))
        positions = torch.arange(inputs["ids"].shape[1])[None]
        with torch.no_grad():
            logits = model(inputs["pixels"], inputs["ids"], positions, None)[0]
        outputs[str(index)] = logits.contiguous()
    if rank == 0:
        save_file(outputs, out)
    dist.destroy_process_group()


def main() -> None:
    hf, out, tp, *folders = sys.argv[1:]
    with tempfile.TemporaryDirectory() as root:
        arguments = (str(Path(root) / "store"), hf, out, int(tp), folders)
        torch.multiprocessing.spawn(run, arguments, nprocs=int(tp))


if __name__ == "__main__":
    main()
