"""Tests of saving and resuming with pipeline parallelism: merged files, and training states that fit any layout."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_megatron import CheckpointError, local_named_parameters, prepare_optimizer
from hf_megatron.checkpoint.gather_full import full_state_dict
from hf_megatron.checkpoint.manifest import MANIFEST
from hf_megatron.checkpoint.reader import Checkpoint, open_checkpoint
from hf_megatron.checkpoint.training_state import load_model, load_optimizers, pieces, training_metadata
from hf_megatron.checkpoint.transaction import Transaction
from hf_megatron.conversion import convert
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallelize import parallel_state
from hf_megatron.pipeline_parallel.loss_settings import ProblemType
from hf_megatron.testing.tiny_config import tiny_config
from hf_megatron.testing.tiny_model import draw_parameters
from tests.integration.integrations.accelerate.test_checkpoints import loop
from tests.integration.integrations.trainer.test_resume import read_full_tensors, train
from tests.integration.integrations.trainer.test_trainer import rows


def layout(**sizes):
    return ConfigUnderTest(num_microbatches=4, **sizes)


def count_ranks(config):
    return 1 if config is None else config.ranks_per_replica * (config.dp_size or 1)


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory):
    """Tiny four-layer models by type: untied, tied, and with experts that transformers fuses on load."""
    folders = {}
    for model_type in ("llama", "gpt2", "gemma2", "mixtral"):
        config = tiny_config(CONFIG_MAPPING[model_type]())
        config.num_hidden_layers = 4
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        draw_parameters(model)
        folders[model_type] = tmp_path_factory.mktemp(model_type)
        model.save_pretrained(folders[model_type])
    return folders


MERGED = {
    "llama": [layout(pp_size=2), layout(pp_size=2, pipeline_schedule="zbv"), layout(pp_size=2, tp_size=2)],
    "gpt2": [layout(pp_size=2, pipeline_partition=[3, 1]), layout(pp_size=4)],
    "gemma2": [layout(pp_size=2, pipeline_schedule="zbv"), layout(pp_size=2, tp_size=2, sequence_parallel=True)],
    "mixtral": [layout(pp_size=2), layout(pp_size=2, tp_size=2), layout(pp_size=2, dp_size=2, zero_stage=3)],
}


def save_merged(source, targets, configs):
    for target, config in zip(targets, configs, strict=True):
        model = AutoModelForCausalLM.from_pretrained(source, megatron_config=config)
        model.save_pretrained(target)
        model.save_pretrained(target / "several", max_shard_size="40KB", variant="other")
    return full_state_dict(model)


def test_model_from_config_is_saved_in_hf_format(tiny_models, tmp_path):
    def on_rank(config, target):
        model = AutoModelForCausalLM.from_config(model_config, megatron_config=config)
        model.save_pretrained(target)

    model_config = transformers.AutoConfig.from_pretrained(tiny_models["mixtral"])
    for name, config in (("pp2", layout(pp_size=2)), ("tp2", layout(tp_size=2))):
        run_ranks(on_rank, 2, config, tmp_path / name)
    expected = load_file(tiny_models["mixtral"] / "model.safetensors")
    pp_weights, tp_weights = (load_file(tmp_path / name / "model.safetensors") for name in ("pp2", "tp2"))
    assert pp_weights.keys() == tp_weights.keys() == expected.keys()
    assert all(torch.equal(pp_weights[name], tp_weights[name]) for name in pp_weights)


@pytest.mark.parametrize("model_type", MERGED)
def test_merged_files_match_single_process(tiny_models, tmp_path, model_type):
    source = tiny_models[model_type]
    stock = AutoModelForCausalLM.from_pretrained(source)
    stock.save_pretrained(tmp_path / "stock")
    stock.save_pretrained(tmp_path / "stock" / "several", max_shard_size="40KB", variant="other")
    for world_size in (2, 4):
        configs = [config for config in MERGED[model_type] if count_ranks(config) == world_size]
        targets = [tmp_path / f"{world_size}-{index}" for index in range(len(configs))]
        if not configs:
            continue
        merged, *others = run_ranks(save_merged, world_size, source, targets, configs)
        expected = stock.state_dict()
        assert list(merged) == list(expected) and not any(others)
        assert all(torch.equal(merged[name], expected[name]) for name in expected)
        for target in targets:
            assert_same_files(target, tmp_path / "stock")
            sharded_folder, expected = target / "several", tmp_path / "stock" / "several"
            if model_type != "mixtral":
                assert_same_files(sharded_folder, expected)
            # Stock transformers keeps the splits of one fused weight in one file.
            tensors, expected_tensors = (
                {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
                for folder in (sharded_folder, expected)
            )
            assert tensors.keys() == expected_tensors.keys()
            assert all(torch.equal(tensors[name], expected_tensors[name]) for name in expected_tensors)


def assert_same_files(folder, expected):
    files = {path.name for path in expected.iterdir() if path.is_file()}
    assert {path.name for path in folder.iterdir() if path.is_file()} == files | {"README.md"}
    for name in files:
        if name.endswith(".json"):
            assert json.loads((folder / name).read_text()) == json.loads((expected / name).read_text()), name
        else:
            tensors, expected_tensors = load_file(folder / name), load_file(expected / name)
            assert tensors.keys() == expected_tensors.keys()
            assert all(torch.equal(tensors[key], expected_tensors[key]) for key in expected_tensors)


# Interrupted and resumed runs

STEPS = 2
# Each layout resumes from the previous one; tied weights are on two ranks, on one rank, or sharded.
CHAIN = {
    "one process": None,
    "pp2": layout(pp_size=2),
    "tp2": layout(tp_size=2),
    "pp2 zbv": layout(pp_size=2, pipeline_schedule="zbv", pipeline_partition=[2, 1, 1, 1]),
    "pp2 x dp2 zero1": layout(pp_size=2, dp_size=2, zero_stage=1, pipeline_partition=[1, 4]),
    "dp2 zero3": layout(dp_size=2, zero_stage=3),
    "pp2 x dp2 zero2": layout(pp_size=2, dp_size=2, zero_stage=2, pipeline_partition=[4, 1]),
    "pp2 x dp2 zero3": layout(pp_size=2, dp_size=2, zero_stage=3),
    "pp4": layout(pp_size=4),
    "pp2 x tp2": layout(pp_size=2, tp_size=2, sequence_parallel=True),
    "one process again": None,
}


def make_batch(model):
    samples = rows(4, 3, length=17)
    full_batch = {name: torch.stack([row[name] for row in samples]) for name in ("input_ids", "labels")}
    state = parallel_state(model)
    if state is None:
        return full_batch
    return {name: value.tensor_split(state.mesh.dp_size)[state.mesh.dp_rank] for name, value in full_batch.items()}


def make_model_and_optimizer(path, config, dtype=torch.float32):
    """Returns a model and its optimizer; two of the parameter groups are empty on some stage."""
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config, dtype=dtype).train()
    groups = {"embed_tokens": [], "model.norm": [], "": []}
    for name, parameter in model.named_parameters():
        groups[next(word for word in groups if word in name)].append(parameter)
    decays = zip(groups.values(), (0.0, 0.1, 0.2), strict=True)
    options = [{"params": parameters, "weight_decay": decay} for parameters, decay in decays]
    return model, prepare_optimizer(torch.optim.AdamW(options, lr=1e-3, eps=1e-4))


def advance(model, optimizer):
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**make_batch(model)).loss.backward()
        optimizer.step()
    # Evaluate before saving, as many loops do: ZeRO-3 keeps some weights gathered after it.
    with torch.no_grad():
        model.eval()(**make_batch(model))
    model.train()


def save(model, optimizer, target):
    with Transaction(target, training_metadata(model, [optimizer])) as transaction:
        transaction.write(pieces(model, [optimizer]))
        if torch.distributed.get_rank() == 0:
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(transaction.directory)


def load(model, optimizer, source):
    checkpoint = open_checkpoint(source)
    load_model(model, checkpoint)
    load_optimizers(model, [optimizer], checkpoint)


def resume_and_train(path, source, again, target, config):
    """Loads `source`, saves it again to `again`, trains, and saves to `target`."""
    model, optimizer = make_model_and_optimizer(path, config)
    if source is not None:
        load(model, optimizer, source)
        save(model, optimizer, again)
    advance(model, optimizer)
    save(model, optimizer, target)


def train_uninterrupted(path, targets):
    model, optimizer = make_model_and_optimizer(path, None)
    for target in targets:
        advance(model, optimizer)
        save(model, optimizer, target)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("fault", [False, True])
def test_saved_classifier_keeps_its_problem_type(tmp_path, model_type, trains, fault):
    """The last stage's loss chooses it from the labels; the rank that saves the config may have another stage."""

    def on_rank(path, kind, config):
        torch.manual_seed(0)
        classes = 1 if kind == "regression" else 3
        settings = tiny_config(CONFIG_MAPPING[model_type](num_labels=classes, pad_token_id=0))
        settings.num_labels = classes
        if fault:
            ProblemType.share = lambda self: None
        model = AutoModelForSequenceClassification.from_config(settings, megatron_config=config).train(trains)
        targets = {
            "regression": torch.rand(4),
            "single_label_classification": torch.arange(4) % 3,
            "multi_label_classification": torch.rand(4, 3).round(),
        }
        for _ in range(2):
            model(input_ids=torch.arange(1, 33).view(4, 8), labels=targets[kind])
        model.save_pretrained(path)
        return model.config.problem_type, AutoConfig.from_pretrained(path).problem_type

    for kind in ("regression", "single_label_classification", "multi_label_classification"):
        found = run_ranks(on_rank, 2, tmp_path / kind, kind, layout(pp_size=2))
        assert (found == [(kind, kind)] * 2) != fault, found


