"""Tests of BERT and T5 datasets against Megatron-Core."""

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
    tokens = [*SPECIAL, *(f"<extra_id_{index}>" for index in range(SENTINELS))]
    tokens += [f"##{index}" if index % 3 == 0 else f"word{index}" for index in range(60)]
    return BertTokenizer({token: index for index, token in enumerate(tokens)}, bos_token="[BOS]", eos_token="[EOS]")


@pytest.fixture(scope="module")
def one_process():
    """Single-rank process group: the datasets of megatron-core query the rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def write_sentence_pair(path, drawn, size, longest=30, tokens=None):
    """Writes a pair whose documents have random numbers of sentences, and returns its prefix."""
    with IndexedWriter(path, "uint16") as writer:
        for _ in range(drawn.randrange(3, 20)):
            writer.add_document([
                [drawn.randrange(len(SPECIAL) + SENTINELS, size) for _ in range(drawn.randrange(1, longest))]
                for _ in range(drawn.choice([1, 1, 2, 3, 8]))
            ])  # fmt: skip
    return str(path)


def draw_masking(drawn):
    masking = Masking(
        probability=drawn.choice([0.15, 0.3, 0.5]),
        short_sequence_probability=drawn.choice([0.0, 0.1, 0.5]),
        max_ngram=drawn.choice([1, 3, 10]),
        full_words=drawn.random() < 0.7,
        longer_ngrams=drawn.random() < 0.3,
        geometric=drawn.random() < 0.3,
    )
    return masking, drawn.randrange(10, 64), drawn.choice([1, 20, 100]), drawn.randrange(1, 2**31)


def make_peer_dataset(module, name, prefix, tokenizer, masking, length, samples, seed, cache, **options):
    """Returns Megatron-Core's dataset over all documents."""
    datasets = pytest.importorskip(f"megatron.core.datasets.{module}")
    from megatron.core.datasets.indexed_dataset import IndexedDataset as PeerIndexed
    from megatron.core.datasets.utils import Split

    vocabulary = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
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
    """Compares tokens, token types, masks and labels over five random configurations."""
    generator, compared = random.Random(seed), 0
    for index in range(5):
        prefix = write_sentence_pair(tmp_path / f"pair{index}", generator, len(tokenizer), generator.choice([5, 30]))
        masking, length, samples, start = draw_masking(generator)
        pairs = generator.random() < 0.6
        try:
            dataset = BertDataset(
                prefix, length, samples, tokenizer=tokenizer, masking=masking, pairs=pairs, seed=start, cache=tmp_path
            )
        except DataError as error:
            # Megatron-Core would loop over the documents forever.
            assert "documents make no sample" in str(error)
            continue
        peer = make_peer_dataset(
            "bert_dataset", "BERTMaskedWordPieceDataset", prefix, tokenizer, masking, length, samples, start,
            tmp_path / f"peer{index}", classification_head=pairs,
        )  # fmt: skip
        assert len(peer) == len(dataset)
        for sample in range(0, len(dataset), max(1, len(dataset) // 40)):
            item, peer_item = dataset[sample], peer[sample]
            assert item["input_ids"].tolist() == peer_item["text"].tolist()
            assert item["token_type_ids"].tolist() == peer_item["types"].tolist()
            assert item["attention_mask"].tolist() == peer_item["padding_mask"].tolist()
            assert (item["labels"] != -100).long().tolist() == peer_item["loss_mask"].tolist()
            is_masked = peer_item["loss_mask"] == 1
            assert item["labels"][is_masked].tolist() == peer_item["labels"][is_masked].tolist()
            assert (item["next_sentence_label"].item() if pairs else 0) == peer_item["is_random"]
            compared += 1
    assert compared


@pytest.mark.parametrize("seed", range(20))
def test_t5_equals_megatron_core(tmp_path, one_process, tokenizer, seed):
    generator, compared = random.Random(seed), 0
    for index in range(5):
        prefix = write_sentence_pair(tmp_path / f"pair{index}", generator, len(tokenizer), generator.choice([5, 30]))
        masking, length, samples, start = draw_masking(generator)
        try:
            dataset = T5Dataset(
                prefix, length, 64, samples, tokenizer=tokenizer, masking=masking, seed=start, cache=tmp_path
            )
        except DataError as error:
            assert "documents make no sample" in str(error)
            continue
        peer = make_peer_dataset(
            "t5_dataset", "T5MaskedWordPieceDataset", prefix, tokenizer, masking, length, samples, start,
            tmp_path / f"peer{index}", sequence_length_decoder=64,
        )  # fmt: skip
        assert len(peer) == len(dataset)
        for sample in range(0, len(dataset), max(1, len(dataset) // 40)):
            try:
                item = dataset[sample]
            except DataError as error:
                assert "masked spans" in str(error)
                with pytest.raises(IndexError):
                    peer[sample]
                continue
            peer_item = peer[sample]
            assert item["input_ids"].tolist() == peer_item["text_enc"].tolist()
            assert item["decoder_input_ids"].tolist() == peer_item["text_dec"].tolist()
            assert item["attention_mask"].tolist() == peer_item["enc_mask"].tolist()
            assert item["decoder_attention_mask"].tolist() == peer_item["dec_mask"].tolist()
            is_counted = peer_item["loss_mask"] == 1
            assert (item["labels"] != -100).tolist() == is_counted.tolist()
            assert item["labels"][is_counted].tolist() == peer_item["labels"][is_counted].tolist()
            compared += 1
    assert compared


def test_sentence_orders_equal_megatron_core():
    """Covers long sentences, empty documents, document ranges, several epochs and all probabilities."""
    helpers = pytest.importorskip("megatron.core.datasets.helpers")
    generator, compared = random.Random(0), 0
    for _ in range(300):
        counts = [generator.choice([0, 1, 1, 2, 3, 9]) for _ in range(generator.randrange(1, 30))]
        lengths = np.asarray(
            [generator.choice([generator.randrange(100), 5, 512, 513]) for _ in range(sum(counts))], np.int32
        )
        ends = np.cumsum([0, *counts])
        first = generator.randrange(len(counts))
        document_ends = ends[first : generator.randrange(first + 1, len(counts) + 1) + 1]
        length, seed, samples = (
            generator.randrange(2, 200),
            generator.randrange(1, 2**31 - 1),
            generator.choice([1, 50, 1000]),
        )
        short, least = generator.choice([0, 0.1, 0.15, 0.5, 1.0]), generator.choice([1, 2])
        try:
            order, _ = sentence_order(
                lengths, document_ends, length, samples, seed, short_probability=short, least_sentences=least
            )
        except DataError:
            continue
        peer = helpers.build_mapping(document_ends, lengths, 2**31 - 2, samples, length, short, seed, False, least)
        assert order.dtype == peer.dtype and np.array_equal(order, peer)
        compared += 1
    assert compared > 150


def test_models_accept_samples(tmp_path, tokenizer):
    """Only masked tokens (BERT) and span tokens (T5) count in the loss."""
    prefix = write_sentence_pair(tmp_path / "pair", random.Random(0), len(tokenizer))
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertConfig(intermediate_size=16, **sizes)
    sample = {name: value[None] for name, value in BertDataset(prefix, 32, tokenizer=tokenizer)[0].items()}
    torch.manual_seed(0)
    model = BertForPreTraining(bert).eval()
    outputs = model(**sample)
    targets = torch.nn.functional.cross_entropy(outputs.prediction_logits[0], sample["labels"][0])
    order = torch.nn.functional.cross_entropy(outputs.seq_relationship_logits, sample["next_sentence_label"])
    torch.testing.assert_close(outputs.loss, targets + order)
    without_pairs = {
        name: value[None] for name, value in BertDataset(prefix, 32, tokenizer=tokenizer, pairs=False)[0].items()
    }
    assert "next_sentence_label" not in without_pairs
    AutoModelForMaskedLM.from_config(bert)(**without_pairs).loss.backward()
    t5 = T5Config(vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    sample = {name: value[None] for name, value in T5Dataset(prefix, 32, 32, tokenizer=tokenizer)[0].items()}
    outputs = T5ForConditionalGeneration(t5).eval()(**sample)
    torch.testing.assert_close(outputs.loss, torch.nn.functional.cross_entropy(outputs.logits[0], sample["labels"][0]))


def test_order_key_covers_all_sample_settings(tmp_path, tokenizer):
    prefix = write_sentence_pair(tmp_path / "pair", random.Random(0), len(tokenizer))
    settings = {"sequence_length": 24, "tokenizer": tokenizer}
    keys = [BertDataset(prefix, **settings).order_key]
    for change in ({"seed": 2}, {"pairs": False}, {"masking": Masking(0.3)}, {"share": (0.0, 0.5)}, {"samples": 500}):
        keys.append(BertDataset(prefix, **settings, **change, cache=tmp_path / "cache").order_key)
    keys.append(T5Dataset(prefix, target_length=24, **settings).order_key)
    assert all(one != other for index, one in enumerate(keys) for other in keys[:index])
    cached = BertDataset(prefix, **settings, samples=500, cache=tmp_path / "cache")
    assert np.array_equal(cached.order, BertDataset(prefix, **settings, samples=500).order)


def test_invalid_settings_are_rejected(tmp_path, tokenizer):
    prefix = write_sentence_pair(tmp_path / "pair", random.Random(0), len(tokenizer))
    settings = {"source": prefix, "sequence_length": 24, "tokenizer": tokenizer}
    for change, message in (
        ({"sequence_length": 4}, "expected 5 or more"),
        ({"seed": 0}, "and 1 or more"),
        ({"sequence_length": "24"}, "expected an integer"),
        ({"share": (0.5, 0.5)}, "none of its .* documents is in the share"),
        ({"masking": "words"}, "masking = 'words': expected a Masking"),
    ):
        with pytest.raises(DataError, match=message):
            BertDataset(**{**settings, **change})
    for probability in (0.0, "0.15"):
        with pytest.raises(DataError, match="probabilities between 0 and 1"):
            Masking(probability)
    with pytest.raises(DataError, match="tokenizer = 'name': expected a transformers tokenizer"):
        BertDataset(**{**settings, "tokenizer": "name"})
    with IndexedWriter(tmp_path / "special", "uint16") as writer:
        writer.add_document([[2, 40, 3], [2, 41, 3]])
    with pytest.raises(DataError, match="with add_special_tokens=False"):
        BertDataset(**{**settings, "source": str(tmp_path / "special")})[0]
    for change in ({"sentinels": [10**7]}, {"begin": "x"}):
        with pytest.raises(DataError, match="expected token ids"):
            T5Dataset(**settings, target_length=24, **change)
    with IndexedWriter(tmp_path / "long", "uint16") as writer:
        writer.add_document([[40] * 600, [41]])
    with pytest.raises(DataError, match="1 documents make no sample of 2 sentences"):
        BertDataset(**{**settings, "source": str(tmp_path / "long")})
    with IndexedWriter(tmp_path / "beyond", "uint16") as writer:
        writer.add_document([[40], [len(tokenizer)]])
    with pytest.raises(DataError, match=f"contains token {len(tokenizer)}, but the tokenizer has {len(tokenizer)}"):
        BertDataset(**{**settings, "source": str(tmp_path / "beyond")})[0]
    with pytest.raises(DataError, match="tokens for the decoder"):
        [T5Dataset(**settings, target_length=3)[sample] for sample in range(5)]
    bare = BertTokenizer({token: index for index, token in enumerate(SPECIAL)})
    with pytest.raises(DataError, match="has no eos_token"):
        T5Dataset(**{**settings, "tokenizer": bare}, target_length=24)
    bare.eos_token = "[EOS]"
    with pytest.raises(DataError, match="has no <extra_id_0>"):
        T5Dataset(**{**settings, "tokenizer": bare}, target_length=24)
    causal = PretrainingDataset(IndexedDataset(prefix), 8)
    with pytest.raises(DataError, match="with and without next-token labels"):
        BlendedDataset([BertDataset(**settings), causal])


def test_splits_and_blends_from_megatron_args(tmp_path, tokenizer):
    prefixes = [
        write_sentence_pair(tmp_path / name, random.Random(seed), len(tokenizer)) for seed, name in enumerate("ab")
    ]
    arguments = {"data-path": prefixes, "seq-length": 24, "train-iters": 4, "global-batch-size": 2, "split": "50,50,0"}
    bert = functools.partial(BertDataset, tokenizer=tokenizer)
    splits = datasets_from_megatron_args({**arguments, "data-cache-path": tmp_path / "cache"}, dataset=bert)
    assert not splits.train.is_shifted and len(splits.train.datasets) == 2
    single = BertDataset(prefixes[1], 24, share=(0.0, 0.5), tokenizer=tokenizer)
    assert splits.train.datasets[1].order_key == single.order_key
    with pytest.raises(DataError, match="eod_token: only valid for PretrainingDataset"):
        datasets_from_megatron_args(arguments, dataset=bert, eod_token=3)
