"""Tests of GPT pretraining datasets against Megatron-Core: samples, cached indices and arguments."""

import hashlib
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_megatron.datasets import index_cache
from hf_megatron.datasets.blended import BlendedDataset
from hf_megatron.datasets.index_cache import cached_arrays
from hf_megatron.datasets.indexed import IndexedDataset
from hf_megatron.datasets.indexed_writer import IndexedWriter
from hf_megatron.datasets.megatron_arguments import datasets_from_megatron_args
from hf_megatron.datasets.pretraining import PretrainingDataset
from hf_megatron.datasets.ramp_up import BatchRampUp
from hf_megatron.datasets.sample_index import blend_order, sample_order
from hf_megatron.errors import DataError

DATA = Path(__file__).parents[2] / "data" / "megatron_indexed"
NAMES = [str(DATA / f"ag_news_prompt_{name}_document") for name in ("inputs", "targets")]
EOD = 7


def _write_pair(path, seed=0, documents=40, longest=30, vocabulary=50):
    """Writes a pair with empty documents and end-of-document tokens inside documents, and returns its prefix."""
    generator = random.Random(seed)
    with IndexedWriter(path, "uint16") as writer:
        for _ in range(documents):
            writer.add_document([[generator.randrange(vocabulary) for _ in range(generator.randrange(longest))]])
    return str(path)


def _digest(values):
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]


class _Tokenizer:
    """Tokenizer with the attributes that Megatron-Core's datasets read."""

    vocab_size, eod, unique_identifiers = 50, EOD, {}

    @property
    def pad(self):
        raise NotImplementedError

    eos = pad


