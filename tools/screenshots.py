"""The pictures of the README: `python tools/screenshots.py` trains the small GPT in fp16-mixed, reports the run, and takes them in Chromium.

Writes docs/images/report-{desktop,dark,phone,layers}.png. `--run FOLDER` takes a run that is there instead. Needs plotly, jinja2, playwright, pillow
and a chromium.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
LARGEST = 200_000  # bytes of a picture
SETTINGS = ("--precision", "fp16-mixed", "--max_steps", "300", "--logging_steps", "2", "--eval_steps", "50", "--sample_length", "0")
RECORDS = ("--record_every", "10")
PARTS = {"layers": "#layers figure"}  # pictures of a part of the page
VIEWS: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1200, "height": 1150}},
    "dark": {"viewport": {"width": 1200, "height": 1150}, "color_scheme": "dark"},
    "layers": {"viewport": {"width": 1000, "height": 900}},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2},
}


def train(folder: Path) -> Path:
    """A run of the demo in a new folder."""
    run = folder / "001-fp16-mixed"
    subprocess.run([sys.executable, "-m", "halfstep.cli.main", "train", *SETTINGS, *RECORDS, "--output_dir", str(run)], check=True)
    return run


def shoot(page_file: Path, to: Path) -> list[Path]:
    """One picture for each view; with few colours, so that it is small."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("no chromium here: apt-get install chromium")
    to.mkdir(parents=True, exist_ok=True)
    made = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, options in VIEWS.items():
            page = browser.new_context(**options).new_page()
            page.goto(page_file.as_uri())
            page.wait_for_selector("html[data-ready=yes]", state="attached")
            path = to / f"report-{name}.png"
            (page.locator(PARTS[name]) if name in PARTS else page).screenshot(path=path)
            Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
            made.append(path)
        browser.close()
    return made


def main() -> int:
    """Write the pictures; 1 when one is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run folder that is there")
    parser.add_argument("--to", type=Path, default=IMAGES)
    options = parser.parse_args()
    from halfstep.reports import report

    with tempfile.TemporaryDirectory() as folder:
        run = options.run or train(Path(folder))
        made = shoot(report(run, output=Path(folder) / "report.html"), options.to)
    for path in made:
        print(f"{path}: {path.stat().st_size:,} bytes")
    return int(any(path.stat().st_size > LARGEST for path in made))


if __name__ == "__main__":
    sys.exit(main())
