"""Threads that look at models op by op at the same time leave torch.compile as it was."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.eval_frame

from halfstep.amp.as_written import AsWritten


def stance() -> str:
    return str(torch._dynamo.eval_frame._stance.stance)


def test_who_comes_out_last_puts_the_stance_back() -> None:
    block = AsWritten()
    block.__enter__()  # one thread
    block.__enter__()  # another
    block.__exit__(None, None, None)
    assert stance() == "force_eager", "one of them is still inside"
    block.__exit__(None, None, None)
    assert stance() == "default"


def test_an_error_inside_puts_it_back() -> None:
    def failing() -> None:
        with AsWritten():
            assert stance() == "force_eager"
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        failing()
    assert stance() == "default"
