"""The report in a browser: charts, filters and keyboard work, it fits a phone, both themes can be read, and it asks nobody for anything."""

import json
import math

import pytest

from halfstep.reports import report

PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
CHARTS = ["loss", "scale", "norm", "layers", "stalled", "rate", "memory"]


@pytest.fixture(scope="module")
def files(browser, tmp_path_factory):
    """One run, two compared, and one whose texts try to be scripts."""
    from made_run import EVENTS, write_run

    at = tmp_path_factory.mktemp("runs")
    bad = {50: math.nan, 51: math.nan, 120: math.inf}
    one = write_run(at / "one", events=EVENTS, bad=bad, depth=24)
    two = write_run(at / "two-with-a-rather-long-name-that-has-to-be-broken", policy="bf16-mixed", seed=1, lines=4000, events=EVENTS[:2])
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    three = write_run(at / "three", lines=20, events=[{"step": 1, "kind": "note", "text": evil, "why": evil, "culprits": [evil]}], policy=evil)
    (three / "layers.jsonl").write_text(
        json.dumps({"step": 1, "scale": 1.0, "kind": "outputs", "format": "fp16", "layers": {evil: [1, 0, 0.5, 0, 0.5, 1, 1]}}) + "\n"
    )
    return {"one": report(one), "both": report(one, two, output=at / "both.html"), "evil": report(three)}


@pytest.fixture(scope="module")
def page(pages, files):
    """The page of one run, for the tests that leave it as they need not find it: reached by tab, filtered, read by keyboard, in this order."""
    with pages() as open_page:
        yield open_page(files["one"])


def test_every_chart_is_drawn_and_all_can_be_reached_by_tab_with_the_focus_in_sight(page):
    assert page.locator("html").get_attribute("data-ready") == "yes"
    assert page.locator(".plot").evaluate_all("plots => plots.map(p => p.id)") == [f"plot-{name}" for name in CHARTS]
    for name in ("loss", "scale", "norm", "stalled", "rate"):
        paths = page.locator(f"#plot-{name} .scatterlayer path.js-line").evaluate_all("paths => paths.map(p => p.getAttribute('d'))")
        assert paths, name
        assert any("L" in path or "H" in path for path in paths), name
        assert max(map(len, paths)) > (200 if name in ("loss", "norm") else 10), name
    assert page.locator("#plot-layers .heatmaplayer image").count() == 1
    assert page.locator("#plot-memory .barlayer path").count() == 9
    assert page.locator("#plot-loss .scatterlayer .points path").count() >= 3, "the marks of what is not finite"
    reached, unseen = set(), []
    for _ in range(60):
        page.keyboard.press("Tab")
        here = page.evaluate("""() => { const e = document.activeElement, chip = e.closest('.chip'), s = getComputedStyle(chip || e);
            return [e.id || e.textContent.trim() || e.value, s.outlineStyle, parseFloat(s.outlineWidth)]; }""")
        if here[0].startswith("Skip to the report\n"):
            break  # the body again: all has been reached
        reached.add(here[0])
        if here[1] == "none" or here[2] < 2:
            unseen.append(here)
    assert {"theme", "query", "clear", *(f"plot-{name}" for name in CHARTS)} <= reached
    assert unseen == []


def test_runs_lie_over_each_other_and_can_be_hidden(opened, files):
    page = opened(files["both"])
    lines = page.locator("#plot-loss .scatterlayer path.js-line:visible")
    before = lines.count()
    button = page.get_by_role("button", name="one: training loss", exact=True).first
    assert button.get_attribute("aria-pressed") == "true"
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    assert lines.count() < before
    assert page.evaluate("document.activeElement.textContent") == "one: training loss", "the focus stays where it was"
    page.get_by_role("button", name="logarithmic").first.click()
    assert page.evaluate("document.getElementById('plot-loss').layout.yaxis.type") == "log"
    page.locator("#run").select_option("one")
    assert (page.locator(".events li:visible").count(), page.locator("#shown").inner_text()) == (5, "5 of 7 events")


def test_events_are_filtered_by_kind_and_words(page):
    visible = page.locator(".events li:visible")
    assert (visible.count(), page.locator("#shown").inner_text()) == (5, "5 events")
    page.get_by_label("checkpoint").uncheck()
    assert (visible.count(), page.locator("#shown").inner_text()) == (4, "4 of 5 events")
    page.get_by_label("Search").fill("MLP.down")
    assert visible.count() == 1
    assert "within a factor of 2" in visible.inner_text()
    page.get_by_label("Search").fill("no such words")
    assert (visible.count(), page.locator("#shown").inner_text()) == (0, "0 of 5 events")
    page.get_by_role("button", name="Show all").click()
    assert visible.count() == 5


