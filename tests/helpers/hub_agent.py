"""Worker process of the Hub tests, whose environment points to the loopback server.

A separate process is needed since `huggingface_hub` reads its environment on import. All tests share one process. It
reads calls from standard input, one JSON line per call, forks the ranks, and writes results as JSON lines.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

from hf_megatron import MegatronConfig, MegatronError
from hf_megatron.checkpoint.gather_full import full_state_dict
from hf_megatron.checkpoint.reader import open_checkpoint
from hf_megatron.checkpoint.training_state import load_model, load_optimizers, pieces, training_metadata, write_config
from hf_megatron.checkpoint.transaction import Transaction
from hf_megatron.conversion import convert
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.io.checksums import hash_tensor
from hf_megatron.data_parallel.distributed_optimizer import prepare_optimizer
from hf_megatron.integrations.hub.pull import pull_checkpoint
from hf_megatron.integrations.hub.push import push_checkpoint, push_folder
from tests.integration.integrations.trainer.test_trainer import rows


def _load_model(path, layout, **kwargs):
    return AutoModelForCausalLM.from_pretrained(path, megatron_config=MegatronConfig(**layout), **kwargs)


def _hash_weights(model):
    full = full_state_dict(model)
    return {name: hash_tensor(tensor) for name, tensor in sorted(full.items())}


def _commit_info(info):
    return {"oid": info.oid, "pr_url": info.pr_url}


def push_model(source, layout, repo, **kwargs):
    return _commit_info(_load_model(source, layout).push_to_hub(repo, **kwargs))


def _load_with_adapter(path, layout, **kwargs):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(_load_model(path, layout, **kwargs), LoraConfig(r=4, target_modules="all-linear"))


def push_adapter(source, layout, repo, **kwargs):
    return _commit_info(_load_with_adapter(source, layout).push_to_hub(repo, **kwargs))


def seeded_adapter_hashes(source):
    """Returns the weight hashes of the adapter that `_load_with_adapter` draws, drawn by plain PEFT."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(source), LoraConfig(r=4, target_modules="all-linear"))
    return {name: hash_tensor(tensor) for name, tensor in sorted(model.state_dict().items()) if "lora" in name}


def plain_adapter_hashes(repo, source):
    """Returns the weight hashes of an adapter that plain PEFT loads from the Hub."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), repo)
    return {name: hash_tensor(tensor) for name, tensor in sorted(model.state_dict().items()) if "lora" in name}


def save_and_push(source, layout, folder, repo):
    _load_model(source, layout).save_pretrained(folder, push_to_hub=True, repo_id=repo)


def push(folder, repo, **kwargs):
    return _commit_info(push_folder(folder, repo, **kwargs))


def push_shards(folder, repo, **kwargs):
    return _commit_info(push_checkpoint(folder, repo, **kwargs))


def push_different(folders, repo):
    return push(folders[dist.get_rank()], repo)


def _make_optimizer(model):
    return prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))


def save_shards(source, layout, folder):
    """Trains two steps and saves a sharded checkpoint with moments; returns the weight hashes."""
    model = _load_model(source, layout).train()
    optimizer = _make_optimizer(model)
    for step in range(2):
        ids = torch.arange(4 * 16).view(4, 16) + step
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    metadata = {"step": 2, **training_metadata(model, [optimizer])}
    with Transaction(folder, metadata) as transaction:
        if dist.get_rank() == 0:
            write_config(model, transaction.directory)
        transaction.write(pieces(model, [optimizer]))
    return _hash_weights(model)


def load_shards(source, layout, folders, optimizer=True):
    """Returns the weight hashes after each rank has loaded its own folder, and statistics of the local moments."""
    model = _load_model(source, layout)
    checkpoint = open_checkpoint(folders[dist.get_rank()])
    load_model(model, checkpoint)
    moments = {}
    if optimizer:
        wrapped = _make_optimizer(model)
        load_optimizers(model, [wrapped], checkpoint)
        steps = [float(state["step"]) for state in wrapped.state.values()]
        moments = {"steps": steps, "largest": max(float(s["exp_avg"].abs().max()) for s in wrapped.state.values())}
    return _hash_weights(model), moments


def load_merged(folders, layout):
    # The relative path is the same on all hosts, the folder is local to each.
    os.chdir(folders[dist.get_rank()])
    model = _load_model("model", layout)
    return _hash_weights(model), model.config._name_or_path


def plain_hashes(repo, revision="main"):
    """Returns the weight hashes of a model that plain transformers loads from the Hub."""
    model = AutoModelForCausalLM.from_pretrained(repo, revision=revision)
    return {name: hash_tensor(tensor) for name, tensor in sorted(model.state_dict().items())}


def pull_for(repo, target, layout=None, **kwargs):
    report = pull_checkpoint(repo, target, config=None if layout is None else MegatronConfig(**layout), **kwargs)
    return {"files": report.files, "absent": report.omitted, "bytes": report.bytes, "total": report.total_bytes} | {
        "fetched": report.fetched_bytes
    }


def convert_repo(repo, target, to):
    report = convert(repo, target, to, verify=True)
    return report.comparison.compared


def trainer_push(source, layout, output, repo, adapter=False, **arguments):
    model = (_load_with_adapter if adapter else _load_model)(source, layout)
    defaults = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2}
    defaults |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "push_to_hub": True, "hub_model_id": repo}
    args = TrainingArguments(output, **(defaults | arguments))
    trainer = Trainer(model, args, train_dataset=rows(8, 0), data_collator=default_data_collator)
    trainer.train()
    info = trainer.push_to_hub(tags=["loopback"])
    return {"oid": info.oid, "weights": {} if adapter else _hash_weights(model)}


def commands():
    return {
        function.__name__: function
        for function in (
            push_model,
            push_adapter,
            plain_adapter_hashes,
            seeded_adapter_hashes,
            save_and_push,
            push,
            push_shards,
            push_different,
            save_shards,
            load_shards,
            load_merged,
            plain_hashes,
            pull_for,
            convert_repo,
            trainer_push,
        )
    }


def main():
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        call = json.loads(line)
        function = commands()[call["function"]]
        try:
            if call["ranks"]:
                result = run_ranks(function, call["ranks"], *call["args"], timeout=300, **call["kwargs"])
            else:
                result = function(*call["args"], **call["kwargs"])
            response = {"result": result}
        except (MegatronError, OSError, ValueError) as error:
            response = {"error": f"{type(error).__name__}: {error}"}
        output.write(json.dumps(response, default=lambda value: str(value) if isinstance(value, Path) else list(value)))
        output.write("\n")
        output.flush()


if __name__ == "__main__":
    main()
