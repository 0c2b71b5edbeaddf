"""What the guides on moving over say of names agrees with the code of all three libraries."""

import re
from pathlib import Path

import pytest

from halfstep import Accelerator, TrainingArguments
from halfstep.accelerator.settings import NOT_CARRIED as NO_ARGUMENTS
from halfstep.errors import ConfigError
from halfstep.trainer.arguments import NOT_CARRIED, OLD_NAMES, OTHER_NAMES

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"


@pytest.fixture
def names(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from tools import names

    return names


def section(page, table):
    """The text of a table that tools/tables.py writes."""
    found = re.search(f"<!-- table: {table} -->\n(.*?)<!-- end -->", (GUIDES / page).read_text(), flags=re.S)
    assert found, table
    return found[1]


def quoted(text):
    return set(re.findall(r"`(\w+)`", text))


def test_every_field_of_transformers_is_taken_read_or_refused(names):
    tables = [section("from_transformers.md", t) for t in ("same_fields", "other_defaults", "spellings", "refused_fields")]
    assert not set(names.transformers_fields()) - quoted("".join(tables))


def test_a_field_that_is_called_the_same_is_there_with_its_default(names):
    theirs, ours = names.transformers_fields(), names.defaults(TrainingArguments)
    listed = quoted(section("from_transformers.md", "same_fields"))
    assert len(listed) > 50
    for name in listed:
        assert ours[name] == theirs[name], name


@pytest.mark.parametrize("name", sorted(NOT_CARRIED))
def test_a_field_that_is_called_refused_is_refused_with_the_remedy(name):
    assert f"`{name}`" in section("from_transformers.md", "refused_fields")
    with pytest.raises(ConfigError) as caught:
        TrainingArguments(**{name: "something"})
    assert caught.value.remedy == NOT_CARRIED[name][1]


@pytest.mark.parametrize("name", [*OLD_NAMES, *OTHER_NAMES])
def test_a_name_that_is_called_another_spelling_is_one(name):
    new = (OLD_NAMES | OTHER_NAMES)[name]
    assert f"| `{name}` | `{new}` |" in section("from_transformers.md", "spellings")
    assert new in TrainingArguments.__dataclass_fields__


def test_a_name_of_accelerate_is_there_or_has_a_row(names):
    ours, theirs = names.accelerator_names()
    same, missing = (quoted(section("from_accelerate.md", t)) for t in ("accelerator_same", "accelerator_missing"))
    assert same == ours & theirs
    assert not theirs - same - missing
    assert set(names.OWN) <= ours


@pytest.mark.parametrize("name", sorted(NO_ARGUMENTS))
def test_an_argument_that_is_called_refused_is_refused_with_the_remedy(name):
    assert f"`{name}`" in section("from_accelerate.md", "accelerator_refused")
    with pytest.raises(ConfigError) as caught:
        Accelerator(cpu=True, **{name: "something"})
    assert caught.value.remedy == NO_ARGUMENTS[name]
