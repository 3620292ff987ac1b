"""`hf-megatron data`: inspects, verifies, builds and merges Megatron's indexed datasets, and prints sample order."""

from pathlib import Path
from typing import Annotated

import typer

from .exit_codes import failing

app = typer.Typer(help="Megatron's indexed datasets (.bin and .idx).", no_args_is_help=True)

_Prefix = Annotated[str, typer.Argument(help="Path of both files without .bin and .idx.")]
_Multimodal = Annotated[bool, typer.Option(help="Whether each sequence has a mode, which the file does not say.")]


@app.command("info")
def say_what_it_holds(prefix: _Prefix, multimodal: _Multimodal = False) -> None:
    """Print the contents of a dataset according to its index."""
    from ..datasets.indexed import IndexedDataset

    with failing():
        dataset = IndexedDataset(prefix, multimodal=multimodal)
        documents = len(dataset.documents) - 1
        typer.echo(
            f"{prefix}: {len(dataset):,} sequences in {documents:,} documents, {dataset.tokens:,} tokens of "
            f"{dataset.dtype}, {dataset.tokens / len(dataset):.1f} a sequence"
        )


@app.command("verify")
def read_all(
    prefix: _Prefix,
    vocab_size: Annotated[int | None, typer.Option(min=1, help="Tokens have to be below it.")] = None,
    multimodal: _Multimodal = False,
) -> None:
    """Read a dataset to its end; exits with 1 if it is damaged or has tokens beyond the vocabulary."""
    from ..datasets.indexed import IndexedDataset
    from ..errors import DataError

    with failing(DataError):
        counted = IndexedDataset(prefix, multimodal=multimodal).verify(vocab_size)
        typer.echo(f"{prefix}: " + ", ".join(f"{name} {value:,}" for name, value in counted.items()))


@app.command("build")
def tokenise(
    prefix: _Prefix,
    sources: Annotated[list[str], typer.Argument(help="Files: .jsonl, .parquet, .txt (.gz), or datasets' folders.")],
    tokenizer: Annotated[str, typer.Option(help="Name on the Hub, or a folder.")],
    key: Annotated[str, typer.Option(help="Of a line's object, or the column.")] = "text",
    append_eod: Annotated[bool, typer.Option("--append-eod", help="End each document with the eos_token.")] = False,
    special_tokens: Annotated[bool, typer.Option(help="With those that the tokenizer puts around a text.")] = True,
) -> None:
    """Tokenize texts into a dataset; after an interruption the same command resumes."""
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


@app.command("merge")
def join(
    target: Annotated[str, typer.Argument(help="Path of both files that are written, without .bin and .idx.")],
    sources: Annotated[list[str], typer.Argument(help="Pairs of one type, whose documents follow each other.")],
    overwrite: Annotated[bool, typer.Option(help="Replace what is there.")] = False,
) -> None:
    """Write the documents of several datasets into one."""
    from ..datasets.indexed import IndexedDataset
    from ..datasets.indexed_writer import merge_datasets

    with failing():
        merge_datasets(target, sources, overwrite=overwrite)
        typer.echo(f"{target}: {len(IndexedDataset(target)):,} sequences of {len(sources)} pairs")


@app.command("samples")
def show_samples(
    prefix: _Prefix,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of a sample.")],
    seed: Annotated[int, typer.Option(min=0, help="Of Megatron's --seed.")] = 1234,
    split: Annotated[str, typer.Option(help="Weights of train, valid and test.")] = "969,30,1",
    part: Annotated[str, typer.Option(help="train, valid or test.")] = "train",
    samples: Annotated[int | None, typer.Option(min=1, help="How many are asked for; one epoch by default.")] = None,
    printed: Annotated[int, typer.Option("--print", min=1, help="How many of the first are printed.")] = 10,
) -> None:
    """Print the documents and token ranges of the first samples, in the order of Megatron-Core's GPTDataset."""
    from ..datasets.indexed import IndexedDataset
    from ..datasets.sample_index import SPLITS, list_split_documents, parse_split, sample_order
    from ..errors import DataError

    with failing():
        dataset, shares = IndexedDataset(prefix), dict(zip(SPLITS, parse_split(split), strict=True))
        if part not in shares:
            raise DataError(f"--part {part}: expected one of {', '.join(SPLITS)}.")
        share = shares[part]
        if share is None:
            raise DataError(f"--split {split}: the {part} split of {Path(prefix).name} is empty.")
        order = sample_order(dataset.lengths, list_split_documents(share, len(dataset)), seq, samples, seed)
        typer.echo(f"{len(order):,} samples of {seq} tokens in {order.epochs} epoch{'s' if order.epochs > 1 else ''}")
        for number in range(min(printed, len(order))):
            pieces = order.pieces(number)
            texts = [f"{document}[{start}:{'' if count < 0 else start + count}]" for document, start, count in pieces]
            more = f" and {len(texts) - 4} more" if len(texts) > 4 else ""
            typer.echo(f"{number:>8}  document {', '.join(texts[:4])}{more}")
