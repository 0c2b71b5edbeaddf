"""The first call of a bound module: which of its weights go to 16 bits is found out, and they go."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halfstep.amp.as_written import as_written
from halfstep.amp.autocast import forward_context
from halfstep.amp.discovery import castable, owned, tables
from halfstep.amp.embedding import with_embedding
from halfstep.amp.joined import JoinedWeights, Seen
from halfstep.amp.lean import Layout, not_castable, settling
from halfstep.amp.mode import Applied, Tables, Within, current
from halfstep.amp.ops import HALF
from halfstep.amp.rehearsal import Rehearsal

logger = logging.getLogger("halfstep")
Care = Literal["none", "masters", "tables"]  # what a forward pass minds: nothing more, weights kept in 16 bits, or 16-bit embedding tables
_NOTHING, _PLAIN = Tables(), nullcontext()


def minded(care: Care, device: str) -> AbstractContextManager[Any]:
    """The block inside that of the policy in which 16-bit weights get what they need: a mode that sees the functions they are given to."""
    if care == "none":
        return _PLAIN
    mode = current(device)
    if care == "tables" or torch.compiler.is_compiling():  # while it traces nobody looks out for kept tables
        return Applied(device, with_embedding(mode.tables if mode is not None else _NOTHING))
    return Applied(device, _NOTHING) if mode is None else _PLAIN


def settle(module: nn.Module, layout: Layout, forward: Callable[..., Any], args: Any, kwargs: Any, compiled: bool = False) -> None:
    """Before the first forward pass of a bound module: rehearse it, and put into 16 bits what its policy wants there.

    compiled: torch.compile runs it. Embedding tables that are trained then stay fp32: graphs give 16-bit parameters 16-bit gradients.

    Put off to a later call while parameters are not there yet (lazy modules) or stand-ins for them are (torch.func). Arguments that can be read
    only once (iterators) are not touched: the owner rule then decides alone, and uses that it could not know of join the master.
    Raises PolicyError when a `*-lean` policy finds nothing to keep in 16 bits, and whatever the forward pass raises.
    """
    if "torch._dynamo" in sys.modules:  # a compiled model is rehearsed as it was written
        _eagerly(_settle, module, layout, forward, args, kwargs, compiled or any(map(_is_compiled, module.modules())))
    else:
        _settle(module, layout, forward, args, kwargs, False)


def _eagerly(function: Callable[..., None], /, *args: Any) -> None:
    torch.compiler.disable(_forced)(function, *args)  # type: ignore[no-untyped-call]


def _forced(function: Callable[..., None], /, *args: Any) -> None:
    with as_written:
        function(*args)


settle._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compile runs it and does not look inside


def _is_compiled(part: nn.Module) -> bool:
    return part._compiled_call_impl is not None or hasattr(part, "_orig_mod")


def _settle(module: nn.Module, layout: Layout, forward: Callable[..., Any], args: Any, kwargs: Any, compiled: bool) -> None:
    with settling, torch.inference_mode(False):
        if layout.settled or not _is_itself(module):
            return
        policy, device = layout.policy, layout.device
        eager: Any = getattr(module, "_orig_mod", None)  # of torch.compile
        seen = Seen()
        before = {name: master for name, p in layout.kept.items() if (master := p.halfstep_master) is not None}  # type: ignore[attr-defined]

        def run() -> None:
            joins = JoinedWeights(policy, device.type, seen)
            with warnings.catch_warnings(), Rehearsal([module], (args, kwargs)):
                warnings.simplefilter("ignore")
                with Within(policy, joins), forward_context(policy, device), minded("masters", device.type):
                    eager(*args, **kwargs) if eager is not None else forward(module, *args, **kwargs)

        def rehearse() -> None:
            try:
                with torch.no_grad():
                    run()
            except RuntimeError:  # it may differentiate something itself
                if not torch.is_grad_enabled():
                    raise
                run()
            finally:
                for master in before.values():
                    master.wrote()  # what was written to its weight has been put back

        if _read_once((*args, *kwargs.values())):
            names: Collection[str] = owned(module, policy, device, layout.apart)
        else:
            names = castable(module, policy, device, rehearse, layout.apart, seen.lookups)
        if not layout.given:
            _decide(module, layout, names, seen, compiled)
        for name, p in layout.kept.items():
            if id(p) in seen.shared:
                layout.share(name)
        layout.settled = True
        _report(module, layout)


def _decide(module: nn.Module, layout: Layout, names: Collection[str], seen: Seen, compiled: bool) -> None:
    """Put into 16 bits what both rules allow; make fp32 what had been loaded in 16 bits and is used otherwise."""
    looked_up = tables(module)
    # the parameters that are used otherwise; an embedding with a forward method of its own may be, unless that was seen
    direct = seen.direct | {who for who, own in looked_up.items() if own and who not in seen.lookups}
    if compiled:
        direct |= {id(p) for p in module.parameters() if p.requires_grad and id(p) in looked_up}
    for name, p in list(layout.kept.items()):
        if id(p) in direct:
            layout.give_up(name)
    if not layout.policy.is_lean:
        return
    for name in names:
        p = module.get_parameter(name)
        if name not in layout.kept and id(p) not in direct:
            layout.keep(module, name, id(p) in looked_up)
    if not layout.kept:
        raise not_castable(module, layout.policy)


def _is_itself(module: nn.Module) -> bool:
    """Whether the parameters are there and are the module's own, now."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    own = [p for part in module.modules() for p in part._parameters.values() if p is not None]
    return all(isinstance(p, nn.Parameter) and not torch.nn.parameter.is_lazy(p) for p in own)


def _read_once(value: Any, depth: int = 3) -> bool:
    """Whether there is an iterator among arguments, which a rehearsal would use up."""
    if isinstance(value, Tensor | str) or depth == 0:
        return False
    if hasattr(value, "__next__"):
        return True
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(_read_once(v, depth - 1) for v in inner)


def _report(module: nn.Module, layout: Layout) -> None:
    every = list(module.parameters())
    kept = sum(p.numel() for p in layout.kept.values())
    total = sum(p.numel() for p in every)
    logger.info(
        "%s: %d of %d parameters (%.1f %% of the weights) are kept in %s with %s masters, the others in fp32",
        layout.policy,
        sum(p.dtype in HALF for p in layout.kept.values()),
        len(every),
        100 * kept / max(total, 1),
        layout.policy.autocast,
        layout.storage,
    )
