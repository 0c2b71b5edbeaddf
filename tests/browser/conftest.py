"""One Chromium for all tests in this folder, with a page that fails a test when it asks for anything or complains."""

import importlib.util
import shutil
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "reports"))  # made_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def browser():
    missing = [name for name in ("playwright", "plotly", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install playwright 'halfstep[report]'")
    if CHROMIUM is None:
        pytest.skip("needs a Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser):
    """A function (file, more of the context's options) to its page, when all charts are drawn. Afterwards: no request, no complaint."""
    with _pages(browser) as open_page:
        yield open_page


@pytest.fixture(scope="session")
def pages(browser):
    """What `opened` gives, as a block of its own: to open a page takes seconds, and tests may share one."""
    return partial(_pages, browser)


@contextmanager
def _pages(browser):
    contexts, requests, said = [], [], []

    def open_page(path, wait=True, **options):
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.route(lambda url: not url.startswith(("file:", "data:", "blob:")), lambda route: (requests.append(route.request.url), route.abort()))
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(Path(path).as_uri())
        if wait:
            page.wait_for_selector("html[data-ready]", state="attached")  # the page's policy forbids what wait_for_function does
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert requests == [], "a request left the page"
    assert said == [], "the browser complained"
