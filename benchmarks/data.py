"""Indexed datasets: opening, ordering, tokenizing and reading, compared with megatron-core and plain tokenizers.

    python benchmarks/data.py --out benchmarks/results/data_cpu.json
    python benchmarks/data.py --documents 1000000 --rounds 1 --tokenizer gpt2

Reported are CPU seconds of one single-threaded process (wall seconds for opening); each case runs in its own process,
in turn with its peer; medians over the rounds. The dataset to open is a sparse file of 100 GB with a million documents.
Megatron's encoder is the one of its `tools/preprocess_data.py`: one document per call, text to tokens to ids. The
tokenized text is CPython's documentation and library, with a byte-level BPE trained on it, and with the one of
`--tokenizer`.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import pydoc_data.topics
import resource
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

# Must be set before the libraries that read them are imported.
os.environ.update(OMP_NUM_THREADS="1", RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from train_step import versions, write_report
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_megatron.datasets.build import build_pair
from hf_megatron.datasets.indexed import IndexedDataset
from hf_megatron.datasets.indexed_writer import write_index
from hf_megatron.datasets.pretraining import PretrainingDataset
from hf_megatron.datasets.sample_index import blend_order, sample_order

SPARSE, LENGTH, SAMPLE = 100 * 10**9, 50_000, 4096


def resident():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def in_own_process(function, *arguments):
    """Runs a case in a fresh process, so that its peak memory is not affected by other cases."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, arguments))
    process.start()
    found = receiver.recv()
    process.join()
    return found


def _send(sender, function, arguments):
    with contextlib.redirect_stdout(io.StringIO()):
        found = function(*arguments)
    sender.send(found)


def make_sparse(prefix):
    count = SPARSE // 2 // LENGTH
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(count * LENGTH * 2)
    write_index(Path(f"{prefix}.idx"), np.dtype("uint16"), np.full(count, LENGTH), np.arange(count + 1))


def opened(prefix, cache):
    """Wall seconds and memory in bytes to open a dataset, and to open one whose sample order is cached."""
    # Open it once first, so that imports are not measured.
    IndexedDataset(prefix)
    before, began = resident(), time.perf_counter()
    dataset = IndexedDataset(prefix)
    alone = time.perf_counter() - began
    rows = resident() - before
    before, began = resident(), time.perf_counter()
    PretrainingDataset(dataset, SAMPLE, cache=cache)
    return alone, rows, time.perf_counter() - began, resident() - before


def lengths_of(documents):
    return np.random.default_rng(0).integers(1, 1000, documents, dtype=np.int32)


def ordered(documents):
    lengths = lengths_of(documents)
    began = time.process_time()
    found = sample_order(lengths, np.arange(documents, dtype=np.int32), SAMPLE, None, 1234)
    return time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, _sums(found)


def _sums(order):
    return [int(part.sum(dtype=np.int64)) for part in (order.document_index, order.sample_index, order.shuffle_index)]


def ordered_by_megatron(documents):
    """Runs the functions of Megatron's `GPTDataset._build_document_sample_shuffle_indices`."""
    from megatron.core.datasets import gpt_dataset, helpers

    lengths = lengths_of(documents)
    began = time.process_time()
    stream = np.random.RandomState(1234)
    read = gpt_dataset._build_document_index(np.arange(documents, dtype=np.int32), 1, stream, False)
    tokens = int(lengths.sum(dtype=np.int64))
    starts = helpers.build_sample_idx(lengths, read, SAMPLE, 1, tokens, True, 1)
    shuffle = gpt_dataset._build_shuffle_index(starts.shape[0] - 1, starts.shape[0] - 1, stream)
    taken = time.process_time() - began
    sums = [int(part.sum(dtype=np.int64)) for part in (read, starts, shuffle)]
    return taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, sums


def blended(samples):
    began = time.process_time()
    blend_order([0.5, 0.3, 0.2], samples)
    return time.process_time() - began