def test_state_moves_through_every_layout(stories, tmp_path):
    """Weights and moments are restored bitwise, and the run matches the uninterrupted one."""
    uninterrupted = [tmp_path / f"uninterrupted-{index}" for index in range(len(CHAIN))]
    run_ranks(train_uninterrupted, 1, stories, uninterrupted)
    source = None
    for (name, config), expected in zip(CHAIN.items(), uninterrupted, strict=True):
        target, resaved = tmp_path / name, tmp_path / f"{name} again"
        run_ranks(resume_and_train, count_ranks(config), stories, source, resaved, target, config)
        if source is not None:
            before, after = read_full_tensors(source), read_full_tensors(resaved)
            assert list(before) == list(after)
            assert all(torch.equal(before[key], after[key]) for key in before), name
            saved, reread = (Checkpoint(path).metadata["optimizers"][0] for path in (source, resaved))
            assert [sorted(group.pop("names")) for group in saved["groups"]] == [
                sorted(group.pop("names")) for group in reread["groups"]
            ]
            assert saved == reread
        tensors, expected_tensors = read_full_tensors(target), read_full_tensors(expected)
        assert tensors.keys() == expected_tensors.keys()
        for key in expected_tensors:
            scale = expected_tensors[key].abs().max().item()
            torch.testing.assert_close(
                tensors[key], expected_tensors[key], rtol=0, atol=2e-4 * scale, msg=f"{name}: {key}"
            )
        source = target
    # Tied weights are written once, half by each of the two ranks that hold a copy.
    entry = Checkpoint(tmp_path / "pp2").manifest.tensors["model.embed_tokens.weight"]
    assert [sum(box.numel for box in piece.boxes) for piece in entry.pieces] == [512 * 64 // 2] * 2
    convert(tmp_path / "pp2", tmp_path / "merged", "hf")
    merged, weights = load_file(tmp_path / "merged" / "model.safetensors"), read_full_tensors(tmp_path / "pp2")
    assert merged.keys() == load_file(stories / "model.safetensors").keys()
    assert all(torch.equal(tensor.flatten(), weights[key]) for key, tensor in merged.items())


def test_tied_bf16_main_params(stories, tmp_path):
    def save_with_pp2():
        model, optimizer = make_model_and_optimizer(stories, layout(pp_size=2), torch.bfloat16)
        advance(model, optimizer)
        save(model, optimizer, tmp_path / "first")

    def resave_with_dp2():
        model, optimizer = make_model_and_optimizer(stories, layout(dp_size=2), torch.bfloat16)
        load(model, optimizer, tmp_path / "first")
        save(model, optimizer, tmp_path / "second")

    run_ranks(save_with_pp2, 2)
    run_ranks(resave_with_dp2, 2)
    before, after = read_full_tensors(tmp_path / "first"), read_full_tensors(tmp_path / "second")
    assert before["optimizer/0/main_weight/model.embed_tokens.weight"].dtype == torch.float32
    assert list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)


