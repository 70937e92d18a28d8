"""Renders the page of made-up jobs in every state, and that of a checkpoint, for screens and
phones, light and dark.

Needs playwright, Pillow and Chromium. `python scripts/render_page.py` writes the pictures that the
documentation shows into docs/screens; `python scripts/render_page.py FOLDER` writes all there are.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from holdfast.web.report import standing_still  # noqa: E402  # the tests' folder comes first
from holdfast.web.tree_page import checkpoint_page  # noqa: E402
from tests.support.checkpoint_leaves import transformer  # noqa: E402
from tests.support.page_states import STATES  # noqa: E402

SCREENS = ROOT / "docs" / "screens"
WIDTHS = {"wide": 1400, "phone": 390}
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
COLOURS = 128  # of a picture's palette
CHECKPOINT_HEIGHT = 1000  # of its picture: its table is long
# Committed, to keep the repository small: each state once, and what the documentation shows.
KEPT = {f"{name}-wide-light" for name in [*STATES, "checkpoint"]} | {
    f"hung-{width}-{scheme}" for width in WIDTHS for scheme in SCHEMES
}


def main() -> None:
    """Writes the pictures."""
    every = len(sys.argv) > 1
    folder = Path(sys.argv[1]) if every else SCREENS
    pages = {name: standing_still(made()) for name, (_, made) in STATES.items()}
    pages["checkpoint"] = checkpoint_page(transformer())
    forms = [
        (name, width, scheme)
        for name in pages
        for width in WIDTHS
        for scheme in SCHEMES
        if every or f"{name}-{width}-{scheme}" in KEPT
    ]
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, width, scheme in forms:
            page = Path(scratch) / f"{name}.html"
            page.write_text(pages[name], encoding="utf-8")
            picture = _picture(browser, page, width, scheme)
            _write(folder / f"page-{name}-{width}-{scheme}.png", picture)
        browser.close()


def _picture(browser: Browser, page: Path, width: str, scheme: Literal["light", "dark"]) -> bytes:
    """Returns the page as a screen shows it in full, or as a phone shows its top."""
    tab = browser.new_page(
        viewport={"width": WIDTHS[width], "height": 900},
        color_scheme=scheme,
        timezone_id="UTC",
    )
    tab.goto(f"file://{page}")
    height = 900
    if width == "wide":
        height = tab.evaluate("document.documentElement.scrollHeight")
    if page.stem == "checkpoint":
        height = min(height, CHECKPOINT_HEIGHT)
    tab.set_viewport_size({"width": WIDTHS[width], "height": height})
    picture = tab.screenshot()
    tab.close()
    return picture


def _write(path: Path, picture: bytes) -> None:
    """Writes a picture with a palette, which is a quarter of its size."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
