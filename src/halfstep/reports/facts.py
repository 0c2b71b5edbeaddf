"""Sections that are tables: memory, the dtype audit, the plan, where and with which settings a run was made, and what differs between runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from halfstep.reports.document import Block, Chart, Table, Text
from halfstep.reports.history import History
from halfstep.reports.numbers import number, share, size

CELL = 400  # characters of one value in a table of settings
AUDIT_ROWS = 25
AUDIT_SHOWN = ("answer", "findings", "product_flops", "classes", "modules", "rows")  # in tables of their own
PROCESS = "process peak"  # of the interpreter and all libraries too: a number of its own, and no bar beside tensors
WHOLE = ("peak", PROCESS, "total")  # kinds that hold others
OWN = ("output_dir", "run_name", "logging_dir")  # settings that tell two runs apart and change nothing


def text(value: Any) -> str:
    """A setting as text, cut where it is long."""
    if isinstance(value, Mapping):
        shown = ", ".join(f"{k}: {text(v)}" for k, v in value.items())
    elif isinstance(value, list | tuple):
        shown = ", ".join(map(text, value))
    else:
        shown = number(value) if isinstance(value, float) else "–" if value is None else str(value)
    return shown if len(shown) <= CELL else f"{shown[:CELL]}... ({len(shown):,} characters)"


def flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as (dotted name, text)."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", text(value)


def settings(caption: str, values: Mapping[str, Any], folded: bool = False) -> Table:
    """A table of names and values."""
    return Table(caption, ("name", "value"), tuple(flat(values)), folded=folded)


def memory(run: History, name: str) -> list[Block]:
    """The ledger: bytes by kind, predicted and measured, drawn and as a table. Nothing without one."""
    ledger = run.records.memory
    kinds = [*ledger.measured, *(k for k in ledger.predicted if k not in ledger.measured)]
    if not kinds:
        return []
    sides = {"measured": ledger.measured, "predicted": ledger.predicted}
    shown = [k for k in kinds if k != PROCESS and any(side.get(k) for side in sides.values())]
    rows = []
    for kind in kinds:
        measured, predicted = ledger.measured.get(kind), ledger.predicted.get(kind)
        off = f"{(predicted - measured) / measured:+.1%}" if measured and predicted is not None else "–"
        rows.append((kind, size(predicted), size(measured), off))
    table = Table("Memory by kind", ("kind", "predicted", "measured", "predicted against measured"), tuple(rows), frozenset({1, 2, 3}), folded=True)
    bars = [
        {"type": "bar", "orientation": "h", "name": side, "y": [k for k in shown if k in found], "x": [found[k] for k in shown if k in found]}
        | {"customdata": [size(found[k]) for k in shown if k in found], "hovertemplate": "%{y}: %{customdata}", "meta": {"role": "bar", "run": i}}
        for i, (side, found) in enumerate(sides.items())
        if found
    ]
    return [Chart(name, "Memory by kind", _memory_told(run), "bars", {"data": bars, "layout": {"xaxis": {"title": {"text": "bytes"}}}}, table)]


def _memory_told(run: History) -> str:
    ledger = run.records.memory
    parts = sorted(((v, k) for k, v in ledger.measured.items() if k not in WHOLE and v > 0), reverse=True)
    told = []
    if parts:
        told.append(f"Measured after the first applied step: {', '.join(f'{k} {size(v)}' for v, k in parts[:4])}.")
    for kind in WHOLE:
        measured, predicted = ledger.measured.get(kind), ledger.predicted.get(kind)
        if measured is not None or predicted is not None:
            both = [f"{size(measured)} measured"] * (measured is not None) + [f"{size(predicted)} predicted"] * (predicted is not None)
            told.append(f"{kind.capitalize()}: {', '.join(both)}.")
    if not ledger.predicted:
        told.append("Nothing was predicted before this run.")
    about = ", ".join(part for part in (ledger.policy, ledger.batch) if part)
    return " ".join(told) + (f" ({about})" if about else "")


def audit(run: History) -> list[Block]:
    """The dtype audit: its answer, its findings with remedies, time by class of op, the largest rows. Nothing without one."""
    found = run.records.audit
    if not found:
        return []
    blocks: list[Block] = [Text((str(found["answer"]),))] if found.get("answer") else []
    findings = [(_share(f.get("share")), text(f.get("what") or f.get("cause")), _where(f), text(f.get("remedy", ""))) for f in _of(found, "findings")]
    if findings:
        blocks.append(Table("What costs time, largest first", ("share", "what", "where", "what to do"), tuple(findings), frozenset({0})))
    formats = found.get("product_flops")
    if isinstance(formats, Mapping):
        parts = tuple((str(form), _share(part)) for form, part in formats.items())
        blocks.append(Table("Formats that products run in, by operations", ("format", "share"), parts, frozenset({1})))
    classes = [
        (*(text(c.get(k)) for k in ("name", "calls")), _share(c.get("share")), _size(c.get("bytes")), _formats(c.get("formats")))
        for c in _of(found, "classes")
    ]
    if classes:
        of_class = ("class of op", "calls", "share of time", "bytes", "formats")
        blocks.append(Table("Time by class of op", of_class, tuple(classes), frozenset({1, 2, 3})))
    modules = [
        (text(m.get("name")), text(m.get("calls")), _share(m.get("share")), _size(m.get("bytes")), _formats(m.get("formats")))
        for m in _of(found, "modules")[:AUDIT_ROWS]
    ]
    if modules:
        of_module = ("module", "calls", "share of time", "bytes", "formats")
        blocks.append(Table("Time by module, largest first", of_module, tuple(modules), frozenset({1, 2, 3}), folded=True))
    keys = ("module", "op", "direction", "dtype_in", "dtype_out")
    ops = [(*(text(row.get(k)) for k in keys), _share(row.get("share")), text(row.get("why") or "")) for row in _of(found, "rows")]
    if ops:
        of_op = ("module", "op", "direction", "in", "out", "share of time", "why")
        left = f", the largest {AUDIT_ROWS} of {len(ops):,}" if len(ops) > AUDIT_ROWS else ""
        blocks.append(Table(f"Ops by module{left}", of_op, tuple(ops[:AUDIT_ROWS]), frozenset({5}), folded=True))
    rest = {k: v for k, v in found.items() if k not in AUDIT_SHOWN and v is not None}
    return [*blocks, settings("The audit's numbers", rest, folded=True)] if rest else blocks


def _of(found: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The entries of a list of mappings; none where there is something else."""
    return _mappings(found.get(key))


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def _share(value: Any) -> str:
    return share(value) if isinstance(value, int | float) else "–"


