"""Tests of the last lines of common training scripts: every rank takes the state dict, one rank writes it."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_megatron import MegatronConfig, RankError, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks

LAYOUTS = [
    MegatronConfig(tp_size=2),
    MegatronConfig(pp_size=2),
    MegatronConfig(cp_size=2),
    *(MegatronConfig(dp_size=2, zero_stage=stage) for stage in range(4)),
    MegatronConfig(tp_size=2, pp_size=2),
    MegatronConfig(tp_size=2, dp_size=2, zero_stage=3),
]
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=MegatronConfig.layout)


def count_ranks(layout):
    return layout.ranks_per_replica * (layout.dp_size or 1)


def alpaca(trainer, folder):
    """Stanford Alpaca, and FastChat before FSDP."""
    state_dict = trainer.model.state_dict()
    if trainer.args.should_save:
        cpu_state_dict = {key: value.cpu() for key, value in state_dict.items()}
        del state_dict
        trainer._save(folder, state_dict=cpu_state_dict)


def qwen(trainer, folder):
    """Qwen's finetune.py without LoRA."""
    state_dict = trainer.model.state_dict()
    if trainer.args.should_save and trainer.args.local_rank == 0:
        trainer._save(folder, state_dict=state_dict)


def copy_everywhere(trainer, folder):
    """Copies on every rank, and a write that Trainer leaves to one rank."""
    cpu_state_dict = {key: value.detach().cpu().clone() for key, value in trainer.model.state_dict().items()}
    trainer._save(folder, state_dict=cpu_state_dict)


def fastchat(trainer, folder):
    """FastChat's `trainer_save_model_safe`."""
    policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(trainer.model, StateDictType.FULL_STATE_DICT, policy):
        trainer.save_model(folder)


def pickle_on_one_rank(trainer, folder):
    """A pickled state dict, read back into a stock model."""
    state_dict = trainer.model.state_dict()
    if trainer.is_world_process_zero():
        torch.save(state_dict, folder / "model.bin")
        trainer.model.config.save_pretrained(folder)


def maybe_zero_3(param):
    """LLaVA's and Qwen's function of this name, without DeepSpeed."""
    return param.detach().cpu().clone()


def get_peft_state_maybe_zero_3(named_params):
    """LLaVA's and Qwen's function of this name, with `bias="none"`."""
    to_return = {k: t for k, t in named_params if "lora_" in k}
    return {k: maybe_zero_3(v) for k, v in to_return.items()}


def llava_lora(trainer, folder):
    """The end of LLaVA's train.py with LoRA."""
    model = trainer.model
    state_dict = get_peft_state_maybe_zero_3(model.named_parameters())
    non_lora = {k: maybe_zero_3(t) for k, t in model.named_parameters() if "lora_" not in k and t.requires_grad}
    if trainer.args.local_rank == 0 or trainer.args.local_rank == -1:
        model.config.save_pretrained(folder)
        model.save_pretrained(folder, state_dict=state_dict)
        torch.save(non_lora, folder / "non_lora_trainables.bin")


def qwen_lora(trainer, folder):
    """The end of Qwen's finetune.py with LoRA."""
    state_dict = get_peft_state_maybe_zero_3(trainer.model.named_parameters())
    if trainer.args.should_save and trainer.args.local_rank == 0:
        trainer._save(str(folder), state_dict=state_dict)


