"""Logits of megatron-core's BertModel with converted weights: `python -m tests.megatron_peer.bert HF OUT TP FOLDER...`.

HF is the folder of a transformers MegatronBertForPreTraining, FOLDER an iteration folder in `torch_dist` or in the
legacy format. OUT is a safetensors file with the logits per FOLDER, `0.head`, `0.binary_head` and so on, for the inputs
`ids`, `mask` and `types` in HF/inputs.safetensors.
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
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec  # noqa: E402
from megatron.core.models.bert.bert_model import BertModel  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from tests.megatron_peer.checkpoints import load, run_on_ranks  # noqa: E402
from tests.megatron_peer.models import ACTIVATIONS, ON_CPU  # noqa: E402

patch_megatron()
PADDED = 256


def build(hf) -> BertModel:
    config = TransformerConfig(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        layernorm_epsilon=hf.layer_norm_eps,
        activation_func=ACTIVATIONS[hf.hidden_act],
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        **ON_CPU,
    )
    return BertModel(
        config,
        num_tokentypes=hf.type_vocab_size,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=PADDED,
        max_sequence_length=hf.max_position_embeddings,
        share_embeddings_and_output_weights=True,
        parallel_output=False,
    ).eval()


def run(hf: str, out: str, folders: list[str]) -> None:
    inputs, outputs = load_file(Path(hf) / "inputs.safetensors"), {}
    for index, folder in enumerate(folders):
        model = build(AutoConfig.from_pretrained(hf))
        load(model, Path(folder))
        with torch.no_grad():
            head, binary_head = model(inputs["ids"], inputs["mask"], tokentype_ids=inputs["types"])[:2]
        outputs |= {f"{index}.head": head.contiguous(), f"{index}.binary_head": binary_head.contiguous()}
    if dist.get_rank() == 0:
        save_file(outputs, out)


if __name__ == "__main__":
    hf, out, layout, *folders = sys.argv[1:]
    run_on_ranks(run, layout, hf, out, folders)
