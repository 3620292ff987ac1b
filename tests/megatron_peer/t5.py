"""Logits of megatron-core's T5Model with converted weights: `python -m tests.megatron_peer.t5 HF OUT TP FOLDER...`.

HF is the folder of a transformers T5 1.1 or mT5, FOLDER an iteration folder in `torch_dist` or in the legacy format
with local names. OUT is a safetensors file with the logits per FOLDER, `0` and so on, for the inputs `ids`, `mask` and
`decoder_ids` in HF/inputs.safetensors. megatron-core saves the last model again, into OUT-core and OUT-legacy.
"""

import os
import sys
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
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.T5 import t5_spec  # noqa: E402
from megatron.core.models.T5.t5_model import T5Model  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from tests.megatron_peer.checkpoints import load, run_on_ranks, save  # noqa: E402
from tests.megatron_peer.models import ACTIVATIONS, ON_CPU, RMSNorm  # noqa: E402

patch_megatron()
PADDED = 256


class BiasedAttention(DotProductAttention):
    """Attention with a score bias, as in TransformerEngine's attention; masked entries are True."""

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, **unused):
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.softmax_scale
        scores = scores if attention_bias is None else scores + attention_bias
        if (attn_mask_type or self.attn_mask_type) == AttnMaskType.causal:
            attention_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(attention_mask, float("-inf")).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


def build(hf) -> T5Model:
    def config(layers: int) -> TransformerConfig:
        return TransformerConfig(
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            num_layers=layers,
            hidden_size=hf.d_model,
            ffn_hidden_size=hf.d_ff,
            num_attention_heads=hf.num_heads,
            kv_channels=hf.d_kv,
            softmax_scale=1.0,
            normalization="RMSNorm",
            layernorm_epsilon=hf.layer_norm_epsilon,
            gated_linear_unit=True,
            activation_func=ACTIVATIONS[hf.dense_act_fn],
            add_bias_linear=False,
            params_dtype=torch.float32,
            pipeline_dtype=torch.float32,
            **ON_CPU,
        )

    def block(layer, layers: int) -> TransformerBlockSubmodules:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        parts.self_attention.submodules.core_attention = BiasedAttention
        if hasattr(parts.cross_attention, "submodules"):
            parts.pre_cross_attn_layernorm = RMSNorm
            parts.cross_attention.submodules.core_attention = BiasedAttention
        return TransformerBlockSubmodules([layer] * layers, layer_norm=RMSNorm)

    return T5Model(
        config(hf.num_decoder_layers),
        config(hf.num_layers),
        block(t5_spec.encoder_model_with_local_spec(), hf.num_layers),
        block(t5_spec.decoder_model_with_local_spec(), hf.num_decoder_layers),
        vocab_size=PADDED,
        max_sequence_length=64,
        position_embedding_type="relative",
        relative_attention_num_buckets=hf.relative_attention_num_buckets,
        relative_attention_max_distance=hf.relative_attention_max_distance,
        share_embeddings_and_output_weights=False,
        parallel_output=False,
    ).eval()


def run(hf: str, out: str, folders: list[str]) -> None:
    inputs, outputs = load_file(Path(hf) / "inputs.safetensors"), {}
    hidden = inputs["mask"][:, None, None, :] == 0
    for index, folder in enumerate(folders):
        model = build(AutoConfig.from_pretrained(hf))
        load(model, Path(folder))
        with torch.no_grad():
            outputs[str(index)] = model(inputs["ids"], inputs["decoder_ids"], hidden, None, hidden).contiguous()
    save(model, Path(f"{out}-core"), Path(f"{out}-legacy"))
    if dist.get_rank() == 0:
        save_file(outputs, out)


if __name__ == "__main__":
    hf, out, layout, *folders = sys.argv[1:]
    run_on_ranks(run, layout, hf, out, folders)
