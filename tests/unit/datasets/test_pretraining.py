"""Samples are those of Megatron-Core's GPTDataset; kept indices are read where they fit; arguments are Megatron's."""

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


def _pair(path, seed=0, documents=40, longest=30, vocabulary=50):
    """A pair with empty documents, and tokens that end documents within them."""
    drawn = random.Random(seed)
    with IndexedWriter(path, "uint16") as writer:
        for _ in range(documents):
            writer.add_document([[drawn.randrange(vocabulary) for _ in range(drawn.randrange(longest))]])
    return str(path)


def _digest(values):
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]


class _Tokenizer:
    """What Megatron-Core's datasets ask a tokenizer."""

    vocab_size, eod, unique_identifiers = 50, EOD, {}

    @property
    def pad(self):
        raise NotImplementedError

    eos = pad


def _peer(prefixes, weights, split, length, samples, seed, cache, **options):
    """The three datasets that megatron-core builds, as lists."""
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
    """Blends of megatron-core ask for the rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("seed", range(25))
def test_samples_equal_megatron_core(tmp_path, one_process, seed):
    """Twenty draws each of files, splits, weights, lengths and masks: every token, label, mask and position."""
    drawn, compared = random.Random(seed), 0
    for draw in range(20):
        folder = tmp_path / str(draw)
        folder.mkdir()
        count = drawn.choice([1, 1, 2, 3])
        prefixes = [
            _pair(folder / f"{number}", drawn.random(), drawn.randrange(8, 50), drawn.randrange(8, 40))
            for number in range(count)
        ]
        weights = [drawn.choice([0.2, 0.5, 3.0, 7.0]) for _ in prefixes] if drawn.random() < 0.6 else None
        split, length = drawn.choice(["90,5,5", "80,20,0", "1", "60,30,10"]), drawn.randrange(2, 24)
        masked, restarts = drawn.random() < 0.5, drawn.random() < 0.5
        given = {
            "data-path": [word for pair in zip(weights, prefixes, strict=True) for word in pair]
            if weights
            else prefixes,
            "split": split,
            "seq-length": length,
            "seed": drawn.randrange(1, 100),
            "global-batch-size": drawn.randrange(1, 5),
            "train-iters": drawn.randrange(1, 80),
            "eval-interval": drawn.randrange(1, 40),
            "eval-iters": drawn.randrange(1, 3),
            "eod-mask-loss": masked,
            "reset-position-ids": restarts,
            "reset-attention-mask": restarts,
        }
        if count == 2 and weights is None:
            # Two names would be a weight and a name to Megatron only where the first is a number.
            assert not any(name.replace(".", "").isdigit() for name in prefixes)
        batch = given["global-batch-size"]
        rounds = (given["train-iters"] // given["eval-interval"] + 1) * given["eval-iters"] * batch
        sizes = [given["train-iters"] * batch, rounds, given["eval-iters"] * batch]
        try:
            found = datasets_from_megatron_args(given, eod_token=EOD)
        except DataError as error:
            # A part of which megatron-core tries to make epochs for ever, or whose samples it does not have.
            assert re.search("no sample can be made|make no sample of|none of its .* is in the share", str(error)), (
                error
            )
            continue
        compared += 1
        options = {"eod_mask_loss": masked, "reset_position_ids": restarts}
        peers = _peer(prefixes, weights, split, length, sizes, given["seed"], folder / "cache", **options)
        for ours, peer, size in zip((found.train, found.valid, found.test), peers, sizes, strict=True):
            if not size:
                continue
            assert (ours is None) == (peer is None)
            if ours is None:
                continue
            assert len(ours) == len(peer)
            for number in {0, 1, len(ours) // 2, len(ours) - 1} & set(range(len(ours))):
                sample, other = ours[number], peer[number]
                assert sample["input_ids"].tolist() == other["tokens"].tolist()
                is_counted = other["loss_mask"] == 1
                assert sample["labels"][is_counted].tolist() == other["labels"][is_counted].tolist()
                assert ((sample["shift_labels"] == -100) == ~is_counted).all()
                places = sample.get("position_ids", torch.arange(length))
                assert places.tolist() == other["position_ids"].tolist()
        shutil.rmtree(folder)
    assert compared >= 10


def test_blends_equal_golden_vectors(tmp_path):
    given = {
        "data-path": ["0.3", NAMES[0], "0.7", NAMES[1]],
        "split": "90,10,0",
        "seq-length": 32,
        "train-samples": 200,
        "eval-iters": 1,
        "global-batch-size": 20,
    }
    found = datasets_from_megatron_args(given)
    assert [len(dataset) for dataset in found.train.datasets] == [166, 146]
    assert _digest(found.train.order.dataset) == "7c3b0fd5bba97b22"
    assert _digest(found.train.order.sample) == "4fd38226e3db3581"
    assert found.test is None
    datasets = [PretrainingDataset(name, 32, share=(0.0, 0.9)) for name in NAMES]
    blend = BlendedDataset(datasets)
    assert (len(blend), _digest(blend.order.dataset)) == (172, "a4018939a6d700b9")
    assert _digest(blend.order.sample) == "f354d01ac35fe15f"


def test_the_last_sample_is_filled_up(tmp_path):
    prefix = tmp_path / "pair"
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_document([list(range(1, 8))])
    dataset = PretrainingDataset(prefix, 4, drop_last_partial=False)
    assert len(dataset) == 2
    rows = sorted((dataset[number] for number in range(2)), key=lambda row: -int(row["input_ids"][0] == 1))
    assert rows[0]["input_ids"].tolist() == [1, 2, 3, 4] and rows[0]["labels"].tolist() == [2, 3, 4, 5]
    assert rows[1]["input_ids"].tolist() == [5, 6, 7, 0] and rows[1]["labels"].tolist() == [6, 7, -100, -100]


def test_positions_begin_again_with_documents(tmp_path):
    prefix = tmp_path / "pair"
    with IndexedWriter(prefix, "uint16") as writer:
        for document in ([1, 2, 3], [], [4, EOD], [5, 6, 8, 9, 10, 11]):
            writer.add_document([document])
    for restart in ("documents", "eod"):
        dataset = PretrainingDataset(prefix, 10, restart=restart, eod_token=EOD)
        [(_, sizes), row] = dataset.tokens(0), dataset[0]
        if restart == "documents":
            expected = [place for size in sizes for place in range(size)][:10]
        else:
            tokens = row["input_ids"].tolist()
            begin = tokens.index(EOD) + 1
            expected = [*range(begin), *range(10 - begin)]
        assert row["position_ids"].tolist() == expected


@pytest.mark.parametrize("options", [{}, {"add_extra_token_to_sequence": False}], ids=["one more", "no more"])
@pytest.mark.parametrize("samples", [30, 400])
def test_what_megatron_core_kept_is_read(tmp_path, one_process, monkeypatch, samples, options):
    """Where its description and its samples are those asked for: a description does not say how they end."""
    prefix, cache = _pair(tmp_path / "pair", documents=60), tmp_path / "cache"
    _peer([prefix], None, "90,10,0", 8, [samples, 10, 10], 5, cache, **options)
    given = {"sequence_length": 8, "samples": samples, "seed": 5, "share": (0.0, 0.9), "cache": cache}
    extra = "add_extra_token_to_sequence" not in options
    plain = PretrainingDataset(prefix, **{**given, "cache": None}, extra_token=extra)
    made = []

    def order(*args, **kwargs):
        made.append(1)
        return sample_order(*args, **kwargs)

    monkeypatch.setattr("hf_megatron.datasets.pretraining.sample_order", order)
    found = PretrainingDataset(prefix, **given, extra_token=extra)
    assert not made and len(found) == len(plain)
    assert found[3]["input_ids"].tolist() == plain[3]["input_ids"].tolist()
    for change in ({"seed": 6}, {"samples": samples + 200}, {"share": (0.0, 0.8)}):
        PretrainingDataset(prefix, **{**given, **change}, extra_token=extra)
    PretrainingDataset(prefix, **given, extra_token=not extra)
    # Files of another size under the same name.
    _pair(tmp_path / "other" / "pair", seed=3, documents=60)
    os.utime(tmp_path / "other" / "pair.idx", ns=(1, 1))
    PretrainingDataset(tmp_path / "other" / "pair", **given, extra_token=extra)
    assert len(made) == 5
    # The same files, written again after Megatron's.
    os.utime(f"{prefix}.idx")
    PretrainingDataset(prefix, **given, extra_token=extra)
    assert len(made) == 6


@pytest.mark.parametrize("weights", [[0.3, 0.7], [3.0, 1.0, 2.0], None])
def test_blends_that_megatron_core_kept_are_read(tmp_path, one_process, monkeypatch, weights):
    prefixes = [_pair(tmp_path / f"pair{number}", number, 60) for number in range(3 if weights and weights[2:] else 2)]
    cache, samples = tmp_path / "cache", 80
    train, *_ = _peer(prefixes, weights, "90,10,0", 8, [samples, 10, 10], 5, cache)
    given = {"data-path": [word for pair in zip(weights or prefixes, prefixes, strict=True) for word in pair]}
    given["data-path"] = given["data-path"] if weights else prefixes
    given |= {"seq-length": 8, "train-samples": samples, "global-batch-size": 10, "eval-iters": 1, "seed": 5}
    given |= {"split": "90,10,0", "eval-interval": 1000}
    made, plain = [], datasets_from_megatron_args(given).train

    def order(*args):
        made.append(args)
        return blend_order(*args)

    monkeypatch.setattr("hf_megatron.datasets.blended.blend_order", order)
    # What is read is kept in a folder of its own, and then read from there.
    for _ in range(2):
        found = datasets_from_megatron_args({**given, "data-cache-path": cache}).train
        assert len(found) == len(plain) == len(train) and not made
        assert np.array_equal(found.order.dataset, plain.order.dataset)
        assert np.array_equal(found.order.sample, plain.order.sample)
    datasets_from_megatron_args({**given, "data-cache-path": cache, "train-samples": 81})
    assert made
    [damaged] = cache.glob("*BlendedDataset-train-dataset_index.npy")
    np.save(damaged, np.zeros(len(train), np.int16))
    for folder in cache.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    made.clear()
    again = datasets_from_megatron_args({**given, "data-cache-path": cache}).train
    assert made and np.array_equal(again.order.dataset, plain.order.dataset)


# Kept indices


def _arrays():
    return {"one": np.arange(5), "two": np.ones((2, 3), np.int16)}


def test_kept_indices_are_read_only_where_their_key_fits(tmp_path):
    made = []

    def make():
        made.append(1)
        return _arrays()

    for key in ({"a": 1}, {"a": 1}, {"a": 2}, {"a": 1}):
        found = cached_arrays(key, tmp_path, make)
        assert {name: array.tolist() for name, array in found.items()} == {
            name: array.tolist() for name, array in _arrays().items()
        }
    assert len(made) == 2
    # What is damaged is made again.
    [folder] = [
        path for path in tmp_path.iterdir() if path.is_dir() and '\\"a\\": 2' in (path / "key.json").read_text()
    ]
    content = (folder / "one.npy").read_bytes()
    (folder / "one.npy").write_bytes(content[:-8])
    assert cached_arrays({"a": 2}, tmp_path, make)["one"].tolist() == [0, 1, 2, 3, 4]
    (folder / "two.npy").unlink()
    assert cached_arrays({"a": 2}, tmp_path, make)["two"].shape == (2, 3)
    assert len(made) == 4 and (folder / "one.npy").read_bytes() == content


def _build(folder, log):
    def make():
        with open(log, "a") as file:
            file.write("made\n")
        time.sleep(1)
        return {"one": np.arange(1_000_000)}

    assert cached_arrays({"a": 1}, folder, make)["one"][-1] == 999_999


def test_one_of_several_builders_makes_them(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_build, args=(tmp_path / "cache", tmp_path / "log")) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    assert (tmp_path / "log").read_text() == "made\n"


def test_disks_that_take_nothing_cost_no_run(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="kept in memory"):
        assert cached_arrays({"a": 1}, tmp_path / "file" / "cache", _arrays)["one"].tolist() == [0, 1, 2, 3, 4]

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_cache.np, "save", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert cached_arrays({"a": 1}, tmp_path / "cache", _arrays)["one"].tolist() == [0, 1, 2, 3, 4]
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
def test_whatever_an_order_depends_on_makes_another_folder(tmp_path, change):
    prefix, cache = _pair(tmp_path / "pair"), tmp_path / "cache"
    given = {"sequence_length": 8, "samples": 20, "seed": 1}
    first, other = PretrainingDataset(prefix, **given, cache=cache), {**given, **change}
    found, plain = PretrainingDataset(prefix, **other, cache=cache), PretrainingDataset(prefix, **other)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 2
    assert found.order_key == plain.order_key != first.order_key
    for name in ("documents", "starts", "shuffle"):
        assert np.array_equal(getattr(found.order, name), getattr(plain.order, name))


def test_runs_of_as_many_epochs_share_a_folder(tmp_path):
    prefix, cache = _pair(tmp_path / "pair"), tmp_path / "cache"
    tokens = IndexedDataset(prefix).tokens
    for samples in (tokens // 8 // 2, tokens // 8 // 2 + 3):
        PretrainingDataset(prefix, 8, samples, cache=cache)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1
    # Another file of the same name and size.
    os.utime(f"{prefix}.idx", ns=(1, 1))
    PretrainingDataset(prefix, 8, 20, cache=cache)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 2


def test_kept_indices_that_are_damaged_inside(tmp_path):
    prefix, cache = _pair(tmp_path / "pair"), tmp_path / "cache"
    size = len(PretrainingDataset(prefix, 8, cache=cache))
    [file] = cache.glob("*/shuffle.npy")
    file.write_bytes(file.read_bytes()[:-4] + b"\xff" * 4)
    dataset = PretrainingDataset(prefix, 8, cache=cache)
    with pytest.raises(DataError, match=f"sample {size - 1} is out of range .*the cached indices in .* are damaged"):
        dataset[size - 1]


def test_other_processes_map_kept_indices_themselves(tmp_path):
    prefix = _pair(tmp_path / "pair", documents=2000)
    for options in ({"cache": tmp_path / "cache"}, {}):
        datasets = [PretrainingDataset(prefix, 8, **options), PretrainingDataset(prefix, 8, seed=2, **options)]
        blend = BlendedDataset(datasets, [0.5, 0.5], 1000, **options)
        held = pickle.dumps(blend)
        assert (len(held) < 8000) == bool(options)
        again = pickle.loads(held)
        assert len(again) == len(blend) and again.order_key == blend.order_key
        for sample in (0, 500, 999):
            assert again[sample]["input_ids"].tolist() == blend[sample]["input_ids"].tolist()


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
def test_arguments_that_are_wrong_say_so(tmp_path, change, message):
    given = {"data-path": NAMES[0], "seq-length": 8, "train-iters": 2, "global-batch-size": 2}
    with pytest.raises(DataError, match=message):
        datasets_from_megatron_args({**given, **change})


def test_one_prefix_with_a_weight(tmp_path):
    """Megatron forgets the weight where each split has its own files, and takes a blend of one elsewhere."""
    given = {"seq-length": 8, "train-iters": 2, "global-batch-size": 2, "eval-iters": 1}
    assert isinstance(
        datasets_from_megatron_args({**given, "train-data-path": ["1.0", NAMES[0]]}).train, PretrainingDataset
    )
    splits = datasets_from_megatron_args({**given, "data-path": ["1.0", NAMES[0]], "split": "80,10,10"})
    assert isinstance(splits.train, BlendedDataset)
    assert len(splits.evaluation) == 2 and splits.evaluation[1]["labels"].tolist() == splits.valid[1]["labels"].tolist()


def test_batches_that_grow_are_those_of_arguments():
    """More iterations than with batches of full size, and so more evaluations."""
    given = {"data-path": NAMES[0], "seq-length": 8, "train-samples": 40, "eval-interval": 4, "eval-iters": 1}
    grow = {"global-batch-size": 8, "rampup-batch-size": "2 2 12", "split": "60,40,0"}
    found = datasets_from_megatron_args({**given, **grow})
    assert found.train.ramp_up == BatchRampUp(8, start=2, increment=2, samples=12)
    assert found.valid.ramp_up is None and found.train.ramp_up.steps(40) == 7
    plain = datasets_from_megatron_args({**given, **grow, "rampup-batch-size": None})
    assert plain.train.ramp_up is None and plain.train.order_key == found.train.order_key


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
def test_values_of_other_types_are_named(wrong, message):
    with pytest.raises(DataError, match=message):
        PretrainingDataset(**{"source": NAMES[0], "sequence_length": 8, **wrong})


def test_longer_blends_begin_as_shorter_ones(tmp_path):
    datasets = [PretrainingDataset(_pair(tmp_path / name, seed), 8, 60) for seed, name in enumerate("ab")]
    short, long = (BlendedDataset(datasets, [0.3, 0.7], samples) for samples in (20, 40))
    assert short.order_key == long.order_key != BlendedDataset(datasets).order_key
    assert long.order.dataset[: len(short)].tolist() == short.order.dataset.tolist()


def test_paths_of_each_split_and_files_of_arguments(tmp_path):
    given = {"seq-length": 8, "train-iters": 2, "global-batch-size": 2, "eval-iters": 1}
    named = datasets_from_megatron_args({**given, "train-data-path": NAMES[0], "valid-data-path": NAMES})
    assert named.test is None and len(named.valid.datasets) == 2
    file = tmp_path / "splits.json"
    file.write_text(json.dumps({"train": [NAMES[0]], "valid": NAMES}))
    again = datasets_from_megatron_args({**given, "per-split-data-args-path": file})
    assert again.train.order_key == named.train.order_key and again.valid.order_key == named.valid.order_key
    (tmp_path / "data.txt").write_text(f"0.3 {NAMES[0]}\n0.7 {NAMES[1]}\n")
    blend = datasets_from_megatron_args({**given, "data-args-path": tmp_path / "data.txt", "split": "1"}).train
    assert blend.order_key["weights"] == [0.3, 0.7] and blend[0]["input_ids"].shape == (8,)
    for text, message in (("{", "is not valid JSON"), ('{"valid": 7}', "expected the paths of each split")):
        file.write_text(text)
        with pytest.raises(DataError, match=message):
            datasets_from_megatron_args({**given, "per-split-data-args-path": file})
    with pytest.raises(DataError, match="requires data_path"):
        datasets_from_megatron_args({**given, "train-data-path": NAMES[0], "split": "1"})
