"""The text that says which products run in torch's 16-bit kernels and which are emulated: `products=` of a policy and of autocast."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep.errors import ConfigError, suggest
from halfstep.hardware import FAMILIES

WORDS = ("auto", "native", "emulated")


def families_of(text: str) -> tuple[str, ...] | None:
    """The families whose products are emulated: of "matmul", "convolution", "attention"; None for "auto", which leaves it to what was measured.

    text: "auto", "native" (none), "emulated" (all), or some of them as in "emulated:convolution|attention". Raises ConfigError for anything else.
    """
    if not isinstance(text, str):
        raise ConfigError(f"products={text!r} is a {type(text).__name__}", "Give it a text: 'auto', 'native' or 'emulated'.")
    word, colon, named = text.partition(":")
    if word not in WORDS:
        raise ConfigError(f"products={text!r} is not known", suggest(word, WORDS))
    if not colon:
        return {"auto": None, "native": (), "emulated": FAMILIES}[word]
    names = [name.strip() for name in named.split("|")]
    for name in names:
        if word != "emulated" or name not in FAMILIES:
            raise ConfigError(f"products={text!r} is not known", f"Write for example emulated:convolution; families are {', '.join(FAMILIES)}.")
    return tuple(family for family in FAMILIES if family in names)


def products_text(emulated: Sequence[str]) -> str:
    """The text for emulated families: "native" for none, "emulated" for all."""
    named = [family for family in FAMILIES if family in emulated]
    return "native" if not named else "emulated" if len(named) == len(FAMILIES) else f"emulated:{'|'.join(named)}"


def canonical(text: str) -> str:
    """The same in the one spelling that policies are compared by."""
    families = families_of(text)
    return "auto" if families is None else products_text(families)