def _size(value: Any) -> str:
    return size(value) if isinstance(value, int | float) else "–"


def _formats(value: Any) -> str:
    """Shares of time by format as text."""
    return ", ".join(f"{form} {_share(part)}" for form, part in value.items()) if isinstance(value, Mapping) else text(value)


def _where(finding: Mapping[str, Any]) -> str:
    return ", ".join(str(finding[key]) for key in ("module", "op") if finding.get(key)) or "–"


def plan(run: History) -> list[Block]:
    """What `halfstep plan` had said and what the run was told to hold in fp32. Nothing without either."""
    found, blocks = run.records.plan, list[Block]()
    if found.get("precision"):
        told = [
            f"The run followed a plan: {text(found['precision'])}" + (f", loss scale from {text(found['scale'])}." if found.get("scale") else ".")
        ]
        reasons = found.get("reasons")
        blocks.append(Text((*told, *(map(text, reasons) if isinstance(reasons, list) else ()))))
        tried = tuple(_tried(row) for row in _of(found, "tried"))
        if tried:
            columns = ("precision", "loss scale", "loss off by", "gradients off by", "seconds a step", "problem")
            blocks.append(Table("What the plan had tried", columns, tried, frozenset({1, 2, 3, 4})))
    rules = _of(run.records.rules, "fp32") or _of(found, "fp32")
    if rules:
        rows = tuple((text(r.get("module")), text(r.get("step")), text(r.get("why") or "")) for r in rules)
        blocks.append(Table("Modules held in fp32", ("module", "since step", "why"), rows, frozenset({1})))
    return blocks


def _tried(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A precision that the plan had tried, as a row."""
    seconds = row.get("seconds")
    times = sorted(float(s) for s in seconds if isinstance(s, int | float)) if isinstance(seconds, list) else []
    took = number(times[len(times) // 2]) if times else "–"
    return (
        text(row.get("precision")),
        text(row.get("scale")),
        _share(row.get("loss_error")),
        _share(row.get("gradient_error")),
        took,
        text(row.get("problem") or ""),
    )


def environment(run: History) -> list[Block]:
    """Where and with what the run was made; a sentence where that was not recorded."""
    found = run.records.environment
    if not found.torch:
        return [Text(("The environment was not recorded.",))]
    about = {k: v for k, v in found.as_dict().items() if v not in ("", 0, (), [], {}, None)}
    if found.command:
        about["command"] = " ".join(found.command)
    return [settings("Where and with what it ran", about)]


def configuration(run: History) -> list[Block]:
    """The settings of the run, folded."""
    if not run.records.config:
        return [Text(("The settings were not recorded.",))]
    return [settings(f"All {len(run.records.config)} settings", run.records.config, folded=True)]


def differences(runs: Sequence[History]) -> list[Block]:
    """The settings, and what else of the environment, that are not the same in all runs."""
    told: list[dict[str, str]] = []
    for run in runs:
        device = run.records.environment.device
        unseen = ("time", "command", "device", *(("policy",) if run.records.config.get("precision") else ()))
        where = {k: v for k, v in run.records.environment.as_dict().items() if k not in unseen and v not in ("", 0, None)}
        where |= {"device": device.get("name", "")} if device else {}
        told.append({k: v for k, v in flat(run.records.config) if k not in OWN} | dict(flat(where, "environment: ")))
    keys = list(dict.fromkeys(key for one in told for key in one))
    unlike = [key for key in keys if len({one.get(key) for one in told}) > 1]
    if not unlike:
        return [Text(("All runs have the same settings.",))]
    rows = tuple((key, *(one.get(key, "–") for one in told)) for key in unlike)
    return [Table("Settings that differ", ("setting", *(run.name for run in runs)), rows)]