def make_trainer(path, folder, layout, lora=False):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, **({} if layout is None else {"megatron_config": layout}))
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    draw = torch.Generator().manual_seed(1)
    samples = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 64, (8, 8), generator=draw)]
    batch = 4 if layout is None or layout.dp_size in (None, 1) else 2
    args = TrainingArguments(
        str(folder / "run"),
        per_device_train_batch_size=batch,
        max_steps=2,
        optim="sgd",
        learning_rate=0.5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(model, args, train_dataset=samples)


def train_and_save(path, folder, layout, save, lora=False):
    trainer = make_trainer(path, folder, layout, lora)
    trainer.train()
    for idiom in save:
        target = folder / idiom.__name__
        target.mkdir(exist_ok=True)
        idiom(trainer, target)
    trainer.save_model(folder / "reference")


def compare_files(saved, reference, single):
    """Compares weights bit for bit with the collective save, and within rounding with the single-process run."""
    assert saved.keys() == reference.keys() == single.keys()
    for name, value in saved.items():
        assert torch.equal(value, reference[name]), name
        assert torch.allclose(value, single[name], atol=3e-5), name


@pytest.fixture(scope="module")
def single(tiny, tmp_path_factory):
    """Folders that a single process saves, without and with an adapter."""
    folder = tmp_path_factory.mktemp("single")
    full, lora = folder / "full", folder / "lora"

    def on_rank():
        train_and_save(tiny, full, None, [alpaca])
        train_and_save(tiny, lora, None, [llava_lora], lora=True)

    full.mkdir()
    lora.mkdir()
    run_ranks(on_rank, 1)
    return full, lora


@by_layout
def test_state_dict_saved_on_one_rank(tiny, single, tmp_path, layout):
    idioms = [alpaca, qwen, copy_everywhere, fastchat, pickle_on_one_rank]
    run_ranks(train_and_save, count_ranks(layout), tiny, tmp_path, layout, idioms)
    reference = load_file(tmp_path / "reference" / "model.safetensors")
    expected = load_file(single[0] / "alpaca" / "model.safetensors")
    for idiom in idioms[:-1]:
        folder = tmp_path / idiom.__name__
        compare_files(load_file(folder / "model.safetensors"), reference, expected)
        loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert "megatron" not in (folder / "config.json").read_text()
    pickled = torch.load(tmp_path / "pickle_on_one_rank" / "model.bin", weights_only=True)
    loaded.load_state_dict(pickled)
    compare_files({name: pickled[name] for name in reference}, reference, expected)


@by_layout
def test_adapter_saved_on_one_rank(tiny, single, tmp_path, layout):
    idioms = [llava_lora, qwen_lora]
    run_ranks(train_and_save, count_ranks(layout), tiny, tmp_path, layout, idioms, lora=True)
    reference = load_file(tmp_path / "reference" / "adapter_model.safetensors")
    expected = load_file(single[1] / "llava_lora" / "adapter_model.safetensors")
    for idiom in idioms:
        compare_files(load_file(tmp_path / idiom.__name__ / "adapter_model.safetensors"), reference, expected)
    assert torch.load(tmp_path / "llava_lora" / "non_lora_trainables.bin", weights_only=True) == {}


SPLIT = [MegatronConfig(tp_size=2), MegatronConfig(pp_size=2), MegatronConfig(dp_size=2, zero_stage=3)]


@pytest.mark.parametrize("layout", SPLIT, ids=MegatronConfig.layout)
def test_values_that_were_not_collected_raise(tiny, tmp_path, layout):
    """Seeded faults: a state dict from before training, and one that was edited since it was collected."""

    def on_rank():
        trainer = make_trainer(tiny, tmp_path, layout)
        before = trainer.model.state_dict()
        trainer.train()
        after = trainer.model.state_dict()
        with torch.no_grad():
            for value in after.values():
                value.mul_(0.5)
        for state_dict in (before, after):
            with pytest.raises(UnsupportedError, match="requires full tensors on rank 0"):
                trainer._save(tmp_path / "saved", state_dict=state_dict)
        assert not list(tmp_path.glob("saved/*.safetensors"))

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("layout", SPLIT[:2], ids=MegatronConfig.layout)
def test_adapter_of_earlier_training_raises(tiny, tmp_path, layout):
    """Adapters are collected when training ends; weights that a further step changed are not written."""

    def on_rank():
        trainer = make_trainer(tiny, tmp_path, layout, lora=True)
        trainer.train()
        batch = {name: torch.arange(8).expand(4, 8) for name in ("input_ids", "labels")}
        trainer.model(**batch).loss.backward()
        trainer.optimizer.step()
        state_dict = get_peft_state_maybe_zero_3(trainer.model.named_parameters())
        trainer.model.save_pretrained(tmp_path / "saved", state_dict=state_dict)

    with pytest.raises(RankError, match=r"(?s)rank 0 .*requires full tensors on rank 0.*rank 1 .*requires full"):
        run_ranks(on_rank, 2)
