"""The list of fields is frozen as data, and every field has an effect: something besides the arguments themselves reads it."""

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import halfstep
from halfstep import TrainingArguments
from halfstep.errors import ConfigError
from halfstep.trainer.arguments import GROUPS, IN_THE_POLICY, told

SOURCE = Path(halfstep.__file__).parent
FROZEN = Path(__file__).with_name("training_arguments.json")
FIELDS = [f.name for f in dataclasses.fields(TrainingArguments)]
SHOWN = {"args", "a", "arguments"}  # names that arguments have in the code


def listed() -> dict[str, list[list[object]]]:
    """Name, type and default of each field, by topic."""
    return {group.__name__: [[f.name, f.type, f.default] for f in dataclasses.fields(group)] for group in GROUPS}


def test_names_types_and_defaults_are_those_that_were_agreed() -> None:
    """A change here changes what people's scripts mean: it needs a line in CHANGELOG.md, and then
    `python tests/unit/trainer/test_arguments_fields.py` writes the list anew."""
    assert listed() == json.loads(FROZEN.read_text())


def test_the_groups_are_the_whole_in_their_order() -> None:
    assert [name for group in listed().values() for name, _, _ in group] == FIELDS
    assert FIELDS[0] == "output_dir"
    assert TrainingArguments("here").output_dir == "here"


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.__name__)
def test_each_docstring_tells_the_fields_of_its_group_and_no_others(group: type) -> None:
    assert list(told(group)) == [f.name for f in dataclasses.fields(group)]
    assert all(len(text) > 10 for text in told(group).values())


def attributes(tree: ast.AST, owners: set[str]) -> Iterator[str]:
    """Names that are read from something called one of `owners`, at its end: `args.x`, `self.args.x`, `getattr(args, "x")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and isinstance(node.args[1], ast.Constant):
            owner, name = node.args[0], node.args[1].value
        else:
            continue
        if getattr(owner, "id", getattr(owner, "attr", "")) in owners:
            yield name


def read_elsewhere() -> set[str]:
    """Fields that the Trainer reads, by name or through a property of the arguments."""
    files = [p for p in (SOURCE / "trainer").rglob("*.py") if "arguments" not in p.parts]
    found = {name for path in files for name in attributes(ast.parse(path.read_text()), SHOWN)}
    seen: set[str] = set()
    while new := found - seen:
        for name in new:
            value = inspect.getattr_static(TrainingArguments, name, None)
            body = value.fget if isinstance(value, property) else value if inspect.isfunction(value) else None
            if body is not None:
                found |= set(attributes(ast.parse(textwrap.dedent(inspect.getsource(body))), {"self"}))
        seen |= new
    return found | set(IN_THE_POLICY if "policy" in found else ())


def test_every_field_is_read_by_something_besides_the_arguments() -> None:
    unread = set(FIELDS) - read_elsewhere()
    assert unread - AWAITED == ONLY_CHECKED


AWAITED = {
    "chunked_loss",
    "ddp_backend",
    "ddp_broadcast_buffers",
    "ddp_bucket_cap_mb",
    "ddp_find_unused_parameters",
    "ddp_static_graph",
    "ddp_timeout",
    "reduce_dtype",
}

ONLY_CHECKED = {"logging_nan_inf_filter"}  # refused unless False, which is how it is


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_of_no_possible_type_is_refused_by_the_name_of_its_field(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}=.* is (a|not a|not) "):
        TrainingArguments(**{name: {1}})


if __name__ == "__main__":
    FROZEN.write_text(json.dumps(listed(), indent=1) + "\n")