def test_load_full_state_dict(stories):
    stock = AutoModelForCausalLM.from_pretrained(stories).state_dict()
    other = {name: tensor + 1 for name, tensor in stock.items()}

    def on_rank():
        for config in (layout(pp_size=2), layout(pp_size=2, pipeline_schedule="zbv")):
            model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=config)
            model.load_state_dict(dict(other))
            unsharded = full_state_dict(model)
            assert all(torch.equal(tensor, other[name]) for name, tensor in unsharded.items())

    run_ranks(on_rank, 2)


# Stock Trainer and Accelerate loops

TRAINER = {
    "pp2": layout(pp_size=2),
    "tp2 x pp2 zbv": layout(tp_size=2, pp_size=2, pipeline_schedule="zbv", pipeline_partition=[2, 1, 1, 1]),
    "dp2": layout(dp_size=2),
    "one process": None,
}


@pytest.fixture(scope="module")
def uninterrupted(stories, tmp_path_factory):
    [result] = run_ranks(train, 1, stories, tmp_path_factory.mktemp("one"), None, save_strategy="no")
    return result


@pytest.mark.parametrize(("saved", "loaded"), [("pp2", "one process"), ("dp2", "tp2 x pp2 zbv")])
def test_trainer_resumes_with_other_stages(stories, tmp_path, uninterrupted, saved, loaded):
    run_ranks(train, count_ranks(TRAINER[saved]), stories, tmp_path, TRAINER[saved], stop=4)
    log, weights, _ = run_ranks(train, count_ranks(TRAINER[loaded]), stories, tmp_path, TRAINER[loaded], resume=True)[0]
    assert [step for step, *_ in log] == [1, 2, 3, 4, 5, 6]
    for entry, expected in zip(log[-2:], uninterrupted[0][-2:], strict=True):
        assert entry == pytest.approx(expected, rel=1e-5)
    for name, weight in uninterrupted[1].items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=3e-4)


