"""Where an op runs: module, and the user's line of source."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Literal, NamedTuple

from halfstep.tracing.findings import Place

_HIDDEN = tuple(os.path.dirname(sys.modules[name].__file__ or "") + os.sep for name in ("torch", "halfstep"))
_SHOWN = os.path.join(_HIDDEN[1], "demo") + os.sep  # the model that comes with halfstep is user code to a trace
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_user: dict[str, bool] = {}  # by file name


class Site(NamedTuple):
    """What is noted about each forward op, and little enough to be noted for all of them. op: its own name."""

    module: str = ""
    kind: str = ""
    code: CodeType | None = None
    line: int = 0
    op: str = ""

    def place(self, op: str, direction: Literal["forward", "backward"]) -> Place:
        """The same as words."""
        source = f"{os.path.basename(self.code.co_filename)}:{self.line}" if self.code is not None else ""
        return Place(self.module, self.kind, op, direction, source)


NOWHERE = Site()


def user_line(above: int) -> tuple[CodeType | None, int]:
    """Code and line of the innermost frame outside of torch, halfstep and Python's own library, from `above` frames over the caller."""
    frame: FrameType | None = sys._getframe(above + 1)
    while frame is not None:
        if _is_user(frame.f_code):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None, 0


def raised_at(error: BaseException, names: Mapping[int, tuple[str, str]]) -> Site:
    """The innermost module that `error` came through, of those in `names` (path and type by id), and the user's line that raised it."""
    module = ("", "")
    found: tuple[CodeType | None, int] = (None, 0)
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        module = names.get(id(frame.f_locals.get("self"))) or module
        if _is_user(frame.f_code):
            found = frame.f_code, trace.tb_lineno
        trace = trace.tb_next
    return Site(*module, *found)


def _is_user(code: CodeType) -> bool:
    name = code.co_filename
    known = _user.get(name)
    if known is None:
        library = name.startswith(_LIBRARY) and "site-packages" not in name
        known = _user[name] = name.startswith(_SHOWN) or not (library or name.startswith((*_HIDDEN, "<frozen", "<eval_with_key")))
    return known