def test_charts_are_read_by_keyboard(page):
    for key, words in (("ArrowRight", "training loss, step 1: "), ("End", "training loss, step 200: "), ("ArrowDown", "evaluation loss, step 200: ")):
        page.locator("#plot-loss").press(key)
        assert page.locator("#reading-loss").inner_text().startswith(words), key
    page.locator("#plot-loss").press("ArrowDown")
    assert "training loss is NaN at steps 50 to 51 (2 records)" in page.locator("#reading-loss").inner_text()
    assert page.locator("#plot-loss .hoverlayer text").count() > 0, "and the pointer's label is there"
    whole = page.evaluate("document.getElementById('plot-loss')._fullLayout.xaxis.range")
    page.locator("#plot-loss").press("+")
    near = page.evaluate("document.getElementById('plot-loss')._fullLayout.xaxis.range")
    assert near[1] - near[0] < 0.6 * (whole[1] - whole[0])
    page.locator("#plot-loss").press("0")
    assert page.evaluate("document.getElementById('plot-loss')._fullLayout.xaxis.range") == whole
    page.locator("#plot-layers").press("ArrowRight")
    page.locator("#plot-layers").press("ArrowDown")
    first = page.locator("#reading-layers").inner_text()
    assert first.startswith("blocks.0.attn.out, step 1: "), first
    page.get_by_label("outputs: at or near overflow").check()
    assert page.evaluate("document.getElementById('plot-layers').data[0].z[23].slice(-1)[0]") == pytest.approx(math.log10(0.009))


@pytest.mark.parametrize("which", [pytest.param("one", marks=pytest.mark.slow), "both", "evil"])
def test_a_phone_is_not_scrolled_sideways(opened, files, which):
    page = opened(files[which], **PHONE)
    wide, screen = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= screen == 360
    over = page.evaluate("""() => [...document.querySelectorAll('main *, header *')].filter(e => e.getBoundingClientRect().right > 361
        && !e.closest('.scroll') && !e.closest('svg')).map(e => e.tagName + '.' + e.className)""")
    assert over == []
    if which == "evil":  # its texts stay texts
        assert page.locator("img").count() == 0
        assert page.locator(".events li").text_content().count("onerror=alert(2)") == 3


CONTRAST = """() => {
  const channel = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = e => {
    const c = parse(getComputedStyle(e).backgroundColor);
    return c.length < 4 || c[3] === 1 ? c : behind(e.parentElement);
  };
  const found = {};
  for (const e of document.querySelectorAll('body *')) {
    const text = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!text || !e.checkVisibility() || ['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(e.tagName)) continue;
    const svg = e instanceof SVGElement, style = getComputedStyle(e), from = svg ? e.closest('figure') : e;
    const [a, b] = [light(parse(svg ? style.fill : style.color)), light(behind(from))].sort((x, y) => y - x);
    const name = e.tagName + '.' + (e.className.baseVal ?? e.className);
    found[name] = Math.min(found[name] ?? 99, (a + 0.05) / (b + 0.05));
  }
  return found;
}"""


DARK = "rgb(20, 23, 28)"


@pytest.mark.parametrize("by_hand", [False, True], ids=["the system's theme", "the switch"])
def test_text_has_a_contrast_of_4_5_in_both_themes(opened, files, by_hand):
    page = opened(files["one"], color_scheme="light" if by_hand else "dark", reduced_motion="reduce")
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    paper, stroke = "getComputedStyle(document.body).backgroundColor", "getComputedStyle(document.querySelector('#plot-loss path.js-line')).stroke"
    assert (page.evaluate(paper) == DARK) != by_hand
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto", "no motion where none is wanted"
    before = page.evaluate(stroke)
    found = [page.evaluate(CONTRAST)]
    if by_hand:
        for theme in ("light", "dark"):
            page.locator("#theme").press("Enter")
            assert page.locator("#theme").inner_text() == f"Theme: {theme}"
        assert page.evaluate(paper) == DARK
        assert page.evaluate(stroke) != before, "the charts follow"
        found.append(page.evaluate(CONTRAST))
    for ratios in found:
        assert len(ratios) > 25
        assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}


def test_without_scripts_the_text_is_there(opened, files):
    page = opened(files["one"], wait=False, java_script_enabled=False)
    assert "Did it train?" in page.locator("#answers").inner_text()
    assert page.locator(".events li").count() == 5
