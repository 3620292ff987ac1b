"""Tests of loading weights by slices, saving merged files, and the errors raised for invalid inputs."""

import dataclasses
import json
import logging
import os
import shutil

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_megatron import CheckpointError, ConfigError, MegatronConfig, UnsupportedError
from hf_megatron.checkpoint.gather_full import full_state_dict
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.parallelize import local_numel
from tests.helpers.shared_tiny_models import make_tiny_model

TP2 = MegatronConfig(tp_size=2)
LAYOUTS = [TP2, MegatronConfig(tp_size=2, sequence_parallel=True), MegatronConfig(tp_size=8)]


def save(source, target, config, **kwargs):
    AutoModelForCausalLM.from_pretrained(source, megatron_config=config).save_pretrained(target, **kwargs)


@pytest.mark.parametrize("config", LAYOUTS, ids=lambda config: config.layout())
def test_merged_save_is_bit_equal(stories, tmp_path, config):
    run_ranks(save, config.tp_size, stories, tmp_path, config)
    saved, original = load_file(tmp_path / "model.safetensors"), load_file(stories / "model.safetensors")
    assert saved.keys() == original.keys(), "tied weights are written once"
    assert all(torch.equal(saved[name], original[name]) for name in original)
    assert "distributed_config" not in json.loads((tmp_path / "config.json").read_text())
    assert (tmp_path / "generation_config.json").exists()
    assert LlamaForCausalLM.from_pretrained(tmp_path).num_parameters() == 260_032


def test_error_names_misshaped_weight(stories, tmp_path):
    folder = tmp_path / "mis-shaped"
    shutil.copytree(stories, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    def on_rank():
        with pytest.raises(CheckpointError, match=r"1 mis-shaped \(model.norm.weight: file \(7,\), model"):
            AutoModelForCausalLM.from_pretrained(folder, megatron_config=TP2)

    run_ranks(on_rank, 2)


def _save_with_shared_mlp(source, target, config):
    model = AutoModelForCausalLM.from_pretrained(source, megatron_config=config)
    # On a pipeline, layers of the last stage.
    first, second = [layer for layer in model.model.layers if isinstance(layer, torch.nn.Module)][-2:]
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight share one weight, but LlamaForCausalLM does not"):
        model.save_pretrained(target)
    return not target.exists()


@pytest.mark.parametrize("config", [TP2, MegatronConfig(dp_size=2, zero_stage=1)], ids=MegatronConfig.layout)
def test_save_rejects_user_shared_weights(stories, tmp_path, config):
    """Stock transformers also refuses to save them: a reload would initialize the missing weight randomly."""
    stock = AutoModelForCausalLM.from_pretrained(stories)
    stock.model.layers[1].mlp.up_proj.weight = stock.model.layers[0].mlp.up_proj.weight
    with pytest.raises(RuntimeError, match="shared tensors"):
        stock.save_pretrained(tmp_path / "stock")
    assert all(run_ranks(_save_with_shared_mlp, 2, stories, tmp_path / "ours", config))


def sum_shards_after_truncation(path):
    """Returns sum and offset of each local shard after truncating the loaded file: a memory map would raise SIGBUS."""
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=TP2)
    torch.distributed.barrier()
    os.truncate(path / "model.safetensors", 0)
    return {name: (p.to_local().sum().item(), p.to_local().storage_offset()) for name, p in model.named_parameters()}


def test_loaded_model_does_not_map_its_file(tmp_path):
    config = LlamaConfig(hidden_size=1024, intermediate_size=2048, num_hidden_layers=1, vocab_size=1024)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    totals = {name: tensor.double().sum().item() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    ranks = run_ranks(sum_shards_after_truncation, 2, tmp_path)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        sums, offsets = zip(*(rank[name] for rank in ranks), strict=True)
        assert sum(sums) == pytest.approx(totals[name], rel=1e-3, abs=1e-2)
        assert offsets == (0, 0)


def test_multi_file_merged_save_replaces_earlier_save(stories, tmp_path):
    run_ranks(save, 2, stories, tmp_path, TP2, max_shard_size="300KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    original = AutoModelForCausalLM.from_pretrained(stories).state_dict()
    assert not info["missing_keys"]
    assert all(torch.equal(tensor, original[name]) for name, tensor in model.state_dict().items())
    # A folder of several files is also read by slices.
    run_ranks(save, 2, tmp_path, tmp_path / "again", TP2)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == original.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, original[name]) for name, tensor in again.items())
    run_ranks(save, 2, stories, tmp_path, TP2)
    assert not list(tmp_path.glob("model-*")) and not (tmp_path / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_neox", "phi3", "deepseek_v3"])
def test_weight_conversions_are_reverted_on_save(tmp_path, model_type):
    """Fused experts are saved as per-expert weights."""
    tiny_model = make_tiny_model(CONFIG_MAPPING[model_type]())
    run_ranks(save, 2, tiny_model.directory, tmp_path, TP2)
    saved, original = load_file(tmp_path / "model.safetensors"), load_file(tiny_model.directory / "model.safetensors")
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in original)


