"""Text as blocks of bytes: nothing lost, nothing twice, and texts that cannot be used are explained."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.demo import read, split
from halfstep.demo.text import Blocks
from halfstep.errors import DataError


@settings(max_examples=80, deadline=None)
@given(st.binary(min_size=1, max_size=300), st.integers(1, 40), st.sampled_from([0.1, 0.25, 0.5]))
def test_a_text_is_split_into_blocks_of_itself_or_refused_when_it_has_not_two(data: bytes, size: int, share: float) -> None:
    if len(data) < 2 * size:
        with pytest.raises(DataError, match=rf"the text has {len(data)} bytes, fewer than (one block|two blocks, .*) of {size}"):
            split(data, size, share)
        return
    train, held_out = split(data, size, share)
    kept = max(size, int(len(data) * share))
    first, second = (b"".join(bytes(b["input_ids"].tolist()) for b in part) for part in (train, held_out))
    assert first == data[:-kept][: len(first)]
    assert second == data[-kept:][: len(second)]
    assert len(data) - kept - len(first) < size
    assert kept - len(second) < size
    assert len(train) >= 1
    assert len(held_out) >= 1


@settings(max_examples=50, deadline=None)
@given(st.integers(4, 200), st.integers(1, 300))
def test_the_remedy_of_a_refusal_works(length: int, size: int) -> None:
    data = bytes(length)
    try:
        split(data, size)
    except DataError as error:
        wanted = int(re.search(r"block_size=(\d+) or less", error.remedy)[1])
        assert min(map(len, split(data, wanted))) >= 1


def test_one_block_and_two_blocks_are_told_apart() -> None:
    with pytest.raises(DataError, match=r"the text has 9 bytes, fewer than one block of 10. Use a longer text, or block_size=4 or less"):
        split(bytes(9), 10)
    with pytest.raises(DataError, match=r"the text has 19 bytes, fewer than two blocks, one to train on and one to evaluate of 10"):
        split(bytes(19), 10)


def test_a_block_is_its_own_labels_in_int64() -> None:
    block = Blocks(bytes(range(256)), 128)[1]
    assert block["input_ids"].tolist() == block["labels"].tolist() == list(range(128, 256))
    assert block["input_ids"].dtype == block["labels"].dtype == torch.int64


def test_without_a_file_there_is_pythons_documentation() -> None:
    text = read(None)
    assert len(text) > 300_000
    assert b"lambda" in text
    assert text == read(None)


def test_a_file_is_read_as_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xff\x00 any bytes")
    assert read(str(tmp_path / "text")) == b"\xff\x00 any bytes"


@pytest.mark.parametrize("content", [b"", b"  \n\t "])
def test_an_empty_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(DataError, match=r"text is empty. Name a file with text in it"):
        read(str(tmp_path / "text"))


def test_a_text_that_cannot_be_read_is_refused_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere cannot be read: No such file or directory. Name a text file, or leave it out"):
        read(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read(str(tmp_path))
