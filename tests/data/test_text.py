"""A text as blocks: each token once, its target the next one, and one sentence for what cannot be read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from pipetrain.data import Padded, text
from pipetrain.errors import ConfigError
from pipetrain.tasks.task import IGNORED

WORDS = "the cat sat on the mat and the dog sat on the cat\n"


@pytest.fixture
def book(tmp_path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(WORDS * 20)
    return path


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    """A byte-level BPE as GPT-2's, that adds a start to each text, cuts it to 3 tokens and pads it to 5."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([WORDS], trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.enable_truncation(3)
    made.enable_padding(length=5)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


def whole(split: text.Blocks) -> np.ndarray:
    """Every token of a split's blocks and the last target, after a look at each sample."""
    ids = torch.arange(len(split))
    inputs, targets = split.inputs(ids, None), split.targets(ids, None)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (len(split), split.block)
    assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
    return np.append(inputs.numpy(), targets[-1, -1])


def test_bytes_are_cut_into_blocks_and_the_end_is_to_test_on(book):
    content = np.frombuffer(book.read_bytes(), np.uint8)
    data = text.load(str(book), block=30, test_share=0.25)
    assert (len(content), data.name, data.classes) == (1000, "book", 256)
    assert (len(data.train), len(data.test)) == (749 // 30, 249 // 30)  # the last token needs a target
    assert (whole(data.train) == content[: 24 * 30 + 1]).all()
    assert (whole(data.test) == content[750 : 750 + 8 * 30 + 1]).all()


def test_blocks_are_read_in_any_order_from_a_mapped_file_that_a_worker_maps_itself(book):
    train = text.load(str(book), block=30).train
    every, some = train.inputs(torch.arange(len(train)), None), torch.tensor([7, 0, 7])
    assert torch.equal(train.inputs(some, None), every[some])
    assert isinstance(train._mapped().base, np.memmap)
    pickled = pickle.dumps(train)
    assert len(pickled) < 500
    assert (whole(pickle.loads(pickled)) == whole(train)).all()
    assert (len(train.first(99)), len(train.first(3))) == (len(train), 3)
    assert (whole(train.first(3)) == whole(train)[:91]).all()


def test_shakespeare_is_the_text_that_others_report_on():
    data = text.load(vocabulary=256)
    assert (data.name, len(data.train), len(data.test)) == ("shakespeare", 7842, 871)
    content = text.SHAKESPEARE.read_bytes()
    assert (len(content), len(set(content))) == (1_115_394, 65)
    assert (data.train.checksum(), data.test.checksum()) == (1_221_763_790, 4_170_432_201)
    assert text.load(block=64).train.checksum() != data.train.checksum()


def test_tokens_are_those_of_the_whole_text_alone_and_made_once_for_it_and_a_tokenizer(
    book, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(text, "_PIECE", 70)
    data = text.load(str(book), str(tokenizer), 8, vocabulary=270, root=str(tmp_path))
    plain = Tokenizer.from_file(str(tokenizer))
    plain.no_truncation()
    ids = plain.encode(book.read_text(), add_special_tokens=False).ids
    assert data.classes == 270
    assert data.train.tokens + data.test.tokens == len(ids) < 1000
    assert (whole(data.train) == ids[: len(data.train) * 8 + 1]).all()

    def made() -> set[str]:
        text.load(str(book), str(tokenizer), 8, root=str(tmp_path / "root"))
        return {path.name for path in (tmp_path / "root" / "texts").iterdir()}

    (first,) = made()
    assert first.startswith("book-")
    assert made() == {first}
    book.write_text(WORDS * 21)
    assert len(made()) == 2
    rules = json.loads(tokenizer.read_text())
    rules["model"]["merges"].pop()
    tokenizer.write_text(json.dumps(rules))
    assert len(made()) == 3


def test_more_than_65536_tokens_take_4_bytes(tmp_path, book):
    vocabulary = {f"w{index}": index for index in range(70_000)} | {"cat": 70_000, "?": 70_001}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "words.json"))
    data = text.load(str(book), str(tmp_path / "words.json"), 8, root=str(tmp_path))
    assert (data.classes, data.train.dtype) == (70_002, "uint32")
    assert set(whole(data.train)) == {70_000, 70_001}


# Lines

VERSE = "a\n\nseven on\n" + "x" * 17 + "\ncat\n"  # the first has one target, the second none, the fourth 17
TAUGHT = ["a\n", "seven on\n", "x" * 9, "x" * 9, "x\n", "cat\n"]  # of blocks of 8 targets