def test_from_pretrained_accepts_config_dict_and_yaml(stories, tmp_path):
    file = tmp_path / "megatron.yaml"
    file.write_text("tp_size: 2\n")

    def load():
        classes = (AutoModelForCausalLM, LlamaForCausalLM)
        models = [
            c.from_pretrained(stories, megatron_config=v) for c in classes for v in (TP2, {"tp_size": 2}, str(file))
        ]
        return [local_numel(model) for model in models], [model.num_parameters() for model in models]

    for local, unsharded in run_ranks(load, 2):
        assert len(set(local)) == 1 and local[0] < 0.52 * 260_032
        assert set(unsharded) == {260_032}


def test_bin_files_load_and_unsafe_pickles_raise(stories, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(stories)
    shutil.copy(stories / "config.json", tmp_path)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    run_ranks(save, 2, tmp_path, tmp_path / "out", TP2)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"x": Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"CheckpointError: .*pytorch_model\.bin.*mkdir"):
        run_ranks(save, 2, tmp_path, tmp_path / "out2", TP2)
    assert not (tmp_path / "executed").exists()

    # Each value holds the previous one twice: a naive walk takes exponential time.
    pile: list = []
    for _ in range(64):
        pile = [pile, pile]
    torch.save({"x": tuple(map(tuple, pile))}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"CheckpointError: .*pytorch_model\.bin"):
        run_ranks(save, 2, tmp_path, tmp_path / "out3", TP2)


def corrupt_copy(stories, target, change):
    shutil.copytree(stories, target)
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.layers.2.mlp.up_proj.weight"), ["1 missing", "layers.2.mlp.up_proj.weight"]),
        (lambda w: w.update(surplus=torch.zeros(3)), ["1 unexpected", "surplus"]),
    ],
)
def test_missing_or_unexpected_weights_raise(stories, tmp_path, change, words):
    path = corrupt_copy(stories, tmp_path / "corrupt_copy", change)

    def load():
        with pytest.raises(CheckpointError) as error:
            AutoModelForCausalLM.from_pretrained(path, megatron_config=TP2)
        assert all(word in str(error.value) for word in [*words, "strict_loading"])
        AutoModelForCausalLM.from_pretrained(path, megatron_config=MegatronConfig(tp_size=2, strict_loading=False))

    run_ranks(load, 2)


def test_mis_shaped_weights_raise(stories, tmp_path):
    path = corrupt_copy(
        stories,
        tmp_path / "corrupt_copy",
        lambda w: w.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(100, 64)}),
    )

    def load():
        with pytest.raises(CheckpointError, match="up_proj.*ignore_mismatched_sizes"):
            AutoModelForCausalLM.from_pretrained(path, megatron_config=TP2)

    run_ranks(load, 2)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/outside.safetensors"])
def test_index_outside_the_directory_is_rejected(stories, tmp_path, shard):
    shutil.copy(stories / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))

    def load():
        with pytest.raises(CheckpointError, match="outside"):
            AutoModelForCausalLM.from_pretrained(tmp_path, megatron_config=TP2)

    run_ranks(load, 2)


