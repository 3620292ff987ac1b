"""Tests of model cards: contents, rejected metadata, and replaced or kept files."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import huggingface_hub
import pytest
import yaml
from datasets import Dataset, DatasetInfo
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard_data import model_index_to_eval_results
from transformers import LlamaConfig

from hf_megatron import ConfigError, MegatronConfig
from hf_megatron.model_cards import (
    MARKER,
    CardData,
    card_data_from_config,
    carry_card,
    check_card,
    recorded_parity,
    render,
    write_card,
)
from hf_megatron.model_cards.provenance import find_base_model, hub_id
from hf_megatron.model_cards.training import dataset_ids
from hf_megatron.models.verified import records

LOG = tuple({"step": step, "loss": 3.0 / step, "epoch": step / 8} for step in range(1, 9)) + (
    {"step": 4, "eval_loss": 1.25, "eval_accuracy": 0.5, "eval_runtime": 3.0},
    {"step": 8, "eval_loss": 0.75, "eval_accuracy": 0.625, "eval_runtime": 3.0},
)
CARD_DATA = CardData(
    model_name="stories-tuned",
    base_model="tests/stories",
    architecture="LlamaForCausalLM",
    model_type="llama",
    parameters=260_032,
    license="apache-2.0",
    language=("en",),
    datasets=("tests/tales",),
    pipeline_tag="text-generation",
    layout=MegatronConfig(tp_size=2, sequence_parallel=True),
    world_size=2,
    steps=8,
    learning_rates=(1e-3,),
    log_history=LOG,
    metrics={"loss": 0.75, "accuracy": 0.625, "perplexity": float("inf")},
    metrics_step=8,
    evaluation_dataset="tests/tales",
    evaluation_split="validation",
    parity=recorded_parity("LlamaForCausalLM", "llama", MegatronConfig(tp_size=2, sequence_parallel=True)),
    files="merged",
)


def test_metadata_and_model_index_round_trip():
    card = render(CARD_DATA)
    check_card(card)
    metadata = yaml.safe_load(str(card).split("---")[1])
    expected = {"base_model": "tests/stories", "datasets": ["tests/tales"], "language": ["en"], "license": "apache-2.0"}
    assert expected.items() <= metadata.items() and metadata["library_name"] == "transformers"
    name, results = model_index_to_eval_results(metadata["model-index"])
    # Non-finite metrics appear only in the table.
    assert name == "stories-tuned" and {r.metric_type: r.metric_value for r in results} == {
        "loss": 0.75,
        "accuracy": 0.625,
    }
    assert {(r.task_type, r.dataset_type, r.dataset_split) for r in results} == {
        ("text-generation", "tests/tales", "validation")
    }
    assert "| perplexity | inf |" in card.text and "Trained from [tests/stories]" in card.text
    without = render(dataclasses.replace(CARD_DATA, evaluation_dataset=None))
    assert "model-index" not in without.data.to_dict() and "| accuracy | 0.625 |" in without.text


def test_unknown_fields_are_omitted():
    card = render(CardData())
    check_card(card)
    assert card.data.to_dict() == {"library_name": "transformers", "tags": ["hf_megatron"]}
    assert "##" not in card.text and "None" not in card.text and "# Model\n" in card.text


def test_loss_table_matches_the_log():
    text = render(CARD_DATA).text
    for entry in LOG:
        value = entry.get("loss", entry.get("eval_loss"))
        assert re.search(rf"^\| {entry['step']} \|.*\b{re.escape(f'{value:.6g}')} \|", text, re.MULTILINE), entry
    long = tuple({"step": step, "loss": float(step)} for step in range(1, 1001))
    rows = re.findall(r"^\| (\d+) \| \S+ \|$", render(CardData(log_history=long)).text, re.MULTILINE)
    assert len(rows) == 50 and (rows[0], rows[-1]) == ("1", "1000")


def test_parity_rows_match_the_records():
    layout = MegatronConfig(tp_size=8, pp_size=2)
    parity = recorded_parity("LlamaForCausalLM", "llama", layout)
    expected_rows = [
        row
        for row in records()
        if (row["class"], row["model_type"]) == ("LlamaForCausalLM", "llama") and row["layout"] in ("tp", "pp")
        if not row["changes"]
    ]
    assert list(parity.rows) == expected_rows and len(expected_rows) >= 3 and parity.missing == ()
    text = render(dataclasses.replace(CARD_DATA, layout=layout, parity=parity)).text
    assert all(row["worst"] in text for row in expected_rows) and "not their combination" in text
    # Records of other layouts are not included.
    assert recorded_parity("LlamaForCausalLM", "llama", MegatronConfig(tp_size=2)).rows != parity.rows


def test_missing_parity_result_is_stated():
    layout = MegatronConfig(pp_size=2)
    parity = recorded_parity("HrmTextForCausalLM", "hrm_text", layout)
    card_data = dataclasses.replace(
        CARD_DATA, architecture="HrmTextForCausalLM", model_type="hrm_text", layout=layout, parity=parity
    )
    text = render(card_data).text
    assert "No passed parity result is recorded for HrmTextForCausalLM (`hrm_text`) on `pp`" in text
    assert "A tiny model was compared" in text and "| not equal |" in text
    unchecked = dataclasses.replace(card_data, layout=MegatronConfig(pp_size=2, unverified="allow"))
    assert 'without a comparison (`unverified="allow"`)' in render(unchecked).text
    data_parallel = recorded_parity("LlamaForCausalLM", "llama", MegatronConfig(dp_size=2))
    assert "No parity result is needed" in render(dataclasses.replace(CARD_DATA, parity=data_parallel)).text


@pytest.mark.parametrize(
    "note", ["read from /data/models/llama", "see file:///etc/hosts", "from ~/models", r"from C:\models"]
)
def test_local_paths_are_rejected(tmp_path, note):
    with pytest.raises(ConfigError, match="local path"):
        write_card(tmp_path, dataclasses.replace(CARD_DATA, notes=(note,)))
    assert not list(tmp_path.iterdir())


def test_strings_resembling_paths_are_accepted(tmp_path):
    notes = ("tp/pp and zero 1/2", "https://huggingface.co/tests/stories/tree/main", "`shards/00/x` of the source")
    assert write_card(tmp_path, dataclasses.replace(CARD_DATA, notes=notes, source_format="megatron-core torch_dist"))
    assert "- from: megatron-core torch_dist" in (tmp_path / "README.md").read_text()


def test_licenses():
    other = render(dataclasses.replace(CARD_DATA, license="house-license"))
    check_card(other)
    assert other.data.to_dict()["license"] == "other" and other.data.to_dict()["license_name"] == "house-license"
    for data in (ModelCardData(license="house-license"), ModelCardData(license="other")):
        with pytest.raises(ConfigError, match="license"):
            check_card(ModelCard(f"---\n{data.to_yaml()}\n---\n"))


def test_metadata_changed_by_yaml_is_rejected():
    card = render(CARD_DATA)
    card.data.tags = ("a", "b")  # YAML reads a tuple back as a list
    with pytest.raises(ConfigError, match="read back"):
        check_card(card)


def test_user_card_is_kept_and_generated_card_is_replaced(tmp_path):
    (tmp_path / "README.md").write_bytes("# Mine, in another encoding: é\n".encode("latin-1"))
    before = (tmp_path / "README.md").read_bytes()
    assert write_card(tmp_path, CARD_DATA) is None
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_bytes() == before
    (tmp_path / "README.md").unlink()
    assert write_card(tmp_path, CARD_DATA) == tmp_path / "README.md"
    write_card(tmp_path, dataclasses.replace(CARD_DATA, model_name="another"))
    text = (tmp_path / "README.md").read_text()
    assert "# another" in text and "stories-tuned" not in text
    # A card without the marker is treated as the user's.
    (tmp_path / "README.md").write_text(text.replace(MARKER, ""))
    assert write_card(tmp_path, CARD_DATA) is None


def test_loss_plot(tmp_path):
    write_card(tmp_path, CARD_DATA)
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "](loss.png)" in (tmp_path / "README.md").read_text()
    # Without losses, the plot is removed together with the card that showed it.
    write_card(tmp_path, dataclasses.replace(CARD_DATA, log_history=()))
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    # A user's file of that name is not replaced, shown or removed.
    (tmp_path / "loss.png").write_text("mine")
    write_card(tmp_path, CARD_DATA)
    assert (tmp_path / "loss.png").read_text() == "mine" and "](loss.png)" not in (tmp_path / "README.md").read_text()


def test_card_without_matplotlib_has_a_table(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_card(tmp_path, CARD_DATA)
    text = (tmp_path / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert "| 8 | 0.375 | 0.75 |" in text and "<details>" not in text


def test_failed_plot_keeps_the_old_card(tmp_path):
    write_card(tmp_path, CARD_DATA)
    before = (tmp_path / "README.md").read_bytes()
    (tmp_path / "loss.png").unlink()
    (tmp_path / "loss.png").mkdir()
    with pytest.raises(OSError):
        write_card(tmp_path, dataclasses.replace(CARD_DATA, model_name="another"))
    assert (tmp_path / "README.md").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "loss.png"]
    with pytest.raises(OSError):
        write_card(tmp_path / "absent", CARD_DATA)


def test_carried_card_updates_loading_instructions(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    write_card(source, dataclasses.replace(CARD_DATA, files="sharded"))
    before = (source / "README.md").read_text()
    assert "hf-megatron merge . ../merged" in before and "from_pretrained" not in before
    card_data = CardData(architecture="LlamaForCausalLM", files="merged")
    assert carry_card(source, target, card_data) == target / "README.md"
    after = (target / "README.md").read_text()
    assert "LlamaForCausalLM.from_pretrained" in after and "hf-megatron merge" not in after
    file_sections = r"<!-- (how to load it|conversion) -->.*?<!-- end of \1 -->"
    outside = [re.sub(file_sections, "", text, flags=re.DOTALL) for text in (before, after)]
    assert outside[0] == outside[1]
    assert (target / "loss.png").read_bytes() == (source / "loss.png").read_bytes()
    check_card(ModelCard.load(target / "README.md"))
    # A user's card is copied, and an existing card in the target is kept.
    (source / "README.md").write_text("# Theirs\n")
    assert carry_card(source, target, card_data) is None and (target / "README.md").read_text() == "# Theirs\n"
    (source / "README.md").write_text("# Another\n")
    assert carry_card(source, target, card_data) is None and (target / "README.md").read_text() == "# Theirs\n"
    # Without a source card, a new one is written.
    (source / "README.md").unlink()
    (target / "README.md").unlink()
    carry_card(source, target, card_data)
    assert "LlamaForCausalLM.from_pretrained" in (target / "README.md").read_text()


def test_conversion_writes_a_card(tmp_path):
    config = LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16")
    notes = ("format checked by a round trip only",)
    card_data = card_data_from_config(
        config, model_name="llama", source_format="Megatron-LM", files="merged", notes=notes
    )
    write_card(tmp_path, card_data)
    text = (tmp_path / "README.md").read_text()
    for words in ("Converted from Megatron-LM by hf_megatron", notes[0], "`bfloat16`", "pipeline_tag: text-generation"):
        assert words in text
    other = render(dataclasses.replace(card_data, files=None, target_format="torch_dist", library_name=None))
    assert "How to load" not in other.text and "library_name" not in other.data.to_dict()


def test_second_conversion_updates_name_and_dtype(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    config = LlamaConfig(architectures=["LlamaForCausalLM"], dtype="float32")
    formats = {"source_format": "one", "target_format": "two", "files": "merged"}
    write_card(source, card_data_from_config(config, model_name="first", parameters=10, **formats))
    carry_card(
        source, target, card_data_from_config(config, model_name="second", parameters=12, **formats | {"dtype": "half"})
    )
    text = (target / "README.md").read_text()
    for words in ("# second\n", "| parameters | 12 |", "| dtype | `half` |"):
        assert words in text
    assert "first" not in text
    # If huggingface_hub cannot parse the metadata, a new card is written.
    (source / "README.md").write_text(
        (source / "README.md").read_text().replace("- hf_megatron", "").replace("tags:", "tags: 7")
    )
    carry_card(source, target, card_data_from_config(config, model_name="third", **formats))
    assert "# third\n" in (target / "README.md").read_text()


def test_only_hub_ids_are_base_models(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--tests--stories" / "snapshots" / "0" / "config.json"
    snapshot.parent.mkdir(parents=True)
    snapshot.write_text("{}")
    (tmp_path / "models--tests--stories" / "refs").mkdir()
    (tmp_path / "models--tests--stories" / "refs" / "main").write_text("0")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert hub_id("tests/stories") == "tests/stories"
    for name in ("outputs/model", str(tmp_path), f"{tmp_path}/gone", "", None):
        assert hub_id(name) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests" / "stories").mkdir(parents=True)
    assert hub_id("tests/stories") is None, "a folder of that name is what was read"


def test_local_folder_resolves_to_its_base_model(tmp_path, monkeypatch):
    cached = tmp_path / "models--tests--stories"
    for file, content in (("refs/main", "0"), ("snapshots/0/config.json", "{}")):
        (cached / file).parent.mkdir(parents=True, exist_ok=True)
        (cached / file).write_text(content)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "folder"
    folder.mkdir()
    assert find_base_model("tests/stories") == "tests/stories"
    assert find_base_model(str(folder)) is None
    config = folder / "config.json"
    # A name outside the cache may be a removed local folder.
    for name, base in (("tests/stories", "tests/stories"), ("tests/gone", None), (str(folder), None), (7, None)):
        config.write_text(json.dumps({"_name_or_path": name}))
        assert find_base_model(str(folder)) == base
    config.write_text(json.dumps({"_name_or_path": "tests/stories"}))
    for stated, base in (
        ("tests/tales", "tests/tales"),
        ("[tests/tales]", "tests/tales"),
        ("[tests/tales, tests/others]", "tests/stories"),
        (str(folder), "tests/stories"),
        ("/gone/away", "tests/stories"),
        ("7", "tests/stories"),
        ("[", "tests/stories"),
    ):
        (folder / "README.md").write_text(f"---\nbase_model: {stated}\n---\n")
        assert find_base_model(str(folder)) == base, stated
    for content in (b"---\n- a\n---\n", b"\xff\xfe---", b"nothing"):
        (folder / "README.md").write_bytes(content)
        assert find_base_model(str(folder)) == "tests/stories"


def test_dataset_ids():
    def make_dataset(**info):
        return Dataset.from_dict({"text": ["a"]}, info=DatasetInfo(**info))

    files = {f"hf://datasets/tests/tales@0123/part-{n}.parquet": {"num_bytes": 1, "checksum": None} for n in range(2)}
    assert dataset_ids(make_dataset(download_checksums=files, builder_name="parquet")) == ["tests/tales"]
    assert dataset_ids(make_dataset(builder_name="tales")) == ["tales"]
    assert dataset_ids(make_dataset(builder_name="json", download_checksums={"/data/tales.json": {}})) == []
    assert dataset_ids(make_dataset()) == dataset_ids([1, 2]) == dataset_ids(None) == []


@pytest.fixture
def hub():
    """Local server that validates metadata like the Hub: it records requests and accepts two licenses."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append((self.path, body))
            block = yaml.safe_load(body["content"].split("---")[1])
            valid = block.get("license") in ("apache-2.0", "other", None)
            response = b"{}" if valid else b"license must be one of the list"
            self.send_response(200 if valid else 400)
            self.send_header("Content-Length", str(len(response)))
            self.end_headers()
            self.wfile.write(response)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    thread.join()
    server.server_close()


def validate(endpoint, card):
    """Runs `ModelCard.validate` in a subprocess, since this process is offline."""
    code = "import sys; from huggingface_hub import ModelCard; ModelCard.load(sys.argv[1]).validate()"
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    return subprocess.run(
        [sys.executable, "-c", code, str(card)], env=environment, capture_output=True, text=True, check=False
    )


def test_hub_client_validates_the_card(tmp_path, hub):
    endpoint, received = hub
    write_card(tmp_path, CARD_DATA)
    result = validate(endpoint, tmp_path / "README.md")
    assert result.returncode == 0, result.stderr
    [(path, body)] = received
    assert path == "/api/validate-yaml" and body["repoType"] == "model"
    assert yaml.safe_load(body["content"].split("---")[1]) == render(CARD_DATA).data.to_dict()
    text = (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text(text.replace("license: apache-2.0", "license: house-license"))
    result = validate(endpoint, tmp_path / "README.md")
    assert result.returncode != 0 and "license must be one of the list" in result.stderr
