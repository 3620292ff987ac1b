"""Tests of pushes from parallel jobs and pulls for single ranks, against an HTTP Hub server on loopback."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hf_megatron.checkpoint.manifest import MANIFEST
from hf_megatron.checkpoint.reader import PARTIAL, Checkpoint
from hf_megatron.checkpoint.tensor_chunks import TensorChunk
from hf_megatron.cli import app
from hf_megatron.cli import hub as commands
from hf_megatron.core.io.checksums import hash_tensor
from tests.helpers.documented import list_documented_commands
from tests.helpers.hub_server import File, HubServer

ROOT = Path(__file__).parents[4]
TP2 = {"tp_size": 2}
TP2_DP2 = {"tp_size": 2, "dp_size": 2}
TP2_PP2 = {"tp_size": 2, "pp_size": 2}


class Agent:
    """Client of the process that pushes and pulls (see `hub_agent`)."""

    def __init__(self, environment):
        command = [sys.executable, "-m", "tests.helpers.hub_agent"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self, function, *args, ranks=0, **kwargs):
        call = {"function": function, "args": args, "kwargs": kwargs, "ranks": ranks}
        self.process.stdin.write(json.dumps(call, default=str) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the agent has died"
        return json.loads(line)

    def __call__(self, *args, **kwargs):
        answer = self.answer(*args, **kwargs)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def error(self, *args, **kwargs):
        answer = self.answer(*args, **kwargs)
        assert "error" in answer, answer
        return answer["error"]


@pytest.fixture(scope="module")
def hub():
    with HubServer(part_size=200_000) as server:
        yield server


@pytest.fixture(scope="module")
def environment(hub, tmp_path_factory):
    home = tmp_path_factory.mktemp("hf_home")
    named = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": hub.token}
    # The server does not support Xet.
    fixed = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return {**os.environ, **named, **fixed}


@pytest.fixture(scope="module")
def agent(environment):
    started = Agent(environment)
    yield started
    started.process.stdin.close()
    started.process.wait(timeout=300)


@pytest.fixture(scope="module")
def original(stories):
    state = AutoModelForCausalLM.from_pretrained(stories).state_dict()
    return {name: hash_tensor(tensor) for name, tensor in sorted(state.items())}


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """A model with an untied head: a tied embedding would be stored by both the first and the last stage."""
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=512, tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("untied")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sharded(agent, untied, tmp_path_factory):
    """Folder and weights of a checkpoint saved on tp2 x pp2."""
    folder = tmp_path_factory.mktemp("run") / "checkpoint-2"
    return folder, agent("save_shards", untied, TP2_PP2, folder, ranks=4)[0]


@pytest.fixture(scope="module")
def on_hub(agent, sharded):
    """A repository with the sharded checkpoint and a model card."""
    folder = sharded[0]
    (folder / "README.md").write_text("---\nlibrary_name: hf_megatron\ntags: [loopback]\n---\n# A card\n")
    agent("push_shards", folder, "tester/sharded", uploaders="nodes", ranks=2)
    return "tester/sharded"


def list_lfs_files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors"))


@pytest.mark.parametrize("layout", [TP2, {"pp_size": 2}], ids=["tp2", "pp2"])
def test_push_to_hub_is_one_commit_readable_by_transformers(hub, agent, stories, original, layout):
    repo = f"tester/merged-{'tp' if 'tp_size' in layout else 'pp'}"
    answers = agent("push_model", stories, layout, repo, private=False, tags=["tiny"], max_shard_size="300KB", ranks=2)
    assert answers[0] == answers[1] and hub.repos[repo].refs["main"] == answers[0]["oid"]
    assert hub.commit_count(repo) == 2, "the one the repository begins with, and ours"
    files = hub.files(repo)
    assert {"config.json", "generation_config.json", "README.md", "model.safetensors.index.json"} <= files.keys()
    assert b"tiny" in files["README.md"] and not [name for name in files if name.endswith(".bin")]
    assert agent("plain_hashes", repo) == original
    # The second push has fewer files: leftover files of the first push would also be read.
    agent("push_model", stories, layout, repo, ranks=2)
    assert [name for name in hub.files(repo) if name.endswith((".safetensors", "index.json"))] == ["model.safetensors"]
    assert agent("plain_hashes", repo) == original


@pytest.mark.parametrize("layout", [TP2, {"pp_size": 2}], ids=["tp2", "pp2"])
def test_adapter_push_is_one_commit_readable_by_peft(hub, agent, stories, layout):
    repo = f"tester/adapter-{'tp' if 'tp_size' in layout else 'pp'}"
    answers = agent("push_adapter", stories, layout, repo, tags=["tiny"], ranks=2)
    assert answers[0] == answers[1] and hub.repos[repo].refs["main"] == answers[0]["oid"]
    assert hub.commit_count(repo) == 2, "the one the repository begins with, and ours"
    files = hub.files(repo)
    assert files.keys() >= {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert "model.safetensors" not in files
    card = files["README.md"].decode()
    assert f"base_model: {stories}" in card and "library_name: peft" in card and "tiny" in card
    hashes = agent("plain_adapter_hashes", repo, stories)
    assert hashes == agent("seeded_adapter_hashes", stories) and len(hashes) > 8


def test_trainer_pushes_an_adapter(hub, agent, stories, tmp_path):
    arguments = {"adapter": True, "hub_strategy": "every_save"}
    answers = agent("trainer_push", stories, TP2, tmp_path / "run", "tester/trained-adapter", ranks=2, **arguments)
    assert answers[0]["oid"] == hub.repos["tester/trained-adapter"].refs["main"]
    files = hub.files("tester/trained-adapter")
    assert "adapter_model.safetensors" in files and not [name for name in files if name.endswith((".bin", ".pt"))]
    card = files["README.md"].decode()
    assert f"base_model: {stories}" in card and "library_name: peft" in card
    assert len(agent("plain_adapter_hashes", "tester/trained-adapter", stories)) > 8


def test_hub_models_are_converted(agent, untied, sharded, tmp_path):
    agent("push", untied, "tester/untied")
    assert agent("convert_repo", "tester/untied", tmp_path / "core", "megatron_core") == 39
    # A separate repository, because pulls use files that are already cached.
    agent("push_shards", sharded[0], "tester/converted")
    assert agent("convert_repo", "tester/converted", tmp_path / "hf", "hf") == 39
    assert "tester/nobody" in agent.error("convert_repo", "tester/nobody", tmp_path / "x", "hf")


def test_save_pretrained_pushes_to_branches_and_pull_requests(hub, agent, stories, original, tmp_path):
    agent("save_and_push", stories, TP2, tmp_path / "out", "tester/saved", ranks=2)
    assert agent("plain_hashes", "tester/saved") == original
    main = hub.repos["tester/saved"].refs["main"]
    (tmp_path / "out" / "README.md").write_text("# Another card\n")
    answer = agent("push", tmp_path / "out", "tester/saved", revision="next")
    assert hub.repos["tester/saved"].refs["next"] == answer["oid"]
    answer = agent("push", tmp_path / "out", "tester/saved", create_pr=True)
    assert answer["pr_url"].endswith("/discussions/1")
    assert hub.files("tester/saved", "refs/pr/1")["README.md"] == b"# Another card\n"
    assert hub.repos["tester/saved"].refs["main"] == main
    assert hub.files("tester/saved")["README.md"] != b"# Another card\n"


@pytest.mark.parametrize("uploaders", ["first", "nodes", "all"])
def test_sharded_push_uploads_each_file_once(hub, agent, stories, tmp_path, uploaders):
    folder, repo = tmp_path / "checkpoint-2", f"tester/shards-{uploaders}"
    agent("save_shards", stories, TP2_DP2, folder, ranks=4)
    before = len(hub.puts)
    answers = agent("push_shards", folder, repo, uploaders=uploaders, ranks=4)
    assert len({answer["oid"] for answer in answers}) == 1 and hub.commit_count(repo) == 2
    sent = hub.puts[before:]
    assert len(sent) == len(set(sent)) == len(list_lfs_files(folder)) == 4
    files = hub.files(repo)
    assert files.keys() == {*Checkpoint(folder).manifest.files, MANIFEST}
    assert all(content == (folder / name).read_bytes() for name, content in files.items())
    # Pushing again uploads nothing and creates no empty commit.
    agent("push_shards", folder, repo, uploaders=uploaders, ranks=4)
    assert len(hub.puts) == before + 4 and hub.commit_count(repo) == 2


def test_interrupted_push_commits_nothing_and_can_be_retried(hub, agent, sharded, tmp_path):
    folder, repo = shutil.copytree(sharded[0], tmp_path / "checkpoint-2"), "tester/interrupted"
    before = len(hub.puts)
    lost = hashlib.sha256((folder / list_lfs_files(folder)[-1]).read_bytes()).hexdigest()
    with hub.fault("PUT", lost, 403, first=2):
        error = agent.error("push_shards", folder, repo, uploaders="all", ranks=2)
    assert error.count("CheckpointError: Pushing") >= 2 and "403" in error and ".safetensors" in error
    assert "rank 0 failed" in error and "rank 1 failed" in error
    stored = hub.puts[before:]
    # The other rank completed its uploads.
    assert 2 <= len(stored) < len(list_lfs_files(folder))
    assert hub.commit_count(repo) == 1 and hub.files(repo) == {}
    agent("push_shards", folder, repo, uploaders="all", ranks=2)
    sent = hub.puts[before:]
    assert len(sent) == len(set(sent)) == len(list_lfs_files(folder)) and sent[: len(stored)] == stored
    assert hub.files(repo).keys() >= Checkpoint(folder).manifest.files.keys()


def test_commit_and_create_errors_reach_all_ranks(hub, agent, stories, sharded):
    for pattern in ("/commit/", "/repos/create"):
        with hub.fault("POST", pattern, 400):
            error = agent.error("push_shards", sharded[0], "tester/refused", ranks=2)
        assert error.count("CheckpointError: Pushing") >= 2 and "failed on rank 0" in error and "400" in error
    with hub.fault("POST", "/repos/create", 400):
        error = agent.error("push_model", stories, TP2, "tester/refused", ranks=2)
    assert "rank 0 failed" in error and "rank 1 failed" in error and "400" in error
    assert hub.files("tester/refused") == {}


def test_unsafe_or_incomplete_folders_are_rejected_before_upload(hub, agent, stories, original, sharded, tmp_path):
    def assert_rejected(change, *words, source=stories):
        folder = tmp_path / f"case-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(source, folder)
        change(folder)
        before = len(hub.log)
        error = agent.error("push", folder, "tester/nothing")
        assert all(word in error for word in words), error
        assert len(hub.log) == before and "tester/nothing" not in hub.repos

    for name in ("pytorch_model.bin", "weights.pt", "nested/data.distcp"):

        def add(folder, name=name):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"x")

        assert_rejected(add, Path(name).name, "pickle")
    assert_rejected(lambda folder: torch.save({"x": 1}, folder / "notes.json"), "notes.json", "pickle")
    assert_rejected(lambda folder: (folder / "link.json").symlink_to("/etc/hostname"), "link.json", "regular file")
    assert_rejected(lambda folder: os.truncate(folder / "model.safetensors", 5), "model.safetensors", "header")
    index = json.dumps({"weight_map": {"x": "model-00001-of-00002.safetensors"}})
    assert_rejected(
        lambda folder: (folder / "model.safetensors.index.json").write_text(index), "model-00001-of-00002.safetensors"
    )
    shard = "shard-00001-of-00004.safetensors"
    assert_rejected(lambda folder: (folder / shard).unlink(), shard, "missing", source=sharded[0])
    assert_rejected(lambda folder: os.truncate(folder / shard, 100), shard, "100 bytes", source=sharded[0])

    def add_path_to_manifest(folder):
        content = json.loads((folder / MANIFEST).read_text())
        content["facts"]["source"] = {"path": "/data/somebody"}
        (folder / MANIFEST).write_text(json.dumps(content))

    assert_rejected(add_path_to_manifest, "facts.source.path", "/data/somebody", source=sharded[0])
    assert "uploaders = 'some'" in agent.error("push", stories, "tester/nothing", uploaders="some")
    assert "repo_id = 'a/b/c'" in agent.error("push", stories, "a/b/c")
    assert "disagree" in agent.error("push_different", [str(stories), str(tmp_path)], "tester/nothing", ranks=2)
    error = agent.error("push_shards", stories, "tester/nothing", ranks=2)
    assert "not a sharded checkpoint. Use push_folder for Hugging Face files." in error
    agent("push", stories, "tester/plain")
    assert agent("plain_hashes", "tester/plain") == original


def test_training_state_and_hidden_files_are_not_pushed(hub, agent, stories, tmp_path):
    folder = shutil.copytree(stories, tmp_path / "model")
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth", ".hidden", ".tmp-x/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    agent("push", folder, "tester/clean")
    assert hub.files("tester/clean").keys() == {path.name for path in stories.iterdir()}


def test_weights_in_pickles_are_pushed_as_safetensors(agent, stories, original, tmp_path):
    folder, model = tmp_path / "model", AutoModelForCausalLM.from_pretrained(stories)
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    error = agent.error("push", folder, "tester/unpickled")
    assert "Save the weights with save_pretrained, or move the file away." in error
    (folder / "pytorch_model.bin").rename(tmp_path / "pytorch_model.bin")
    model.save_pretrained(folder)
    agent("push", folder, "tester/unpickled")
    assert agent("plain_hashes", "tester/unpickled") == original


def test_partial_checkpoint_is_completed_and_pushed(hub, agent, on_hub, tmp_path):
    folder = tmp_path / "checkpoint"
    agent("pull_for", on_hub, folder, TP2_PP2, rank=0)
    error = agent.error("push_shards", folder, "tester/completed", ranks=2)
    assert "Pull it without --ranks before pushing it." in error
    agent("pull_for", on_hub, folder)
    agent("push_shards", folder, "tester/completed", ranks=2)
    assert hub.files("tester/completed")[MANIFEST] == hub.files(on_hub)[MANIFEST]


def test_invalid_model_card_raises_before_upload(hub, agent, stories, tmp_path):
    folder = shutil.copytree(stories, tmp_path / "model")
    before = len(hub.puts)
    for metadata, message in (("tags: 5", "not iterable"), ("library_name: 7", "library_name"), ("a: [", "README.md")):
        (folder / "README.md").write_text(f"---\n{metadata}\n---\n")
        answer = agent.error("push", folder, "tester/card")
        assert "README.md: invalid metadata" in answer and message in answer
    assert len(hub.puts) == before


def test_ranks_pull_only_the_files_they_load(hub, agent, untied, sharded, on_hub, tmp_path):
    assert b"# A card" in hub.files(on_hub)["README.md"]
    folders, pulled = [], []
    for rank in range(4):
        folders.append(str(tmp_path / f"rank-{rank}"))
        pulled.append(agent("pull_for", on_hub, folders[-1], TP2_PP2, rank=rank))
    for rank, counts in enumerate(pulled):
        assert counts["fetched"] == counts["bytes"] < 0.6 * counts["total"]
        assert f"random-{rank:05d}" not in " ".join(counts["absent"])
        with pytest.raises(Exception, match="hf-megatron pull"):
            Checkpoint(folders[rank]).check(
                *find_omitted_moment(folders[rank], "optimizer/0/exp_avg/model.layers", pulled[3 - rank])
            )
    weights = sharded[1]
    for answer, moments in agent("load_shards", untied, TP2_PP2, folders, ranks=4):
        assert answer in (weights, {}) and set(moments["steps"]) == {2.0} and moments["largest"] > 0
    # Ranks of the other stage do not find their files in these folders.
    error = agent.error("load_shards", untied, TP2_PP2, folders[::-1], ranks=4)
    assert "pulled for other ranks or another layout" in error and "hf-megatron pull" in error and "shard-" in error
    # A second pull into one folder adds the files of the other stage, as for a host that runs both stages.
    more = agent("pull_for", on_hub, folders[0], TP2_PP2, rank=3)
    assert 0 < more["fetched"] < more["bytes"]
    assert agent("load_shards", untied, TP2_PP2, [folders[0]] * 4, ranks=4)[0][0] == weights
    complete = agent("pull_for", on_hub, folders[0])
    assert not complete["absent"] and not (Path(folders[0]) / PARTIAL).exists()
    assert agent("load_shards", untied, TP2, [folders[0]] * 2, ranks=2)[0][0] == weights


def find_omitted_moment(folder, start, other):
    """Returns the arguments of `check` for an optimizer moment whose files this rank did not pull."""
    checkpoint = Checkpoint(folder)
    for name, entry in checkpoint.manifest.tensors.items():
        if name.startswith(start) and {piece.file for piece in entry.pieces} <= set(checkpoint.omitted):
            return name, entry.shape, entry.dtype, [TensorChunk((0,) * len(entry.shape), entry.shape)]
    raise AssertionError(f"everything is in {folder}, {other}")


def test_other_layouts_pull_the_files_they_need(agent, stories, tmp_path):
    """ZeRO-3, data parallelism and another number of pipeline stages, for a model with a tied embedding."""
    weights = agent("save_shards", stories, TP2_PP2, tmp_path / "checkpoint-2", ranks=4)[0]
    agent("push_shards", tmp_path / "checkpoint-2", "tester/tied")
    others = {"pp_size": 4}, {"pp_size": 2, "dp_size": 2, "zero_stage": 3}, TP2_DP2, {"pp_size": 2, "cp_size": 2}
    for number, layout in enumerate(others):
        folders, fractions = [str(tmp_path / f"{number}-{rank}") for rank in range(4)], []
        for rank, folder in enumerate(folders):
            pulled = agent("pull_for", "tester/tied", folder, layout, rank=rank)
            fractions.append(pulled["bytes"] / pulled["total"])
        assert agent("load_shards", stories, layout, folders, ranks=4)[0][0] == weights, layout
        # A rank that holds the full weights of a stage needs the tied embedding from all files.
        assert min(fractions) < 0.85 or layout in (TP2_DP2, others[-1]), fractions


def test_damaged_download_raises_and_lost_connection_resumes(hub, agent, on_hub, tmp_path):
    shard = "shard-00000-of-00004.safetensors"
    with hub.fault("GET", f"/resolve/.*/{shard}", "flip"):
        error = agent.error("pull_for", on_hub, tmp_path / "flipped")
    assert shard in error and "blake3" in error
    assert not (tmp_path / "flipped" / MANIFEST).exists() and not (tmp_path / "flipped" / shard).exists()
    before = dict(hub.sent)
    pulled = agent("pull_for", on_hub, tmp_path / "flipped")
    # Files that arrived intact the first time are not fetched again.
    assert pulled["fetched"] < pulled["bytes"]
    assert hub.sent[shard] - before[shard] == (tmp_path / "flipped" / shard).stat().st_size
    Checkpoint(tmp_path / "flipped").verify()
    with hub.fault("GET", f"/resolve/.*/{shard}", "drop", count=1) as fault:
        agent("pull_for", on_hub, tmp_path / "dropped")
    assert fault["seen"] == 2
    Checkpoint(tmp_path / "dropped").verify()


def test_pull_does_not_overwrite_a_checkpoint(agent, stories, sharded, on_hub, tmp_path):
    folder = tmp_path / "checkpoint"
    agent("save_shards", stories, TP2, folder, ranks=2)
    assert "never overwritten. Pull into another folder." in agent.error("pull_for", on_hub, folder)
    Checkpoint(folder).verify()
    agent("pull_for", on_hub, tmp_path / "another")
    assert Checkpoint(tmp_path / "another").metadata == Checkpoint(sharded[0]).metadata


def test_manifest_with_pickle_is_rejected(hub, agent, on_hub, tmp_path):
    """Such a manifest can only be pushed with other tools."""
    entry = hub.repos[on_hub]
    manifest = json.loads(hub.files(on_hub)[MANIFEST])
    manifest["files"]["code.bin"] = next(iter(manifest["files"].values()))
    content = json.dumps(manifest).encode()
    files = dict(entry.commits[entry.refs["main"]])
    files[MANIFEST], files["code.bin"] = File("0" * 40, len(content), None), next(iter(files.values()))
    hub.blobs["0" * 40] = content
    entry.refs["evil"] = "e" * 40
    entry.commits["e" * 40] = files
    assert "code.bin" in agent.error("pull_for", on_hub, tmp_path / "x", revision="evil")
    assert not (tmp_path / "x" / MANIFEST).exists() and not (tmp_path / "x" / "code.bin").exists()


def test_pipeline_stage_pulls_its_merged_weight_files(hub, agent, stories, original, tmp_path):
    agent("push_model", stories, TP2, "tester/parts", max_shard_size="150KB", ranks=2)
    folders, layout = [str(tmp_path / f"host-{rank}") for rank in range(2)], {"pp_size": 2}
    for rank, folder in enumerate(folders):
        pulled = agent("pull_for", "tester/parts", f"{folder}/model", layout, rank=rank)
        assert pulled["bytes"] < 0.8 * pulled["total"] and pulled["absent"]
        with pytest.raises(OSError, match="model-0000"):
            AutoModelForCausalLM.from_pretrained(f"{folder}/model")
    hashes, name = agent("load_merged", folders, layout, ranks=2)[0]
    assert hashes == original and name == "model"
    error = agent.error("load_merged", folders[::-1], layout, ranks=2)
    assert "Run `hf-megatron pull` for this layout" in error and "model-0000" in error
    for rank, folder in enumerate(folders[::-1]):
        agent("pull_for", "tester/parts", f"{folder}/model", layout, rank=rank)
    assert agent("load_merged", folders[::-1], layout, ranks=2)[0][0] == original
    complete = agent("pull_for", "tester/parts", tmp_path / "tp", TP2, rank=1)
    assert not complete["absent"], "every tp rank reads a part of each file"
    with hub.fault("GET", "/resolve/.*/model-00001", "flip"):
        assert "sha256" in agent.error("pull_for", "tester/parts", tmp_path / "flipped")


def test_invalid_pulls_raise_clear_errors(agent, on_hub, tmp_path):
    error = agent.error("pull_for", on_hub, tmp_path / "x", TP2_PP2, rank=4)
    assert "rank = 4" in error and "0 to 3" in error
    error = agent.error("pull_for", on_hub, tmp_path / "x", rank=0)
    assert "needs a layout. Pass config=MegatronConfig(...) as well." in error
    assert "tester/nowhere" in agent.error("pull_for", "tester/nowhere", tmp_path / "x")
    assert "no-such-branch" in agent.error("pull_for", on_hub, tmp_path / "x", revision="no-such-branch")
    assert not (tmp_path / "x").exists()
    assert agent("pull_for", on_hub, tmp_path / "x", TP2_PP2, rank=0)["absent"]


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint"])
def test_trainer_pushes_without_pickles(hub, agent, stories, tmp_path, strategy):
    repo = f"tester/trainer-{strategy}"
    answers = agent("trainer_push", stories, TP2, tmp_path / "run", repo, hub_strategy=strategy, ranks=2)
    assert answers[0]["oid"] == answers[1]["oid"] == hub.repos[repo].refs["main"]
    files = hub.files(repo)
    assert b"loopback" in files["README.md"] and not [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
    assert agent("plain_hashes", repo) == answers[0]["weights"]
    nested = [name for name in files if name.startswith("last-checkpoint/")]
    assert bool(nested) == (strategy == "checkpoint")
    if nested:
        assert f"last-checkpoint/{MANIFEST}" in nested


def test_trainer_rejects_pushes_with_async_save(agent, stories, tmp_path):
    layout = TP2 | {"async_save": True}
    error = agent.error("trainer_push", stories, layout, tmp_path / "run", "tester/async", ranks=2)
    assert "Use hub_strategy='end', or async_save=False." in error
    for folder, given, strategy in (("end", layout, "end"), ("save", TP2, "every_save")):
        repo = f"tester/async-{folder}"
        [answer, _] = agent("trainer_push", stories, given, tmp_path / folder, repo, hub_strategy=strategy, ranks=2)
        assert agent("plain_hashes", repo) == answer["weights"]


def test_command_line(hub, environment, sharded, on_hub, tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "hf_megatron.cli", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    pushed = run("push", sharded[0], "tester/cli", "--private", "--revision", "next")
    assert pushed.returncode == 0, pushed.stderr
    assert hub.repos["tester/cli"].private and pushed.stdout.strip().endswith(hub.repos["tester/cli"].refs["next"])
    layout = ("--layout", "tp2+pp2", "--ranks", "0-1")
    pulled = run("pull", "tester/cli", tmp_path / "out", *layout, "--revision", "next")
    assert pulled.returncode == 0, pulled.stderr
    assert Checkpoint(tmp_path / "out").omitted and " of " in pulled.stdout
    (tmp_path / "layout.yaml").write_text("tp_size: 2\npp_size: 2\n")
    config = ("--config", tmp_path / "layout.yaml")
    for words, message in (
        ((*layout, *config), "exclude each other. Pass one of them."),
        (("--layout", "tp2+pp2+cp2"), "cp_size is not used here. Set tp_size, pp_size, dp_size, zero_stage only."),
    ):
        result = CliRunner().invoke(app, ["pull", "tester/cli", str(tmp_path / "other"), *map(str, words)])
        assert result.exit_code == 2 and message in " ".join(result.output.split())
    pulled = run("pull", "tester/cli", tmp_path / "other", "--ranks", "0-1", *config, "--revision", "next")
    assert pulled.returncode == 0, pulled.stderr
    assert Checkpoint(tmp_path / "other").omitted == Checkpoint(tmp_path / "out").omitted


def test_documented_commands(environment, sharded, on_hub, tmp_path):
    places = {
        "outputs/checkpoint-500": sharded[0],
        "CHECKPOINT": sharded[0],
        "REPO": "tester/named",
        "me/run": "tester/run",
    }
    documented = [
        command for kind in ("push", "pull") for _, command in list_documented_commands(f"hf-megatron {kind} ")
    ]
    assert len(documented) > 1
    for command in documented:
        words = [str(places.get(word, word)) for word in command.split()[1:]]
        command = [sys.executable, "-m", "hf_megatron.cli", *words]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
    assert Checkpoint(tmp_path / "checkpoint").metadata == Checkpoint(sharded[0]).metadata


def test_exit_codes(tmp_path):
    """Invalid arguments are rejected before any request to the Hub."""

    def run(*arguments):
        result = CliRunner().invoke(app, list(map(str, arguments)))
        return result.exit_code, result.output

    for ranks, words in (("x", "'x'"), ("3-1", "'3-1'"), ("2", "rank = 2")):
        code, output = run("pull", "a/b", tmp_path / "out", "--layout", "tp2", "--ranks", ranks)
        assert code == 2 and words in output
    code, output = run("push", tmp_path, "a/b/c")
    assert code == 2 and "repo_id = 'a/b/c'" in output
    code, output = run("push", tmp_path, "a/b")
    assert code == 1 and str(tmp_path) in output
    assert commands.parse_ranks("0-2, 5,1") == [0, 1, 2, 5]
    assert not (tmp_path / "out").exists()
