"""Samples of masked sentences are those of Megatron-Core's BERT and T5 datasets."""

import functools
import random
import types
import warnings

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForPreTraining,
    BertTokenizer,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_megatron.datasets.blended import BlendedDataset
from hf_megatron.datasets.indexed import IndexedDataset
from hf_megatron.datasets.indexed_writer import IndexedWriter
from hf_megatron.datasets.masked import BertDataset, T5Dataset
from hf_megatron.datasets.masking import Masking
from hf_megatron.datasets.megatron_arguments import datasets_from_megatron_args
from hf_megatron.datasets.pretraining import PretrainingDataset
from hf_megatron.datasets.sentence_index import sentence_order
from hf_megatron.errors import DataError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]"]
SENTINELS = 24


@pytest.fixture(scope="module")
def tokenizer():
    tokens = [*SPECIAL, *(f"<extra_id_{number}>" for number in range(SENTINELS))]
    tokens += [f"##{number}" if number % 3 == 0 else f"word{number}" for number in range(60)]
    return BertTokenizer({token: number for number, token in enumerate(tokens)}, bos_token="[BOS]", eos_token="[EOS]")


@pytest.fixture(scope="module")
def one_process():
    """Datasets of megatron-core ask for the rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def sentences(path, drawn, size, longest=30, tokens=None):
    """A pair of documents of some sentences, some of them empty."""
    with IndexedWriter(path, "uint16") as writer:
        for _ in range(drawn.randrange(3, 20)):
            writer.add_document([
                [drawn.randrange(len(SPECIAL) + SENTINELS, size) for _ in range(drawn.randrange(1, longest))]
                for _ in range(drawn.choice([1, 1, 2, 3, 8]))
            ])  # fmt: skip
    return str(path)


def draw(drawn):
    masking = Masking(
        probability=drawn.choice([0.15, 0.3, 0.5]),
        short_sequence_probability=drawn.choice([0.0, 0.1, 0.5]),
        max_ngram=drawn.choice([1, 3, 10]),
        full_words=drawn.random() < 0.7,
        longer_ngrams=drawn.random() < 0.3,
        geometric=drawn.random() < 0.3,
    )
    return masking, drawn.randrange(10, 64), drawn.choice([1, 20, 100]), drawn.randrange(1, 2**31)


def peer_dataset(module, name, prefix, tokenizer, masking, length, samples, seed, cache, **options):
    """Megatron-Core's dataset of all documents."""
    datasets = pytest.importorskip(f"megatron.core.datasets.{module}")
    from megatron.core.datasets.indexed_dataset import IndexedDataset as PeerIndexed
    from megatron.core.datasets.utils import Split

    vocabulary = {number: token for token, number in tokenizer.get_vocab().items()}
    words = types.SimpleNamespace(
        cls=tokenizer.cls_token_id,
        sep=tokenizer.sep_token_id,
        mask=tokenizer.mask_token_id,
        pad=tokenizer.pad_token_id,
        bos=tokenizer.bos_token_id,
        eos=tokenizer.eos_token_id,
        inv_vocab=dict(sorted(vocabulary.items())),
        additional_special_tokens_ids=list(range(len(SPECIAL), len(SPECIAL) + SENTINELS)),
        unique_identifiers={},
    )
    config = getattr(datasets, f"{name}Config")(
        random_seed=seed,
        sequence_length=length,
        blend=([prefix], None),
        split="1",
        path_to_cache=str(cache),
        tokenizer=words,
        masking_probability=masking.probability,
        short_sequence_probability=masking.short_sequence_probability,
        masking_max_ngram=masking.max_ngram,
        masking_do_full_word=masking.full_words,
        masking_do_permutation=False,
        masking_use_longer_ngrams=masking.longer_ngrams,
        masking_use_geometric_distribution=masking.geometric,
        **options,
    )
    source = PeerIndexed(prefix)
    documents = np.arange(len(source.document_indices) - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(datasets, name)(source, prefix, documents, samples, Split.train, config)


@pytest.mark.parametrize("seed", range(20))
def test_bert_equals_megatron_core(tmp_path, one_process, tokenizer, seed):
    """Five draws each; every sample's tokens, types, masks and labels."""
    drawn, compared = random.Random(seed), 0
    for number in range(5):
        prefix = sentences(tmp_path / f"pair{number}", drawn, len(tokenizer), drawn.choice([5, 30]))
        masking, length, samples, start = draw(drawn)
        pairs = drawn.random() < 0.6
        try:
            dataset = BertDataset(
                prefix, length, samples, tokenizer=tokenizer, masking=masking, pairs=pairs, seed=start, cache=tmp_path
            )
        except DataError as error:
            # Megatron-Core would read the documents for ever.
            assert "documents make no sample" in str(error)
            continue
        peer = peer_dataset(
            "bert_dataset", "BERTMaskedWordPieceDataset", prefix, tokenizer, masking, length, samples, start,
            tmp_path / f"peer{number}", classification_head=pairs,
        )  # fmt: skip
        assert len(peer) == len(dataset)
        for sample in range(0, len(dataset), max(1, len(dataset) // 40)):
            found, wanted = dataset[sample], peer[sample]
            assert found["input_ids"].tolist() == wanted["text"].tolist()
            assert found["token_type_ids"].tolist() == wanted["types"].tolist()
            assert found["attention_mask"].tolist() == wanted["padding_mask"].tolist()
            assert (found["labels"] != -100).long().tolist() == wanted["loss_mask"].tolist()
            places = wanted["loss_mask"] == 1
            assert found["labels"][places].tolist() == wanted["labels"][places].tolist()
            assert (found["next_sentence_label"].item() if pairs else 0) == wanted["is_random"]
            compared += 1
    assert compared


@pytest.mark.parametrize("seed", range(20))
def test_t5_equals_megatron_core(tmp_path, one_process, tokenizer, seed):
    drawn, compared = random.Random(seed), 0
    for number in range(5):
        prefix = sentences(tmp_path / f"pair{number}", drawn, len(tokenizer), drawn.choice([5, 30]))
        masking, length, samples, start = draw(drawn)
        try:
            dataset = T5Dataset(
                prefix, length, 64, samples, tokenizer=tokenizer, masking=masking, seed=start, cache=tmp_path
            )
        except DataError as error:
            assert "documents make no sample" in str(error)
            continue
        peer = peer_dataset(
            "t5_dataset", "T5MaskedWordPieceDataset", prefix, tokenizer, masking, length, samples, start,
            tmp_path / f"peer{number}", sequence_length_decoder=64,
        )  # fmt: skip
        assert len(peer) == len(dataset)
        for sample in range(0, len(dataset), max(1, len(dataset) // 40)):
            try:
                found = dataset[sample]
            except DataError as error:
                assert "masked spans" in str(error)
                with pytest.raises(IndexError):
                    peer[sample]
                continue
            wanted = peer[sample]
            assert found["input_ids"].tolist() == wanted["text_enc"].tolist()
            assert found["decoder_input_ids"].tolist() == wanted["text_dec"].tolist()
            assert found["attention_mask"].tolist() == wanted["enc_mask"].tolist()
            assert found["decoder_attention_mask"].tolist() == wanted["dec_mask"].tolist()
            is_counted = wanted["loss_mask"] == 1
            assert (found["labels"] != -100).tolist() == is_counted.tolist()
            assert found["labels"][is_counted].tolist() == wanted["labels"][is_counted].tolist()
            compared += 1
    assert compared


def test_orders_equal_those_of_megatron_core():
    """Long sentences, documents without any, other parts of the documents, several epochs, all probabilities."""
    helpers = pytest.importorskip("megatron.core.datasets.helpers")
    drawn, compared = random.Random(0), 0
    for _ in range(300):
        counts = [drawn.choice([0, 1, 1, 2, 3, 9]) for _ in range(drawn.randrange(1, 30))]
        lengths = np.asarray([drawn.choice([drawn.randrange(100), 5, 512, 513]) for _ in range(sum(counts))], np.int32)
        ends = np.cumsum([0, *counts])
        first = drawn.randrange(len(counts))
        part = ends[first : drawn.randrange(first + 1, len(counts) + 1) + 1]
        length, seed, samples = drawn.randrange(2, 200), drawn.randrange(1, 2**31 - 1), drawn.choice([1, 50, 1000])
        short, least = drawn.choice([0, 0.1, 0.15, 0.5, 1.0]), drawn.choice([1, 2])
        try:
            order, _ = sentence_order(
                lengths, part, length, samples, seed, short_probability=short, least_sentences=least
            )
        except DataError:
            continue
        peer = helpers.build_mapping(part, lengths, 2**31 - 2, samples, length, short, seed, False, least)
        assert order.dtype == peer.dtype and np.array_equal(order, peer)
        compared += 1
    assert compared > 150


def test_models_take_the_samples(tmp_path, tokenizer):
    """Only masked tokens, and tokens of spans, count in the loss."""
    prefix = sentences(tmp_path / "pair", random.Random(0), len(tokenizer))
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertConfig(intermediate_size=16, **sizes)
    row = {name: value[None] for name, value in BertDataset(prefix, 32, tokenizer=tokenizer)[0].items()}
    torch.manual_seed(0)
    model = BertForPreTraining(bert).eval()
    outputs = model(**row)
    targets = torch.nn.functional.cross_entropy(outputs.prediction_logits[0], row["labels"][0])
    order = torch.nn.functional.cross_entropy(outputs.seq_relationship_logits, row["next_sentence_label"])
    torch.testing.assert_close(outputs.loss, targets + order)
    alone = {name: value[None] for name, value in BertDataset(prefix, 32, tokenizer=tokenizer, pairs=False)[0].items()}
    assert "next_sentence_label" not in alone
    AutoModelForMaskedLM.from_config(bert)(**alone).loss.backward()
    t5 = T5Config(vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    row = {name: value[None] for name, value in T5Dataset(prefix, 32, 32, tokenizer=tokenizer)[0].items()}
    outputs = T5ForConditionalGeneration(t5).eval()(**row)
    torch.testing.assert_close(outputs.loss, torch.nn.functional.cross_entropy(outputs.logits[0], row["labels"][0]))


def test_orders_have_keys_of_all_that_samples_depend_on(tmp_path, tokenizer):
    prefix = sentences(tmp_path / "pair", random.Random(0), len(tokenizer))
    given = {"sequence_length": 24, "tokenizer": tokenizer}
    keys = [BertDataset(prefix, **given).order_key]
    for change in ({"seed": 2}, {"pairs": False}, {"masking": Masking(0.3)}, {"share": (0.0, 0.5)}, {"samples": 500}):
        keys.append(BertDataset(prefix, **given, **change, cache=tmp_path / "cache").order_key)
    keys.append(T5Dataset(prefix, target_length=24, **given).order_key)
    assert all(one != other for place, one in enumerate(keys) for other in keys[:place])
    kept = BertDataset(prefix, **given, samples=500, cache=tmp_path / "cache")
    assert np.array_equal(kept.order, BertDataset(prefix, **given, samples=500).order)


def test_what_makes_no_samples_is_refused(tmp_path, tokenizer):
    prefix = sentences(tmp_path / "pair", random.Random(0), len(tokenizer))
    given = {"source": prefix, "sequence_length": 24, "tokenizer": tokenizer}
    for change, message in (
        ({"sequence_length": 4}, "expected 5 or more"),
        ({"seed": 0}, "and 1 or more"),
        ({"sequence_length": "24"}, "expected an integer"),
        ({"share": (0.5, 0.5)}, "none of its .* documents is in the share"),
        ({"masking": "words"}, "masking = 'words': expected a Masking"),
    ):
        with pytest.raises(DataError, match=message):
            BertDataset(**{**given, **change})
    for probability in (0.0, "0.15"):
        with pytest.raises(DataError, match="probabilities between 0 and 1"):
            Masking(probability)
    with pytest.raises(DataError, match="tokenizer = 'name': expected a transformers tokenizer"):
        BertDataset(**{**given, "tokenizer": "name"})
    with IndexedWriter(tmp_path / "special", "uint16") as writer:
        writer.add_document([[2, 40, 3], [2, 41, 3]])
    with pytest.raises(DataError, match="with add_special_tokens=False"):
        BertDataset(**{**given, "source": str(tmp_path / "special")})[0]
    for change in ({"sentinels": [10**7]}, {"begin": "x"}):
        with pytest.raises(DataError, match="expected token ids"):
            T5Dataset(**given, target_length=24, **change)
    with IndexedWriter(tmp_path / "long", "uint16") as writer:
        writer.add_document([[40] * 600, [41]])
    with pytest.raises(DataError, match="1 documents make no sample of 2 sentences"):
        BertDataset(**{**given, "source": str(tmp_path / "long")})
    with IndexedWriter(tmp_path / "beyond", "uint16") as writer:
        writer.add_document([[40], [len(tokenizer)]])
    with pytest.raises(DataError, match=f"contains token {len(tokenizer)}, but the tokenizer has {len(tokenizer)}"):
        BertDataset(**{**given, "source": str(tmp_path / "beyond")})[0]
    with pytest.raises(DataError, match="tokens for the decoder"):
        [T5Dataset(**given, target_length=3)[sample] for sample in range(5)]
    bare = BertTokenizer({token: number for number, token in enumerate(SPECIAL)})
    with pytest.raises(DataError, match="has no eos_token"):
        T5Dataset(**{**given, "tokenizer": bare}, target_length=24)
    bare.eos_token = "[EOS]"
    with pytest.raises(DataError, match="has no <extra_id_0>"):
        T5Dataset(**{**given, "tokenizer": bare}, target_length=24)
    causal = PretrainingDataset(IndexedDataset(prefix), 8)
    with pytest.raises(DataError, match="with and without next-token labels"):
        BlendedDataset([BertDataset(**given), causal])


def test_splits_and_blends_of_arguments(tmp_path, tokenizer):
    prefixes = [sentences(tmp_path / name, random.Random(seed), len(tokenizer)) for seed, name in enumerate("ab")]
    given = {"data-path": prefixes, "seq-length": 24, "train-iters": 4, "global-batch-size": 2, "split": "50,50,0"}
    bert = functools.partial(BertDataset, tokenizer=tokenizer)
    found = datasets_from_megatron_args({**given, "data-cache-path": tmp_path / "cache"}, dataset=bert)
    assert not found.train.is_shifted and len(found.train.datasets) == 2
    alone = BertDataset(prefixes[1], 24, share=(0.0, 0.5), tokenizer=tokenizer)
    assert found.train.datasets[1].order_key == alone.order_key
    with pytest.raises(DataError, match="eod_token: only valid for PretrainingDataset"):
        datasets_from_megatron_args(given, dataset=bert, eod_token=3)