@pytest.mark.parametrize(
    "kwargs",
    [{"device_map": "auto"}, {"tp_plan": "auto"}, {"quantization_config": {"quant_method": "x"}}, {"tp_size": 2}],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_other_parallelism_arguments_are_rejected(stories, kwargs):
    def load():
        with pytest.raises((UnsupportedError, ConfigError), match=next(iter(kwargs))):
            AutoModelForCausalLM.from_pretrained(stories, megatron_config=TP2, **kwargs)

    run_ranks(load, 2)


def test_distributed_config_is_rejected(stories):
    from transformers.distributed import DistributedConfig

    def load():
        with pytest.raises(UnsupportedError, match="distributed_config"):
            AutoModelForCausalLM.from_pretrained(
                stories, megatron_config=TP2, distributed_config=DistributedConfig(tp_size=2)
            )

    run_ranks(load, 2)


def test_error_names_config_field_that_differs_by_rank(stories):
    import torch.distributed as dist

    def load():
        with pytest.raises(ConfigError, match=r"MegatronConfig.seed: rank 0: 0, rank 1: 1"):
            AutoModelForCausalLM.from_pretrained(
                stories, megatron_config=MegatronConfig(tp_size=2, seed=dist.get_rank())
            )

    run_ranks(load, 2)


def init_full_state_dict(config, layout):
    model = AutoModelForCausalLM.from_config(config, megatron_config=layout)
    assert model.training
    return full_state_dict(model)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_initial_weights_are_layout_independent(model_type):
    from hf_megatron.testing.tiny_config import tiny_config

    config = tiny_config(CONFIG_MAPPING[model_type]())
    two = run_ranks(init_full_state_dict, 2, config, MegatronConfig(tp_size=2))[0]
    four = run_ranks(init_full_state_dict, 4, config, MegatronConfig(tp_size=4))[0]
    other = run_ranks(init_full_state_dict, 2, config, MegatronConfig(tp_size=2, seed=1))[0]
    stock = AutoModelForCausalLM.from_config(config).state_dict()
    assert two.keys() == stock.keys()
    for name, tensor in stock.items():
        assert torch.equal(two[name], four[name])
        assert tensor.dtype == two[name].dtype and tensor.shape == two[name].shape
        if tensor.std() > 0 and tensor.numel() > 500:
            assert two[name].std().item() == pytest.approx(tensor.std().item(), rel=0.25)
            assert not torch.equal(two[name], other[name])
    shapes = {}
    for name, tensor in two.items():
        if tensor.std() > 0:
            assert not any(torch.equal(tensor, same) for same in shapes.get(tensor.shape, [])), name
            shapes.setdefault(tensor.shape, []).append(tensor)


def draw_from_config(config, layout, rank_seed=0):
    """Returns the weights that `from_config` draws from seed 5 + `rank_seed` x rank, and the next random number."""
    torch.manual_seed(5 + rank_seed * (dist.get_rank() if dist.is_initialized() else 0))
    model = AutoModelForCausalLM.from_config(config, megatron_config=layout)
    weights = model.state_dict() if layout is None else full_state_dict(model)
    return {name: tensor.clone() for name, tensor in weights.items()}, torch.rand(()).item()


# GPT-2's rule of a block overwrites weights of its projections, and its head is tied.
@pytest.mark.parametrize(
    ("model_type", "name", "ranks"),
    [("gpt2", "tp2", 2), ("llama", "pp2", 2), ("llama", "dp2+zero3", 2), ("qwen3_moe", "tp2+pp2", 4)],
)
def test_from_config_draws_weights_of_a_single_process(model_type, name, ranks):
    from hf_megatron.testing.tiny_config import tiny_config

    config, [layout] = tiny_config(CONFIG_MAPPING[model_type]()), parse_layouts(name)
    [(expected, number)] = run_ranks(draw_from_config, 1, config, None)
    results = run_ranks(draw_from_config, ranks, config, layout, rank_seed=1)
    weights, _ = results[0]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], tensor) for key, tensor in expected.items())
    assert [drawn for _, drawn in results] == [number] * ranks
    # With a seed of the layout, weights are drawn layer by layer.
    seeded, _ = run_ranks(draw_from_config, ranks, config, dataclasses.replace(layout, seed=0))[0]
    assert not all(torch.equal(seeded[key], tensor) for key, tensor in expected.items())


def _load_with_new_head(path, layout, seed=3):
    # Only rank 0 uses the user's seed.
    torch.manual_seed(seed + dist.get_rank())
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3, megatron_config=layout)
    drawn = full_state_dict(model).get("score.weight") if layout is not None else model.score.weight.detach()
    return drawn, torch.rand(1)


@pytest.mark.parametrize("layout", [TP2, MegatronConfig(pp_size=2)], ids=MegatronConfig.layout)
def test_new_classification_head_matches_single_process(stories, layout, monkeypatch):
    import hf_megatron.parallelize as integration

    monkeypatch.setattr(integration, "require_verified", lambda *_: None)
    [(head, following)] = run_ranks(_load_with_new_head, 1, stories, None)
    results = run_ranks(_load_with_new_head, 2, stories, layout)
    assert head.std() > 0 and torch.equal(results[0][0], head)
    assert all(torch.equal(other, following) for _, other in results), "torch's generator stands where stock's does"


def _load_with_replaced_head(path, layout, seed=3):
    torch.manual_seed(seed + dist.get_rank())
    reports = []
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(logging.getLogger("transformers.modeling_utils"), "warning", reports.append)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3, megatron_config=layout)
    weights = full_state_dict(model) if layout is not None else model.state_dict()
    drawn = {name: weight.clone() for name, weight in weights.items() if "pooler" in name or "classifier" in name}
    if dist.get_rank() == 0:
        assert any("cls.predictions.transform.dense.weight" in report for report in reports)
    return drawn, torch.rand(1)