@pytest.mark.parametrize("weights_only", [False, True])
def test_trainer_loads_its_best_checkpoint(stories, tmp_path, weights_only):
    arguments = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # the first is the worst and stays the "best"
        "save_total_limit": 1,
        "save_only_model": weights_only,
    }
    config = layout(pp_size=2, async_save=True)
    [_, weights, best], _ = run_ranks(train, 2, stories, tmp_path, config, **arguments)
    assert best == str(tmp_path / "checkpoint-2")
    saved = load_file(f"{best}/model.safetensors") if weights_only else read_full_tensors(best)
    assert weights.keys() - saved.keys() == {"lm_head.weight"}
    assert all(torch.equal(saved[name].flatten(), weights[name].flatten()) for name in weights.keys() & saved.keys())


def test_accelerate_state_continues_bit_equal(stories, tmp_path):
    config = layout(pp_size=2)
    uninterrupted = run_ranks(loop, 2, stories, tmp_path / "whole", config, steps=4)
    run_ranks(loop, 2, stories, tmp_path / "parts", config, steps=2, save_at=(2,))
    resumed = run_ranks(loop, 2, stories, tmp_path / "parts", config, steps=4, load=True)
    for (losses, rate, step), (expected, expected_rate, _) in zip(resumed, uninterrupted, strict=True):
        assert losses == expected[4:] and rate == expected_rate and step == 4


def test_accelerate_save_model_and_get_state_dict(stories, tmp_path):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=layout(pp_size=2))
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(model)
        accelerator.save_model(model, str(tmp_path))
        return sorted(accelerator.get_state_dict(model))

    names, others = run_ranks(on_rank, 2)
    saved, original = load_file(tmp_path / "model.safetensors"), load_file(stories / "model.safetensors")
    assert saved.keys() == original.keys() and all(torch.equal(saved[name], original[name]) for name in original)
    assert names == sorted([*original, "lm_head.weight"]) and not others


# Faults


def test_diverged_tied_copies_are_not_saved(stories, tmp_path):
    def on_rank():
        model, optimizer = make_model_and_optimizer(stories, layout(pp_size=2))
        advance(model, optimizer)
        rank = torch.distributed.get_rank()
        embedding = model.model.embed_tokens.weight
        moments = optimizer.state[optimizer.param_groups[0]["params"][0]]
        moments["exp_avg"].view(-1)[7] += rank
        with pytest.raises(CheckpointError, match=r"optimizer/0/exp_avg/model.embed_tokens.weight.* different copies"):
            save(model, optimizer, tmp_path / "state")
        with torch.no_grad():
            embedding.view(-1)[100] += 1e-3 * rank
        for action in (
            lambda: save(model, optimizer, tmp_path / "state"),
            lambda: model.save_pretrained(tmp_path / "merged"),
            lambda: full_state_dict(model),
        ):
            with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight.* different copies"):
                action()

    run_ranks(on_rank, 2)
    assert not list(tmp_path.iterdir())


