"""Results to text: the page of the documents, and the lines of the terminal. Pure functions of the records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEAD = """# Benchmarks on a CPU

This page is made from `benchmarks/results/cpu-*.json`, a file for each kind of CPU; `make bench` measures all rows anew and writes both. One
row again: `python -m benchmarks.suite --rows NAME --write`. Nothing here is typed by hand.

**How.** Every contender has a process of its own, so that what one sets up for its process (the C library's heap, threads, torch's flags) no other
gets. They take turns, never two at once, warmed up, the order flipped every round. Each round gives
one ratio between two contenders; the median over the rounds stands here with its quartiles. A Trainer runs its own loop, left and entered
again at the end of every step. A/A is a second instance of ours against the first: a row counts when it is within 5 % of 1. Memory and
start-up rows take a fresh process each time. "Floor" is what no implementation in fp32 arithmetic gets below: the operations of the products at
the rate of a large fp32 product, then the bytes of the optimizer's step at the bandwidth of a large change in place (the bytes alone where there
are no products), both rates at their best in any row of the machine. Where bf16 is in hardware its products run faster than fp32's, and rows in
bf16 may come out below it. A peer so slow that there is time for one step of it is known by that,
its first, not warmed up ("1 round"): an indication, not a measurement. Peers are those at the same precision; a reference stands there
for orientation.
"""
FEW = 5  # fewer rounds than this are marked


def render(*results: dict[str, Any]) -> str:
    """The whole page, from files of results alone, each of one kind of CPU."""
    parts = [HEAD]
    measured = [with_floors(list(r["rows"].values())) for r in results if r["rows"]]
    if not measured:
        return HEAD + "\nNothing has been measured yet.\n"
    for rows in measured:
        parts += ["## Where halfstep stands" + on(rows[0]), table(SUMMARY, summary(rows)), "### The machine", machines(rows)]
    return "\n\n".join([*(p.strip() for p in parts), *(section(row) for rows in measured for row in rows)]) + "\n"


def with_floors(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with floors by the best rates that any of the machine saw: in a row that others disturbed rates are too low, and floors too high."""
    made = []
    for row in rows:
        alike = [r["rates"] for r in rows if all(r["machine"][k] == row["machine"][k] for k in ("name", "level", "threads"))]
        best, own = {k: max(rates[k] for rates in alike) for k in ("bandwidth", "products")}, row["rates"]
        products = row.get("work", {}).get("operations", 0)
        fixed, per, less = products / best["products"], own["bandwidth"] / best["bandwidth"], products / own["products"]
        made.append(row | {"contenders": [c | {"floor": c["floor"] and fixed + (c["floor"] - less) * per} for c in row["contenders"]]})
    return made


def on(row: dict[str, Any]) -> str:
    """The kind of CPU that a row was measured on, to stand in a heading."""
    native = " and ".join(row["machine"]["native"]) or "no 16-bit format"
    return f", on a CPU with {native} in hardware"


SUMMARY = ("row", "ours / other", "ratio", "quartiles", "reach", "stretch", "A/A", "")