@pytest.mark.parametrize("layout", [TP2, MegatronConfig(dp_size=2, zero_stage=3)], ids=MegatronConfig.layout)
def test_replaced_head_matches_single_process(tmp_path, layout, monkeypatch):
    """The checkpoint of a masked language model has the MLM head and no pooler."""
    import hf_megatron.parallelize as integration

    monkeypatch.setattr(integration, "require_verified", lambda *_: None)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertForMaskedLM(BertConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path)
    [(expected, following)] = run_ranks(_load_with_replaced_head, 1, tmp_path, None)
    assert len(expected) == 4
    results = run_ranks(_load_with_replaced_head, 2, tmp_path, layout)
    assert results[0][0].keys() == expected.keys()
    assert all(torch.equal(results[0][0][name], weight) for name, weight in expected.items())
    assert all(torch.equal(other, following) for _, other in results), "torch's generator stands where stock's does"


def test_pretraining_checkpoint_has_unused_head_and_pooler(tmp_path, monkeypatch):
    """As in google-bert checkpoints: the masked language model ignores the second head, the others the pooler."""
    import hf_megatron.parallelize as integration

    monkeypatch.setattr(integration, "require_verified", lambda *_: None)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertForPreTraining(BertConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path / "whole")
    with_surplus = corrupt_copy(
        tmp_path / "whole", tmp_path / "part", lambda w: w.update({"cls.predictions.more": torch.zeros(3)})
    )

    def load():
        for kind in (BertForMaskedLM, BertForTokenClassification, BertForQuestionAnswering):
            model = kind.from_pretrained(tmp_path / "whole", megatron_config=TP2)
            weights, stock = full_state_dict(model), kind.from_pretrained(tmp_path / "whole").state_dict()
            shared_names = {name for name in stock if name.startswith(("bert.", "cls."))}
            assert all(torch.equal(weights[name], stock[name]) for name in shared_names & weights.keys())
        with pytest.raises(CheckpointError, match="1 unexpected .cls.predictions.more"):
            BertForMaskedLM.from_pretrained(with_surplus, megatron_config=TP2)

    run_ranks(load, 2)


def test_missing_base_weight_or_lm_head_raises(stories, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(stories, num_labels=3)
    base = {
        name: tensor for name, tensor in model.state_dict().items() if not name.endswith("layers.0.mlp.up_proj.weight")
    }
    model.save_pretrained(tmp_path / "part", state_dict={k: v for k, v in base.items() if k != "score.weight"})
    config = AutoConfig.from_pretrained(stories)
    config.tie_word_embeddings = False
    config.save_pretrained(tmp_path / "headless")
    model.model.save_pretrained(tmp_path / "headless")
    config.save_pretrained(tmp_path / "headless")

    def on_rank():
        with pytest.raises(CheckpointError, match="up_proj"):
            AutoModelForSequenceClassification.from_pretrained(tmp_path / "part", num_labels=3, megatron_config=TP2)
        with pytest.raises(CheckpointError, match="lm_head"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "headless", megatron_config=TP2)

    run_ranks(on_rank, 2)


def test_loading_memory(tmp_path):
    """Loading adds at most the local shard, the largest tensor and 100 MiB, even after all parameters are written."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    total = sum(os.path.getsize(file) for file in tmp_path.glob("*.safetensors"))

    def load():
        before = psutil.Process().memory_info().rss - psutil.Process().memory_info().shared
        model = AutoModelForCausalLM.from_pretrained(tmp_path, megatron_config=TP2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().add_(1e-3)
        info = psutil.Process().memory_info()
        return info.rss - info.shared - before

    limit = total / 2 + 32000 * 1024 * 4 + 100 * 2**20
    for used in run_ranks(load, 2):
        assert used < limit, f"{used / 2**20:.0f} MiB of at most {limit / 2**20:.0f}"


def test_tokenizer_is_saved_with_the_model(stories, tmp_path):
    from transformers import AutoTokenizer, Trainer, TrainingArguments

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=TP2)
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, save_strategy="no")
        Trainer(model, arguments, processing_class=AutoTokenizer.from_pretrained(stories)).save_model()

    run_ranks(on_rank, 2)
    assert AutoTokenizer.from_pretrained(tmp_path).vocab_size == 512
    assert AutoConfig.from_pretrained(tmp_path).num_hidden_layers == 5


def test_error_names_truncated_file(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    def load():
        with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor '.*bytes .* in a file of \d+ bytes"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "cut", megatron_config=MegatronConfig(tp_size=2))

    run_ranks(load, 2)