def remove_stage_entries(folder, prefix):
    """Removes the layer entries written by the second rank from the manifest."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, entry in list(manifest["tensors"].items()):
        if name.startswith(f"{prefix}model.layers.") and "00001-of" in entry["pieces"][0]["file"]:
            del manifest["tensors"][name]
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("", r"rank 1: .* missing \['model.layers"),
        ("optimizer/0/exp_avg_sq/", r"rank 1: .*no tensor 'optimizer/0/exp_"),
    ],
    ids=["weights", "moments"],
)
def test_stage_missing_in_manifest_raises_on_every_rank(stories, tmp_path, prefix, words):
    def save_once():
        model, optimizer = make_model_and_optimizer(stories, layout(pp_size=2))
        advance(model, optimizer)
        save(model, optimizer, tmp_path / "state")

    def load_again():
        # The first stage finds all of its tensors, but must raise the error of the second one.
        model, optimizer = make_model_and_optimizer(stories, layout(pp_size=2))
        before = {name: parameter.clone() for name, parameter in local_named_parameters(model)}
        with pytest.raises(CheckpointError, match=words):
            load(model, optimizer, tmp_path / "state")
        same = all(torch.equal(before[name], parameter) for name, parameter in local_named_parameters(model))
        assert same == (prefix == "") and not optimizer.state

    run_ranks(save_once, 2)
    remove_stage_entries(tmp_path / "state", prefix)
    run_ranks(load_again, 2)


def test_missing_stage_weight_raises_on_every_rank(stories, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(stories, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    def on_rank():
        with pytest.raises(CheckpointError, match=r"failed on rank 1: .* 1 missing \(model.norm.weight\)"):
            AutoModelForCausalLM.from_pretrained(folder, megatron_config=layout(pp_size=2))
        # All ranks still reach the barrier.
        dist.barrier()

    run_ranks(on_rank, 2)


def test_param_groups_differing_by_stage_are_rejected(stories, tmp_path):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=layout(pp_size=2)).train()
        layers = [[parameter for _, parameter in local_named_parameters(layer)] for layer in model.model.layers]
        groups = [{"params": parameters} for parameters in layers if parameters]
        groups[-1]["lr"] = 1e-2
        optimizer = prepare_optimizer(torch.optim.AdamW(groups))
        message = (
            r"differ between pipeline stages.* Create the same groups in the same order on every stage.* may be empty"
        )
        with pytest.raises(CheckpointError, match=message):
            save(model, optimizer, tmp_path / "state")
        # One group per layer of the full model, which is empty on the other stage.
        groups = [{"params": parameters, "lr": 1e-2 * (number + 1)} for number, parameters in enumerate(layers)]
        optimizer = prepare_optimizer(torch.optim.AdamW(groups))
        ids = torch.arange(3, 35).view(4, 8)
        model.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        save(model, optimizer, tmp_path / "state")
        again = prepare_optimizer(torch.optim.AdamW([group | {"lr": 1.0} for group in groups]))
        load(model, again, tmp_path / "state")
        assert [group["lr"] for group in again.param_groups] == [group["lr"] for group in groups]

    run_ranks(on_rank, 2)


def test_foreign_checkpoint_is_rejected_on_every_stage(stories, tmp_path):
    """An error found only on the last stage is raised on the first stage as well."""

    def on_rank():
        model, optimizer = make_model_and_optimizer(stories, layout(pp_size=2))
        save(model, optimizer, tmp_path / "state")
        config = transformers.LlamaConfig.from_pretrained(stories, num_hidden_layers=6)
        model = AutoModelForCausalLM.from_config(config, megatron_config=layout(pp_size=2, pipeline_partition=[5, 1]))
        optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters()))
        with pytest.raises(CheckpointError, match=r"not a checkpoint of this LlamaForCausalLM: missing .*layers.5"):
            load(model, optimizer, tmp_path / "state")

    run_ranks(on_rank, 2)