def _build_peer_datasets(prefixes, weights, split, length, samples, seed, cache, **options):
    """Returns the train, validation and test datasets of megatron-core."""
    builder = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder")
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=length,
        blend=(list(prefixes), weights),
        split=split,
        path_to_cache=str(cache),
        tokenizer=_Tokenizer(),
        create_attention_mask=False,
        **{"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False, **options},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return builder.BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, config).build()


@pytest.fixture(scope="module")
def one_process():
    """Single-rank process group: blends of megatron-core query the rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("seed", range(25))
def test_samples_equal_megatron_core(tmp_path, one_process, seed):
    """Compares tokens, labels, masks and positions over twenty random sets of files, splits, weights and lengths."""
    generator, compared = random.Random(seed), 0
    for draw in range(20):
        folder = tmp_path / str(draw)
        folder.mkdir()
        count = generator.choice([1, 1, 2, 3])
        prefixes = [
            _write_pair(folder / f"{index}", generator.random(), generator.randrange(8, 50), generator.randrange(8, 40))
            for index in range(count)
        ]
        weights = [generator.choice([0.2, 0.5, 3.0, 7.0]) for _ in prefixes] if generator.random() < 0.6 else None
        split, length = generator.choice(["90,5,5", "80,20,0", "1", "60,30,10"]), generator.randrange(2, 24)
        masked, restarts = generator.random() < 0.5, generator.random() < 0.5
        arguments = {
            "data-path": [word for pair in zip(weights, prefixes, strict=True) for word in pair]
            if weights
            else prefixes,
            "split": split,
            "seq-length": length,
            "seed": generator.randrange(1, 100),
            "global-batch-size": generator.randrange(1, 5),
            "train-iters": generator.randrange(1, 80),
            "eval-interval": generator.randrange(1, 40),
            "eval-iters": generator.randrange(1, 3),
            "eod-mask-loss": masked,
            "reset-position-ids": restarts,
            "reset-attention-mask": restarts,
        }
        if count == 2 and weights is None:
            # Megatron parses two entries as a weight and a prefix only if the first is a number.
            assert not any(name.replace(".", "").isdigit() for name in prefixes)
        batch = arguments["global-batch-size"]
        rounds = (arguments["train-iters"] // arguments["eval-interval"] + 1) * arguments["eval-iters"] * batch
        sizes = [arguments["train-iters"] * batch, rounds, arguments["eval-iters"] * batch]
        try:
            splits = datasets_from_megatron_args(arguments, eod_token=EOD)
        except DataError as error:
            # megatron-core would build epochs of this split forever, or lacks its samples.
            assert re.search("no sample can be made|make no sample of|none of its .* is in the share", str(error)), (
                error
            )
            continue
        compared += 1
        options = {"eod_mask_loss": masked, "reset_position_ids": restarts}
        peers = _build_peer_datasets(
            prefixes, weights, split, length, sizes, arguments["seed"], folder / "cache", **options
        )
        for dataset, peer, size in zip((splits.train, splits.valid, splits.test), peers, sizes, strict=True):
            if not size:
                continue
            assert (dataset is None) == (peer is None)
            if dataset is None:
                continue
            assert len(dataset) == len(peer)
            for index in {0, 1, len(dataset) // 2, len(dataset) - 1} & set(range(len(dataset))):
                sample, other = dataset[index], peer[index]
                assert sample["input_ids"].tolist() == other["tokens"].tolist()
                is_counted = other["loss_mask"] == 1
                assert sample["labels"][is_counted].tolist() == other["labels"][is_counted].tolist()
                assert ((sample["shift_labels"] == -100) == ~is_counted).all()
                positions = sample.get("position_ids", torch.arange(length))
                assert positions.tolist() == other["position_ids"].tolist()
        shutil.rmtree(folder)
    assert compared >= 10


def test_blends_equal_golden_vectors(tmp_path):
    arguments = {
        "data-path": ["0.3", NAMES[0], "0.7", NAMES[1]],
        "split": "90,10,0",
        "seq-length": 32,
        "train-samples": 200,
        "eval-iters": 1,
        "global-batch-size": 20,
    }
    splits = datasets_from_megatron_args(arguments)
    assert [len(dataset) for dataset in splits.train.datasets] == [166, 146]
    assert _digest(splits.train.order.dataset) == "7c3b0fd5bba97b22"
    assert _digest(splits.train.order.sample) == "4fd38226e3db3581"
    assert splits.test is None
    datasets = [PretrainingDataset(name, 32, share=(0.0, 0.9)) for name in NAMES]
    blend = BlendedDataset(datasets)
    assert (len(blend), _digest(blend.order.dataset)) == (172, "a4018939a6d700b9")
    assert _digest(blend.order.sample) == "f354d01ac35fe15f"


def test_last_partial_sample_is_padded(tmp_path):
    prefix = tmp_path / "pair"
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_document([list(range(1, 8))])
    dataset = PretrainingDataset(prefix, 4, drop_last_partial=False)
    assert len(dataset) == 2
    samples = sorted((dataset[index] for index in range(2)), key=lambda row: -int(row["input_ids"][0] == 1))
    assert samples[0]["input_ids"].tolist() == [1, 2, 3, 4] and samples[0]["labels"].tolist() == [2, 3, 4, 5]
    assert samples[1]["input_ids"].tolist() == [5, 6, 7, 0] and samples[1]["labels"].tolist() == [6, 7, -100, -100]


def test_position_ids_restart_at_documents(tmp_path):
    prefix = tmp_path / "pair"
    with IndexedWriter(prefix, "uint16") as writer:
        for document in ([1, 2, 3], [], [4, EOD], [5, 6, 8, 9, 10, 11]):
            writer.add_document([document])
    for restart in ("documents", "eod"):
        dataset = PretrainingDataset(prefix, 10, restart=restart, eod_token=EOD)
        [(_, sizes), sample] = dataset.tokens(0), dataset[0]
        if restart == "documents":
            expected = [position for size in sizes for position in range(size)][:10]
        else:
            tokens = sample["input_ids"].tolist()
            begin = tokens.index(EOD) + 1
            expected = [*range(begin), *range(10 - begin)]
        assert sample["position_ids"].tolist() == expected


@pytest.mark.parametrize("options", [{}, {"add_extra_token_to_sequence": False}], ids=["one more", "no more"])
@pytest.mark.parametrize("samples", [30, 400])
def test_megatron_core_cached_indices_are_read(tmp_path, one_process, monkeypatch, samples, options):
    """Cached indices are read if description and samples match; the description omits the extra token."""
    prefix, cache = _write_pair(tmp_path / "pair", documents=60), tmp_path / "cache"
    _build_peer_datasets([prefix], None, "90,10,0", 8, [samples, 10, 10], 5, cache, **options)
    settings = {"sequence_length": 8, "samples": samples, "seed": 5, "share": (0.0, 0.9), "cache": cache}
    extra = "add_extra_token_to_sequence" not in options
    plain = PretrainingDataset(prefix, **{**settings, "cache": None}, extra_token=extra)
    rebuilds = []

    def count_sample_order(*args, **kwargs):
        rebuilds.append(1)
        return sample_order(*args, **kwargs)

    monkeypatch.setattr("hf_megatron.datasets.pretraining.sample_order", count_sample_order)
    dataset = PretrainingDataset(prefix, **settings, extra_token=extra)
    assert not rebuilds and len(dataset) == len(plain)
    assert dataset[3]["input_ids"].tolist() == plain[3]["input_ids"].tolist()
    for change in ({"seed": 6}, {"samples": samples + 200}, {"share": (0.0, 0.8)}):
        PretrainingDataset(prefix, **{**settings, **change}, extra_token=extra)
    PretrainingDataset(prefix, **settings, extra_token=not extra)
    # Different files with the same name.
    _write_pair(tmp_path / "other" / "pair", seed=3, documents=60)
    os.utime(tmp_path / "other" / "pair.idx", ns=(1, 1))
    PretrainingDataset(tmp_path / "other" / "pair", **settings, extra_token=extra)
    assert len(rebuilds) == 5
    # The same files with a modification time after Megatron's indices.
    os.utime(f"{prefix}.idx")
    PretrainingDataset(prefix, **settings, extra_token=extra)
    assert len(rebuilds) == 6


@pytest.mark.parametrize("weights", [[0.3, 0.7], [3.0, 1.0, 2.0], None])
def test_megatron_core_cached_blends_are_read(tmp_path, one_process, monkeypatch, weights):
    prefixes = [
        _write_pair(tmp_path / f"pair{index}", index, 60) for index in range(3 if weights and weights[2:] else 2)
    ]
    cache, samples = tmp_path / "cache", 80
    train, *_ = _build_peer_datasets(prefixes, weights, "90,10,0", 8, [samples, 10, 10], 5, cache)
    arguments = {"data-path": [word for pair in zip(weights or prefixes, prefixes, strict=True) for word in pair]}
    arguments["data-path"] = arguments["data-path"] if weights else prefixes
    arguments |= {"seq-length": 8, "train-samples": samples, "global-batch-size": 10, "eval-iters": 1, "seed": 5}
    arguments |= {"split": "90,10,0", "eval-interval": 1000}
    rebuilds, plain = [], datasets_from_megatron_args(arguments).train

    def count_blend_order(*args):
        rebuilds.append(args)
        return blend_order(*args)

    monkeypatch.setattr("hf_megatron.datasets.blended.blend_order", count_blend_order)
    # Indices read from Megatron's cache are stored in a separate folder and read from there the second time.
    for _ in range(2):
        blend = datasets_from_megatron_args({**arguments, "data-cache-path": cache}).train
        assert len(blend) == len(plain) == len(train) and not rebuilds
        assert np.array_equal(blend.order.dataset, plain.order.dataset)
        assert np.array_equal(blend.order.sample, plain.order.sample)
    datasets_from_megatron_args({**arguments, "data-cache-path": cache, "train-samples": 81})
    assert rebuilds
    [damaged] = cache.glob("*BlendedDataset-train-dataset_index.npy")
    np.save(damaged, np.zeros(len(train), np.int16))
    for folder in cache.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    rebuilds.clear()
    rebuilt = datasets_from_megatron_args({**arguments, "data-cache-path": cache}).train
    assert rebuilds and np.array_equal(rebuilt.order.dataset, plain.order.dataset)


# Cached indices


def _make_arrays():
    return {"one": np.arange(5), "two": np.ones((2, 3), np.int16)}


def test_cached_indices_are_read_only_with_matching_key(tmp_path):
    rebuilds = []

    def make():
        rebuilds.append(1)
        return _make_arrays()

    for key in ({"a": 1}, {"a": 1}, {"a": 2}, {"a": 1}):
        arrays = cached_arrays(key, tmp_path, make)
        assert {name: array.tolist() for name, array in arrays.items()} == {
            name: array.tolist() for name, array in _make_arrays().items()
        }
    assert len(rebuilds) == 2
    # Damaged indices are rebuilt.
    [folder] = [
        path for path in tmp_path.iterdir() if path.is_dir() and '\\"a\\": 2' in (path / "key.json").read_text()
    ]
    content = (folder / "one.npy").read_bytes()
    (folder / "one.npy").write_bytes(content[:-8])
    assert cached_arrays({"a": 2}, tmp_path, make)["one"].tolist() == [0, 1, 2, 3, 4]
    (folder / "two.npy").unlink()
    assert cached_arrays({"a": 2}, tmp_path, make)["two"].shape == (2, 3)
    assert len(rebuilds) == 4 and (folder / "one.npy").read_bytes() == content


def _build_cached_array(folder, log):
    def make():
        with open(log, "a") as file:
            file.write("made\n")
        time.sleep(1)
        return {"one": np.arange(1_000_000)}

    assert cached_arrays({"a": 1}, folder, make)["one"][-1] == 999_999


def test_concurrent_builders_build_once(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_build_cached_array, args=(tmp_path / "cache", tmp_path / "log")) for _ in range(6)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    assert (tmp_path / "log").read_text() == "made\n"


def test_unwritable_cache_falls_back_to_memory(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="kept in memory"):
        assert cached_arrays({"a": 1}, tmp_path / "file" / "cache", _make_arrays)["one"].tolist() == [0, 1, 2, 3, 4]

    def raise_disk_full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_cache.np, "save", raise_disk_full)
    with pytest.warns(UserWarning, match="No space left"):
        assert cached_arrays({"a": 1}, tmp_path / "cache", _make_arrays)["one"].tolist() == [0, 1, 2, 3, 4]
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"sequence_length": 9},
        {"samples": 500},
        {"share": (0.0, 0.5)},
        {"extra_token": False},
        {"drop_last_partial": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_order_settings_change_the_cache_folder(tmp_path, change):
    prefix, cache = _write_pair(tmp_path / "pair"), tmp_path / "cache"
    settings = {"sequence_length": 8, "samples": 20, "seed": 1}
    first, other = PretrainingDataset(prefix, **settings, cache=cache), {**settings, **change}
    dataset, plain = PretrainingDataset(prefix, **other, cache=cache), PretrainingDataset(prefix, **other)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 2
    assert dataset.order_key == plain.order_key != first.order_key
    for name in ("document_index", "sample_index", "shuffle_index"):
        assert np.array_equal(getattr(dataset.order, name), getattr(plain.order, name))


def test_equal_epoch_counts_share_a_cache_folder(tmp_path):
    prefix, cache = _write_pair(tmp_path / "pair"), tmp_path / "cache"
    tokens = IndexedDataset(prefix).tokens
    for samples in (tokens // 8 // 2, tokens // 8 // 2 + 3):
        PretrainingDataset(prefix, 8, samples, cache=cache)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1
    # A different file with the same name and size.
    os.utime(f"{prefix}.idx", ns=(1, 1))
    PretrainingDataset(prefix, 8, 20, cache=cache)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 2


def test_damaged_cached_indices_are_reported(tmp_path):
    prefix, cache = _write_pair(tmp_path / "pair"), tmp_path / "cache"
    size = len(PretrainingDataset(prefix, 8, cache=cache))
    [file] = cache.glob("*/shuffle.npy")
    file.write_bytes(file.read_bytes()[:-4] + b"\xff" * 4)
    dataset = PretrainingDataset(prefix, 8, cache=cache)
    with pytest.raises(DataError, match=f"sample {size - 1} is out of range .*the cached indices in .* are damaged"):
        dataset[size - 1]


def test_pickled_datasets_reopen_cached_indices(tmp_path):
    prefix = _write_pair(tmp_path / "pair", documents=2000)
    for options in ({"cache": tmp_path / "cache"}, {}):
        datasets = [PretrainingDataset(prefix, 8, **options), PretrainingDataset(prefix, 8, seed=2, **options)]
        blend = BlendedDataset(datasets, [0.5, 0.5], 1000, **options)
        pickled = pickle.dumps(blend)
        assert (len(pickled) < 8000) == bool(options)
        unpickled = pickle.loads(pickled)
        assert len(unpickled) == len(blend) and unpickled.order_key == blend.order_key
        for sample in (0, 500, 999):
            assert unpickled[sample]["input_ids"].tolist() == blend[sample]["input_ids"].tolist()


# Arguments


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data-path": None}, "expected data_path"),
        ({"train-data-path": "x"}, "expected data_path"),
        ({"data-path": ["0.3", "a", "b", "c"]}, "a weight before each"),
        ({"data-path": ["0", "a", "1", "b"]}, "expected numbers above 0"),
        ({"split": "0,1,0,4"}, "one to three weights"),
        ({"train-samples": 4}, "either train_iters or train_samples"),
        ({"seq-length": None}, "seq_length = None"),
        ({"reset-position-ids": True}, "expected both or neither"),
        ({"eod-mask-loss": True}, "require eod_token="),
        ({"hidden-size": 4}, "is not an argument of the datasets"),
        ({"eod-mask-loss": "no"}, "expected True or False"),
        ({"eval-interval": 0}, "eval_interval = 0: expected 1 or more"),
        ({"global-batch-size": 0}, "global_batch_size = 0: expected 1 or more"),
        ({"data-path": None, "data-args-path": "nowhere"}, "data_args_path = 'nowhere': No such file"),
        ({"data-path": NAMES[0] + ".bin"}, "Remove the suffix .bin or .idx"),
        ({"data-path": "nowhere"}, "no such file"),
        ({"rampup-batch-size": "1 1 4"}, "requires train_samples"),
        ({"split": [1, 1, 1]}, "split = .1, 1, 1.: expected one to three weights"),
        ({"rampup-batch-size": "1 1", "train-samples": 4, "train-iters": None}, "expected start batch size"),
        ({"rampup-batch-size": [1, "x", 4], "train-samples": 4, "train-iters": None}, "'x': expected an integer"),
    ],
)
def test_invalid_arguments_are_rejected(tmp_path, change, message):
    arguments = {"data-path": NAMES[0], "seq-length": 8, "train-iters": 2, "global-batch-size": 2}
    with pytest.raises(DataError, match=message):
        datasets_from_megatron_args({**arguments, **change})


def test_single_prefix_with_weight(tmp_path):
    """Megatron ignores the weight with per-split paths and otherwise builds a blend of one dataset."""
    arguments = {"seq-length": 8, "train-iters": 2, "global-batch-size": 2, "eval-iters": 1}
    assert isinstance(
        datasets_from_megatron_args({**arguments, "train-data-path": ["1.0", NAMES[0]]}).train, PretrainingDataset
    )
    splits = datasets_from_megatron_args({**arguments, "data-path": ["1.0", NAMES[0]], "split": "80,10,10"})
    assert isinstance(splits.train, BlendedDataset)
    assert len(splits.evaluation) == 2 and splits.evaluation[1]["labels"].tolist() == splits.valid[1]["labels"].tolist()


def test_batch_ramp_up_from_megatron_args():
    """Smaller batches give more iterations than full-size ones, and therefore more evaluations."""
    arguments = {"data-path": NAMES[0], "seq-length": 8, "train-samples": 40, "eval-interval": 4, "eval-iters": 1}
    ramp_up_arguments = {"global-batch-size": 8, "rampup-batch-size": "2 2 12", "split": "60,40,0"}
    splits = datasets_from_megatron_args({**arguments, **ramp_up_arguments})
    assert splits.train.ramp_up == BatchRampUp(8, start=2, increment=2, samples=12)
    assert splits.valid.ramp_up is None and splits.train.ramp_up.steps(40) == 7
    plain = datasets_from_megatron_args({**arguments, **ramp_up_arguments, "rampup-batch-size": None})
    assert plain.train.ramp_up is None and plain.train.order_key == splits.train.order_key


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sequence_length": "32"}, "sequence_length = '32': expected an integer"),
        ({"samples": 2.5}, "samples = 2.5: expected an integer"),
        ({"seed": "1"}, "seed = '1': expected an integer"),
        ({"share": "969,30,1"}, "share = '969,30,1': expected two numbers, as returned by parse_split"),
        ({"share": None}, "share = None: expected two numbers"),
        ({"source": 4}, "source = 4: expected"),
        ({"seed": -1}, "seed = -1: expected a number from 0"),
        ({"eod_token": "<eos>"}, "eod_token = '<eos>': expected a token id"),
        ({"eod_token": 10**10}, "eod_token = 10000000000: expected a token id from 0 to"),
        ({"pad_token": -4}, "pad_token = -4: expected"),
        ({"samples": 10**15}, "exceed the supported size"),
    ],
)
def test_invalid_values_are_named(wrong, message):
    with pytest.raises(DataError, match=message):
        PretrainingDataset(**{"source": NAMES[0], "sequence_length": 8, **wrong})


def test_longer_blend_extends_shorter_one(tmp_path):
    datasets = [PretrainingDataset(_write_pair(tmp_path / name, seed), 8, 60) for seed, name in enumerate("ab")]
    short, long = (BlendedDataset(datasets, [0.3, 0.7], samples) for samples in (20, 40))
    assert short.order_key == long.order_key != BlendedDataset(datasets).order_key
    assert long.order.dataset[: len(short)].tolist() == short.order.dataset.tolist()


def test_per_split_paths_and_argument_files(tmp_path):
    arguments = {"seq-length": 8, "train-iters": 2, "global-batch-size": 2, "eval-iters": 1}
    splits = datasets_from_megatron_args({**arguments, "train-data-path": NAMES[0], "valid-data-path": NAMES})
    assert splits.test is None and len(splits.valid.datasets) == 2
    file = tmp_path / "splits.json"
    file.write_text(json.dumps({"train": [NAMES[0]], "valid": NAMES}))
    from_file = datasets_from_megatron_args({**arguments, "per-split-data-args-path": file})
    assert from_file.train.order_key == splits.train.order_key and from_file.valid.order_key == splits.valid.order_key
    (tmp_path / "data.txt").write_text(f"0.3 {NAMES[0]}\n0.7 {NAMES[1]}\n")
    blend = datasets_from_megatron_args({**arguments, "data-args-path": tmp_path / "data.txt", "split": "1"}).train
    assert blend.order_key["weights"] == [0.3, 0.7] and blend[0]["input_ids"].shape == (8,)
    for text, message in (("{", "is not valid JSON"), ('{"valid": 7}', "expected the paths of each split")):
        file.write_text(text)
        with pytest.raises(DataError, match=message):
            datasets_from_megatron_args({**arguments, "per-split-data-args-path": file})
    with pytest.raises(DataError, match="requires data_path"):
        datasets_from_megatron_args({**arguments, "train-data-path": NAMES[0], "split": "1"})
