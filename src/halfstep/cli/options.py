"""The options of `halfstep train`: one per field of its dataclasses, grouped by topic; and what a command line or a configuration says of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NoReturn

import yaml

from halfstep.demo import GPTConfig
from halfstep.errors import ConfigError, suggest
from halfstep.trainer.arguments import GROUPS as TOPICS
from halfstep.trainer.arguments import MEANT, NOT_CARRIED, OLD_NAMES, OTHER_NAMES, choices_of, hints_of, options_of, read, told, translate

USAGE = "halfstep train [CONFIG.yaml] [--name value ...]"
ABOUT = (
    "Train a small GPT on a text. Without options: on Python's own documentation, in bf16-mixed. "
    "CONFIG.yaml holds any of the options below by name; options on the command line win over it."
)
SWITCHES = ("--resume", "--overwrite", "--help")
WIDEST = 44  # of a list of choices beside the name of an option


@dataclass(frozen=True)
class DemoArguments:
    """Text: what to train on, and what to show at the end.

    Args:
        text: a text file to learn; Python's own documentation when not given.
        prompt: what the sample of generated text begins with.
        sample_length: bytes to generate at the end; 0 for no sample.
    """

    text: str | None = None
    prompt: str = "The "
    sample_length: int = 240

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ConfigError("prompt is empty, and the sample continues it", "Give it at least one character, or sample_length=0.")
        if self.sample_length < 0:
            raise ConfigError(f"sample_length={self.sample_length}", "Use 0 or more.")


GROUPS = (DemoArguments, GPTConfig, *TOPICS)
HINTS: dict[str, Any] = {name: hint for group in GROUPS for name, hint in hints_of(group).items()}
OTHERS = {*OLD_NAMES, *OTHER_NAMES, *NOT_CARRIED}  # names that are read as another one, or refused with a remedy


@dataclass(frozen=True)
class Line:
    """What a command line says. settings: values by today's names; config: the file named; the switches."""

    settings: dict[str, Any] = field(default_factory=dict)
    config: str | None = None
    resume: bool = False
    overwrite: bool = False


class Parser(argparse.ArgumentParser):
    """argparse, with its errors as halfstep's."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise ConfigError(message, "halfstep train --help lists the options.")


def parser(defaults: Mapping[str, Any]) -> Parser:
    """All options as texts, from the fields of the dataclasses, whose docstrings are the help. defaults: those that are not the fields' own."""
    made = Parser("halfstep train", usage=USAGE, description=ABOUT, allow_abbrev=False, argument_default=argparse.SUPPRESS, formatter_class=_Format)
    made.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="a YAML file with options, such as the config.yaml of an earlier run")
    made.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of output_dir, or of the newest run under runs/")
    made.add_argument("--overwrite", action="store_true", help="remove an earlier run from output_dir first")
    for group in GROUPS:
        title, _, rest = (group.__doc__ or "").strip().partition("\n")[0].rstrip(".").partition(": ")
        section, help_of = made.add_argument_group(title, rest or None), told(group)
        for f in fields(group):
            shape, values = _shape(HINTS[f.name])
            default = defaults.get(f.name, f.default)
            shown = "" if default in (None, "", MISSING) else f" (default: {_plain(default)})"
            text = help_of[f.name].rstrip(".") + (f"; one of {values}" if values else "")
            section.add_argument(f"--{f.name}", metavar=shape, help=f"{text}{shown}".replace("%", "%%"))
    return made


def on_the_line(argv: Iterable[str], defaults: Mapping[str, Any]) -> Line:
    """What a command line says. Raises ConfigError for options that are not known, with the nearest; `--help` prints and exits."""
    known, others = _apart(list(argv))
    found = vars(parser(defaults).parse_args(known)) | others
    switches = {name: bool(found.pop(name, False)) for name in ("resume", "overwrite")}
    return Line(config=found.pop("config", None), settings=by_name(found, "halfstep train has no option --{}"), **switches)


def by_name(settings: Mapping[str, Any], unknown: str) -> dict[str, Any]:
    """`settings` of a command line or a file under today's names, texts read by the types of their fields; old names are noted on stderr.

    unknown: the error for a name that is not known. Raises ConfigError for these, and for names that are not carried.
    """
    result: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in HINTS and name not in OTHERS:
            raise ConfigError(unknown.format(name), suggest(name, _names()))
        plain = yaml.safe_load(value) if (name in MEANT or name in NOT_CARRIED) and isinstance(value, str) else value
        result[name] = plain
    renamed = translate(result, HINTS, note=lambda text: print(f"halfstep: {text}", file=sys.stderr))
    return {name: read(HINTS[name], value) for name, value in renamed.items()}


def _apart(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command line with `--name=value` for `--name value` and `true` after bare switches; beside it the options that are not fields."""
    result: list[str] = []
    others: dict[str, str] = {}
    rest = iter(range(len(argv)))
    for i in rest:
        token, following = argv[i], argv[i + 1] if i + 1 < len(argv) else None
        if not token.startswith("--") or token in SWITCHES:
            result.append(token)
            continue
        name, sign, value = token[2:].partition("=")
        name = name.replace("-", "_")
        if name not in HINTS and name not in OTHERS:
            raise ConfigError(f"halfstep train has no option --{name}", suggest(name, _names()))
        if not sign and _is_switch(name) and (following is None or following.lower() not in ("true", "false", "yes", "no", "null")):
            sign, value = "=", "true"
        elif not sign and following is not None and not following.startswith("--"):
            sign, value = "=", following
            next(rest)
        if not sign:
            raise ConfigError(f"--{name} has no value", f"Write --{name}=VALUE.")
        if name in HINTS:
            result.append(f"--{name}={value}")
        else:
            others[name] = value
    return result, others


def _is_switch(name: str) -> bool:
    """Whether an option may stand without a value."""
    if name in NOT_CARRIED:
        return any(isinstance(value, bool) for value in NOT_CARRIED[name][0])
    return name in MEANT or bool in options_of(HINTS[OLD_NAMES.get(name) or OTHER_NAMES.get(name, name)])


def _names() -> set[str]:
    return {*HINTS, *OLD_NAMES, *OTHER_NAMES, *(s[2:] for s in SWITCHES)}


def _shape(hint: Any) -> tuple[str, str]:
    """What stands for a value beside the option's name, and the choices that are too many for that place."""
    options, choices = options_of(hint), choices_of(hint)
    if choices:
        together = f"{{{','.join(choices)}}}"
        return (together, "") if len(together) <= WIDEST else ("NAME", ", ".join(choices))
    if bool in options:
        return "{true,false}", ""
    named = {int: "INT", float: "NUMBER", list[str]: "NAME,NAME", str: "TEXT"}
    return next((shown for kind, shown in named.items() if kind in options), "TEXT"), ""


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


class _Format(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)
