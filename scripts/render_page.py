"""Renders the page of made-up jobs in every state, wide and narrow, light and dark.

Needs playwright, Pillow and Chromium. `python scripts/render_page.py` writes the pictures that the
documentation shows into docs/screens; `python scripts/render_page.py FOLDER` writes all there are.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from holdfast.web.report import standing_still  # noqa: E402  # the tests' folder comes first
from tests.support.page_states import STATES  # noqa: E402

SCREENS = ROOT / "docs" / "screens"
WIDTHS = {"wide": 1400, "phone": 390}
SCHEMES = ("light", "dark")
COLOURS = 128  # of a picture's palette
# In docs/screens: each state once, and the first one in every form.
KEPT = {f"{name}-wide-light" for name in STATES} | {
    f"hung-{width}-{scheme}" for width in WIDTHS for scheme in SCHEMES
}


def main() -> None:
    """Writes the pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else SCREENS
    every = len(sys.argv) > 1
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, (_, made) in STATES.items():
            report = Path(scratch) / f"{name}.html"
            report.write_text(standing_still(made()), encoding="utf-8")
            for width, pixels in WIDTHS.items():
                for scheme in SCHEMES:
                    if every or f"{name}-{width}-{scheme}" in KEPT:
                        tab = browser.new_page(
                            viewport={"width": pixels, "height": 900},
                            color_scheme=scheme,
                            timezone_id="UTC",
                        )
                        tab.goto(f"file://{report}")
                        picture = tab.screenshot(full_page=width == "wide")
                        tab.close()
                        _write(folder / f"page-{name}-{width}-{scheme}.png", picture)
        browser.close()


def _write(path: Path, picture: bytes) -> None:
    """Writes a picture with a palette, which is a quarter of its size."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
