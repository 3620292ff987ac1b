"""`hf-megatron data`: inspects, verifies, builds and merges Megatron's indexed datasets, and prints sample order."""

from pathlib import Path
from typing import Annotated

import typer

from .exit_codes import failing

app = typer.Typer(help="Megatron's indexed datasets (.bin and .idx).", no_args_is_help=True)

_Prefix = Annotated[str, typer.Argument(help="Path of the dataset without .bin and .idx.")]
_Multimodal = Annotated[bool, typer.Option(help="The dataset stores a mode per sequence; its files do not say so.")]


@app.command("info", epilog="Example: hf-megatron data info corpus_text_document")
def show_size(prefix: _Prefix, multimodal: _Multimodal = False) -> None:
    """Print the size of a dataset as its index states it."""
    from ..datasets.indexed import IndexedDataset

    with failing():
        dataset = IndexedDataset(prefix, multimodal=multimodal)
        documents = len(dataset.documents) - 1
        typer.echo(
            f"{prefix}: {len(dataset):,} sequences in {documents:,} documents, {dataset.tokens:,} tokens of "
            f"{dataset.dtype}, {dataset.tokens / len(dataset):.1f} a sequence"
        )


@app.command("verify", epilog="Example: hf-megatron data verify corpus_text_document --vocab-size 32000")
def verify_dataset(
    prefix: _Prefix,
    vocab_size: Annotated[int | None, typer.Option(min=1, help="Reject tokens of this value or higher.")] = None,
    multimodal: _Multimodal = False,
) -> None:
    """Read every token of a dataset; fails if it is damaged or has tokens outside the vocabulary."""
    from ..datasets.indexed import IndexedDataset

    with failing():
        counted = IndexedDataset(prefix, multimodal=multimodal).verify(vocab_size)
        typer.echo(f"{prefix}: " + ", ".join(f"{name} {value:,}" for name, value in counted.items()))


@app.command("build", epilog="Example: hf-megatron data build corpus docs.jsonl --tokenizer gpt2 --append-eod")
def build_dataset(
    prefix: _Prefix,
    sources: Annotated[
        list[str], typer.Argument(help="Input: .jsonl, .parquet or .txt files (.gz too), or dataset folders.")
    ],
    tokenizer: Annotated[str, typer.Option(help="Hub repository or local folder.")],
    key: Annotated[str, typer.Option(help="JSON key or column with the text.")] = "text",
    append_eod: Annotated[bool, typer.Option("--append-eod", help="Append the eos_token to each document.")] = False,
    special_tokens: Annotated[bool, typer.Option(help="Add the tokenizer's special tokens.")] = True,
) -> None:
    """Tokenize texts into a dataset.

    After an interruption the same command resumes.
    """
    from transformers import AutoTokenizer

    from ..datasets.build import build_pair

    with failing():
        loaded_tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        summary = build_pair(
            prefix,
            sources,
            loaded_tokenizer,
            key=key,
            append_eod=append_eod,
            special_tokens=special_tokens,
            say=typer.echo,
        )
        typer.echo(f"{prefix}: {summary}")


@app.command("merge", epilog="Example: hf-megatron data merge both part1 part2")
def merge_dataset_files(
    target: Annotated[str, typer.Argument(help="Output path without .bin and .idx.")],
    sources: Annotated[list[str], typer.Argument(help="Paths of the datasets, without .bin and .idx.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing dataset.")] = False,
) -> None:
    """Concatenate datasets of one dtype."""
    from ..datasets.indexed import IndexedDataset
    from ..datasets.indexed_writer import merge_datasets

    with failing():
        merge_datasets(target, sources, overwrite=overwrite)
        typer.echo(f"{target}: {len(IndexedDataset(target)):,} sequences of {len(sources)} pairs")


@app.command("samples", epilog="Example: hf-megatron data samples corpus_text_document --seq-length 4096")
def show_samples(
    prefix: _Prefix,
    seq_length: Annotated[int, typer.Option(min=1, help="Tokens per sample.")],
    seed: Annotated[int, typer.Option(min=0, help="Random seed, as Megatron's --seed.")] = 1234,
    split: Annotated[str, typer.Option(help="Weights of the train, valid and test splits.")] = "969,30,1",
    part: Annotated[str, typer.Option(help="Split to print: train, valid or test.")] = "train",
    samples: Annotated[int | None, typer.Option(min=1, help="Number of samples; default: one epoch.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Number of samples to print.")] = 10,
) -> None:
    """Print the documents and token ranges of the first samples, in Megatron-Core's GPTDataset order."""
    from ..datasets.indexed import IndexedDataset
    from ..datasets.sample_index import SPLITS, list_split_documents, parse_split, sample_order
    from ..errors import ConfigError

    with failing():
        dataset, shares = IndexedDataset(prefix), dict(zip(SPLITS, parse_split(split), strict=True))
        if part not in shares:
            raise ConfigError(f"--part {part}: expected one of {', '.join(SPLITS)}.")
        share = shares[part]
        if share is None:
            raise ConfigError(f"--split {split}: the {part} split of {Path(prefix).name} is empty.")
        order = sample_order(dataset.lengths, list_split_documents(share, len(dataset)), seq_length, samples, seed)
        typer.echo(
            f"{len(order):,} samples of {seq_length} tokens in {order.epochs} epoch{'s' if order.epochs > 1 else ''}"
        )
        for number in range(min(limit, len(order))):
            pieces = order.pieces(number)
            texts = [f"{document}[{start}:{'' if count < 0 else start + count}]" for document, start, count in pieces]
            more = f" and {len(texts) - 4} more" if len(texts) > 4 else ""
            typer.echo(f"{number:>8}  document {', '.join(texts[:4])}{more}")
