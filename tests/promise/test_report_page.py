"""The report in a real browser: it fits a screen and a phone, and says nothing on the console."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bigbrain_fx.plan.plan_report import report
from tests.support import samples

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""
LEAST_BYTES = 20_000  # an empty page of 1200 x 1500 has 8,389
LOOK = """<script>
window.onload = () => document.body.dataset.seen = [
  document.documentElement.scrollWidth - window.innerWidth,
  ...[...document.querySelectorAll("svg")].map(
    (each) => Math.round(each.getBoundingClientRect().height)),
].join(",");
</script></html>"""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not BROWSER, reason="needs chromium: apt-get install chromium"),
]


def seen(path: Path, width: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Open a page; `words` say what to do with it."""
    fixed = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={path.parent}/own",
    )
    size = f"--window-size={width},1500"
    command = [BROWSER, *fixed, size, *words, path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.parametrize("width", [1200, 500])  # the least that a browser's window may have
def test_a_report_fits_the_screen_and_shows_its_drawings(tmp_path: Path, width: int) -> None:
    path = tmp_path / "report.html"
    page = report(samples.plan("gpt", "naive", 3, "1f1b", 4))
    path.write_text(page.replace("</html>", LOOK))
    found = re.search(r'data-seen="([^"]*)"', seen(path, width, "--dump-dom").stdout)
    assert found
    too_wide, *heights = map(int, found[1].split(","))
    assert too_wide <= 0
    assert len(heights) == page.count("<svg ")
    assert min(heights) > 40
    seen(path, width, f"--screenshot={tmp_path / 'page.png'}", "--hide-scrollbars")
    assert (tmp_path / "page.png").stat().st_size > LEAST_BYTES