def make_texts(folder, characters=12_000_000, size=1500):
    """Writes documents of 1,500 characters, and trains a tokenizer on them."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts)
    parts, length = [*pydoc_data.topics.topics.values()], 0
    for path in files:
        parts.append(path.read_text("utf-8", errors="replace"))
        length += len(parts[-1])
        if length > characters:
            break
    text = "\n".join(parts)
    texts = [text[start : start + size] for start in range(0, len(text), size)]
    with open(folder / "texts.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": one}) + "\n" for one in texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<eos>"]
    )
    tokenizer.train_from_iterator(texts[::8], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder / "tokenizer")


def _texts_and_tokenizer(folder):
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").read_text("utf-8").splitlines()]
    return texts, PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")


def built(folder):
    _, tokenizer = _texts_and_tokenizer(folder)
    with tempfile.TemporaryDirectory() as target:
        began = time.process_time()
        found = build_pair(Path(target) / "pair", [folder / "texts.jsonl"], tokenizer, append_eod=True)
        return (time.process_time() - began) / found.tokens


def encoded_alone(folder):
    texts, tokenizer = _texts_and_tokenizer(folder)
    began, tokens = time.process_time(), 0
    for start in range(0, len(texts), 256):
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts[start : start + 256], add_special_tokens=False)
        tokens += sum(len(encoding.ids) for encoding in encodings)
    return (time.process_time() - began) / tokens


def encoded_by_megatron(folder):
    _, tokenizer = _texts_and_tokenizer(folder)
    began, tokens = time.process_time(), 0
    with open(folder / "texts.jsonl", encoding="utf-8") as lines, open(os.devnull, "wb") as out:
        for line in lines:
            text = json.loads(line)["text"]
            ids = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) + [tokenizer.eos_token_id]
            out.write(np.array(ids, dtype=np.uint16).tobytes())
            tokens += len(ids)
    return (time.process_time() - began) / tokens


def tokenised(folder, rounds):
    """Tokens per CPU second of each method, and the speed of `build_pair` relative to the others in the same round."""
    cases = {"build_pair": built, "encode_batch_fast": encoded_alone, "megatron_encoder": encoded_by_megatron}
    taken = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            taken[name].append(in_own_process(case, folder))
    found = {"tokens_per_cpu_second": {name: round(1 / statistics.median(values)) for name, values in taken.items()}}
    ratios = {
        name: statistics.median(other / one for one, other in zip(taken["build_pair"], taken[name], strict=True))
        for name in ("encode_batch_fast", "megatron_encoder")
    }
    return found | {"build_pair_times_as_fast_as": {name: round(ratio, 3) for name, ratio in ratios.items()}}


def read(prefix, samples=2000):
    """Tokens per CPU second when reading samples in shuffled order, as arrays and as Trainer's samples."""
    dataset = PretrainingDataset(prefix, SAMPLE)
    samples = min(samples, len(dataset))
    for sample in range(samples):
        dataset.tokens(sample)
    began = time.process_time()
    for sample in range(samples):
        dataset.tokens(sample)
    arrays = samples * SAMPLE / (time.process_time() - began)
    began = time.process_time()
    for sample in range(samples):
        dataset[sample]
    return arrays, samples * SAMPLE / (time.process_time() - began)


def make_read(prefix):
    lengths = lengths_of(200_000)
    np.random.default_rng(0).integers(0, 60_000, int(lengths.sum()), dtype=np.uint16).tofile(f"{prefix}.bin")
    write_index(Path(f"{prefix}.idx"), np.dtype("uint16"), lengths, np.arange(len(lengths) + 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000_000)
    parser.add_argument("--blended", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", help="of the Hub, or a folder")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_sparse(folder / "sparse")
        in_own_process(opened, folder / "sparse", folder / "cache")
        rounds = [in_own_process(opened, folder / "sparse", folder / "cache") for _ in range(max(3, given.rounds))]
        names = "seconds", "bytes", "seconds_with_kept_order", "bytes_with_kept_order"
        medians = [statistics.median(values) for values in zip(*rounds, strict=True)]
        results["open_100_gb"] = dict(zip(names, medians, strict=True))
        print(results, flush=True)
        make_texts(folder)
        results["tokenising"] = {"trained": tokenised(folder, given.rounds)}
        if given.tokenizer is not None:
            tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
            tokenizer.save_pretrained(folder / "tokenizer")
            results["tokenising"][f"{len(tokenizer)} tokens"] = tokenised(folder, given.rounds)
        print(results["tokenising"], flush=True)
        make_read(folder / "read")
        reads = [in_own_process(read, folder / "read") for _ in range(given.rounds)]
        arrays, rows = (round(statistics.median(values)) for values in zip(*reads, strict=True))
        results["read_tokens_per_cpu_second"] = {"arrays": arrays, "rows": rows}
        print(results["read_tokens_per_cpu_second"], flush=True)
    results["blend_of_three"] = {"samples": given.blended, "cpu_seconds": in_own_process(blended, given.blended)}
    print(results["blend_of_three"], flush=True)
    orders = {"numpy": [], "megatron": []}
    for _ in range(given.rounds):
        orders["numpy"].append(in_own_process(ordered, given.documents))
        orders["megatron"].append(in_own_process(ordered_by_megatron, given.documents))
    assert orders["numpy"][0][2] == orders["megatron"][0][2]
    results["order"] = {"documents": given.documents}
    for name, values in orders.items():
        seconds, peaks, _ = zip(*values, strict=True)
        results["order"][name] = {"cpu_seconds": statistics.median(seconds), "peak_bytes": statistics.median(peaks)}
    pairs = zip(orders["numpy"], orders["megatron"], strict=True)
    results["order"]["ratio"] = round(statistics.median(one[0] / other[0] for one, other in pairs), 3)
    print(results["order"], flush=True)
    report = {"versions": versions(), "machine": {"cores": os.cpu_count()}, "rounds": given.rounds, "results": results}
    if given.out:
        write_report(given.out, report)


if __name__ == "__main__":
    main()