def summary(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line for every claim."""
    lines = []
    for row in rows:
        for claim in row["claims"]:
            pair = f"{claim['ours']} / {claim.get('to', claim['against'])}"
            ratio = "" if claim["ratio"] is None else f"**{claim['ratio']:.3f}**"
            goals = (f"{claim['reach']:.2f}", "" if claim["stretch"] is None else f"{claim['stretch']:.2f}")
            lines.append((f"[{row['title']}](#{anchor(row)})", pair, ratio, quartiles(claim), *goals, again(row), standing(claim, row["counts"])))
    return lines


def standing(claim: dict[str, Any], counts: bool) -> str:
    """How a claim came out, in a word or two."""
    if claim["ratio"] is None:
        return "not measured"
    if not counts:
        return "does not count: noise"
    few = f" ({claim['rounds']} round{'s' * (claim['rounds'] > 1)})" if claim["rounds"] < FEW else ""
    if not claim["met"]:
        return "missed" + few
    return ("reached" if claim["stretch"] is None or claim["ratio"] > claim["stretch"] else "reached, stretch too") + few


def again(row: dict[str, Any]) -> str:
    """The A/A ratio."""
    return "" if row["again"] is None else f"{row['again']['ratio']:.3f}"


def quartiles(found: dict[str, Any]) -> str:
    """Two numbers, where there are enough rounds to have them."""
    return "{:.3f}, {:.3f}".format(*found["quartiles"]) if found.get("rounds", 0) > 2 else ""


def machines(rows: Sequence[dict[str, Any]]) -> str:
    """Machine, versions and day; the rows are named where they were not all measured on the same."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        m = row["machine"]
        native = ", ".join(m["native"]) or "no 16-bit format"
        text = f"{m['name']} ({m['level']}; {native} in hardware), {m['threads']} threads, {m['memory_gib']} GiB; "
        groups.setdefault(text + ", ".join(f"{k} {v}" for k, v in m["versions"].items()) + f"; {row['day']}.", []).append(row["name"])
    lines = [text if len(groups) == 1 else f"- {', '.join(names)}: {text}" for text, names in groups.items()]
    bandwidths, products = ([r["rates"][k] / 1e9 for r in rows] for k in ("bandwidth", "products"))
    shared = [row["name"] for row in rows if row.get("one_process")]
    if shared:
        every = "All rows" if len(shared) == len(rows) else ", ".join(shared)
        lines.append(f"{every}: measured when contenders still shared one process, with the C library's heap as it was then.")
    lines.append(
        f"Over the rows: memory {span(bandwidths)} GB/s, fp32 product {span(products)} GFLOP/s, load before a row {span([r['load'] for r in rows])}."
    )
    return "\n".join(lines) if len(groups) > 1 else "\n\n".join(lines)


def span(values: Sequence[float]) -> str:
    """From the smallest to the largest."""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def section(row: dict[str, Any]) -> str:
    """One row with all contenders."""
    parts = [f"## {row['title']}{on(row)}", f"`{row['name']}`: {row['says']}."]
    parts.append(
        table(("", row_unit(row), "quartiles", "ours to it", "rounds", "floor", "loss, first and last"), [line(c, row) for c in row["contenders"]])
    )
    if any(c["first_only"] for c in row["contenders"]):
        parts.append("(1): its first step alone, since it takes so long.")
    if row["not_run"]:
        parts.append("Not run: " + "; ".join(f"{e['name']} ({e['reason']})" for e in row["not_run"]) + ".")
    if (best := row["best"]) is not None:
        place = "first" if best["ratio"] < 1 else "not first"
        parts.append(f"The best of ours ({best['of']}) to the best peer ({best['to']}): {best['ratio']:.3f}, {place}.")
    if "series" in row:
        parts.append(table(("ms", *(f"{x:,}" for x in row["series"][0]["x"]), "power"), [series(s) for s in row["series"]]))
        parts.append("The power is that of the size with which time grows between the last two: 1 is linear.")
    return "\n\n".join(parts)


def series(found: dict[str, Any]) -> tuple[str, ...]:
    """Times at all sizes, in milliseconds."""
    return (found["name"], *(f"{1e3 * t:.3g}" for t in found["median"]), f"{found['bend']:.2f}")


def line(c: dict[str, Any], row: dict[str, Any]) -> tuple[str, ...]:
    """One contender."""
    role = {"ours": "", "twin": "", "peer": "", "reference": " (reference)"}[c["role"]]
    ratio = "" if c["ours_to_it"] is None else f"{c['ours_to_it']:.3f}"
    rounds = (
        "(1)" if c["first_only"] else f"{c['rounds']}" + (", few" if c["rounds"] < FEW and row["rounds"] >= FEW and row["name"] != "memory" else "")
    )
    losses = "" if None in c["losses"] or not c["losses"] else "{:.3f}, {:.3f}".format(c["losses"][0], c["losses"][-1])
    low, high = (scaled(q, row) for q in c["quartiles"])
    floor = "" if not c["floor"] else scaled(c["floor"], row)
    return (c["name"] + role, scaled(c["median"], row), f"{low}, {high}" if c["rounds"] > 2 else "", ratio, rounds, floor, losses)


def row_unit(row: dict[str, Any]) -> str:
    """Times stand in milliseconds."""
    return "ms" if row["unit"] == "s" else row["unit"]


def scaled(value: float, row: dict[str, Any]) -> str:
    """A number of this row in the unit of its heading."""
    shown = 1e3 * value if row["unit"] == "s" else value
    return f"{shown:,.0f}" if shown >= 1000 else f"{shown:.3g}"


def anchor(row: dict[str, Any]) -> str:
    """The link to a section, as GitHub makes it."""
    kept = "".join(c for c in (row["title"] + on(row)).lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Markdown; columns that are empty throughout are left out."""
    used = [i for i in range(len(heads)) if i == 0 or any(cells[i] for cells in lines)]
    rows = [[heads[i] for i in used], ["---"] * len(used), *([cells[i] for i in used] for cells in lines)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def in_terminal(record: dict[str, Any]) -> str:
    """One row in some lines."""
    lines = [f"\n{record['title']}  [{record['name']}]"]
    for c in record["contenders"]:
        ratio = "" if c["ours_to_it"] is None else f"{c['ours_to_it']:.3f}"
        cells = line(c, record)
        lines.append(f"  {c['name']:38}{cells[1]:>9} {row_unit(record)}  ours/it {ratio:>6}  rounds {cells[4]:>3}  {c['role']:9} {cells[6]}")
    lines += [f"  {e['name']:38} not run: {e['reason']}" for e in record["not_run"]]
    lines += [
        f"  {s['name']}: " + ", ".join(f"{x:,}: {1e3 * t:.3g} ms" for x, t in zip(s["x"], s["median"], strict=True)) for s in record.get("series", ())
    ]
    lines += [f"  {verdict(c)}" for c in record["claims"]]
    floor = next((c["floor"] for c in record["contenders"] if c["floor"]), None)
    noise = f"A/A {again(record)}: {'counts' if record['counts'] else 'too noisy to count'}" if record["again"] else "no A/A"
    lines.append(f"  {noise}" + (f"; floor {scaled(floor, record)} {row_unit(record)}" if floor else "") + f"; load {record['load']:.1f}")
    return "\n".join(lines)


def verdict(claim: dict[str, Any]) -> str:
    """A claim in a line."""
    goal = f"at most {claim['reach']}" + (f", stretch {claim['stretch']}" if claim["stretch"] else "")
    if claim["ratio"] is None:
        return f"{claim['ours']} against {claim['against']}: not measured ({goal})"
    return f"{claim['ours']} / {claim['to']} = {claim['ratio']:.3f} [{quartiles(claim)}]  {'reached' if claim['met'] else 'MISSED'} ({goal})"