def lines_of(split: text.Lines) -> list[list[int]]:
    """The tokens of each sample, and of its padding that it is padding."""
    ids, every = torch.arange(len(split)), []
    for x, y, count in zip(split.inputs(ids, None), split.targets(ids, None), split.counts, strict=True):
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x[1:count], y[: count - 1])
        assert x[count:].tolist() == [0] * (split.length - count)
        assert y[count:].tolist() == [IGNORED] * (split.length - count)
        every.append([int(x[0]), *y[:count].tolist()])
    return every


def test_lines_are_padded_to_the_longest_of_a_batch_and_long_ones_cut(tmp_path):
    path = tmp_path / "verse.txt"
    path.write_text(VERSE + "to test\nends without")
    data = text.load(str(path), block=8, test_share=0.4, lines=True)
    assert isinstance(data.train, Padded)
    assert [bytes(line).decode() for line in lines_of(data.train)] == TAUGHT
    assert [bytes(line).decode() for line in lines_of(data.test)] == ["to test\n", "ends with", "hout"]
    assert [data.train.lengths(torch.tensor(ids)) for ids in ([0], [0, 5], [5, 2, 0])] == [(1,), (3,), (8,)]
    assert lines_of(data.train.padded((3,)).first(1)) == [[*b"a\n"]]
    again = pickle.loads(pickle.dumps(data.train))
    assert (lines_of(again), again.checksum()) == (lines_of(data.train), data.train.checksum())
    assert data.facts.example.specs[0].shape == (8,)


def test_a_batch_of_lines_is_padded_up_to_a_bucket_if_one_is_long_enough(tmp_path):
    path = tmp_path / "verse.txt"
    path.write_text(VERSE * 9)
    train, plain = (text.load(str(path), block=8, lines=True, buckets=of).train for of in ([6, 2], None))
    assert [train.lengths(torch.tensor(ids)) for ids in ([0], [5], [1])] == [(2,), (6,), (8,)]
    assert lines_of(train) == lines_of(plain)
    assert train.checksum() != plain.checksum()


def test_lines_are_tokenised_each_by_itself(book, tokenizer, tmp_path):
    for _ in range(2):  # made, and read again
        data = text.load(str(book), str(tokenizer), 64, lines=True, root=str(tmp_path / "root"))
        plain = Tokenizer.from_file(str(tokenizer))
        plain.no_truncation()
        ids = plain.encode(WORDS, add_special_tokens=False).ids
        assert lines_of(data.train) == [ids] * 18
        assert lines_of(data.test) == [ids] * 2
    assert len([*(tmp_path / "root" / "texts").iterdir()]) == 2


# What is refused

TOKENS = {"tokenizer": "tokenizer.json"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"block": 0}, "data.block=0 must be a whole number of at least 1"),
        ({"file": "none.txt"}, "data.file=none.txt cannot be read: give the path of a file"),
        ({"tokenizer": "book.txt"}, "data.tokenizer=book.txt is no tokenizer.json of the package tokenize"),
        (TOKENS | {"vocabulary": 256}, "data.vocabulary is 256, and with tokenizer.json it is 270: set"),
        (
            {"buckets": [16]},
            "data.buckets=[16] are lengths to which lines are padded, up to data.block=128: set data.lines",
        ),
        ({"lines": True, "buckets": [256, 64]}, "data.buckets=[64, 256] are lengths to which lines are pa"),
        ({"lines": True, "buckets": [0]}, "data.buckets=[0] must be a whole number of at least 1, or one"),
        ({"lines": True, "test_share": 0}, "book.txt has 20 lines of 2 tokens or more to train on and 0 to"),
        ({"block": 100}, "book.txt has 1000 tokens, 900 to train on and 100 to test on, but data.block=10"),
        (
            TOKENS | {"file": "latin1.txt"},
            "latin1.txt cannot be written as tokens to texts: UnicodeDecode",
        ),
        (
            TOKENS | {"root": "book.txt"},
            "book.txt cannot be written as tokens to book.txt/texts: NotADi",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(
    arguments, says, book, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("latin1.txt").write_bytes(b"caf\xe9 " * 100)
    with pytest.raises(ConfigError) as refusal:
        text.load(**{"file": "book.txt", "root": "."} | arguments)
    assert str(refusal.value).startswith(says)
    assert "\n" not in str(refusal.value)
    assert not list(tmp_path.glob("texts/*"))
