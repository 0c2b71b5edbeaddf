"""Module name patterns: which modules does a rule hold in fp32?"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from halfstep.errors import ConfigError, suggest


def select(names: Iterable[str], patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The outermost of the module `names` that a pattern matches (`*` and `?` as in a shell, dots included), in order.

    Modules inside a selected one are left out: they run inside it. Raises ConfigError for a pattern that matches no
    module, with the nearest name: a rule without effect is a mistake.
    """
    known = [name for name in names if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ConfigError(f"fp32={pattern} matches no module of this model", suggest(pattern, known[:50]) if known else "It has no submodules.")
    hit = {name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)}
    return tuple(name for name in known if name in hit and not any(name.startswith(f"{other}.") for other in hit))
