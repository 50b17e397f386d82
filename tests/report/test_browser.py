"""A page in a real browser, where there is one: it fits, can be read, and nothing is fetched or complained of."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from html_pages import check_page
from whole import whole_report

from moetool.report.page import write_page
from moetool.report.pictures import is_there

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DARK, LIGHT = 0, 1
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium"),
    pytest.mark.skipif(not is_there(), reason="matplotlib is not installed"),
]
# Shows the page in a frame of every width, and writes down what it finds there.
FRAMES = """<!DOCTYPE html><body><pre id="found"></pre><script>
const found = {};
const measure = (frame) => {
  const inside = frame.contentDocument, root = inside.documentElement;
  const texts = [...inside.querySelectorAll("svg text")].map((text) => {
    const svg = text.closest("svg");
    return parseFloat(getComputedStyle(text).fontSize) * svg.clientWidth / svg.viewBox.baseVal.width;
  });
  const outside = [...inside.querySelectorAll("body *")].filter((each) =>
    !each.closest(".scroll") && !each.closest("svg") && each.getBoundingClientRect().right > root.clientWidth + 1);
  const label = inside.querySelector("svg text");
  found[frame.width] = {
    wide: root.scrollWidth - root.clientWidth,
    outside: outside.map((each) => each.tagName),
    smallest: Math.min(...texts),
    paper: getComputedStyle(inside.body).backgroundColor,
    ink: getComputedStyle(inside.body).color,
    label: label && getComputedStyle(label).fill,
  };
  document.getElementById("found").textContent = JSON.stringify(found);
};
for (const width of [390, 1280]) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 800; frame.src = "page.html";
  frame.onload = () => measure(frame);
  document.body.append(frame);
}
</script>"""


def browse(page: Path, scheme: int) -> tuple[dict[str, Any], list[str]]:
    """What every frame shows, by its width, and what the browser's console says."""
    frames = page.with_name("frames.html")
    frames.write_text(FRAMES)
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--allow-file-access-from-files", "--enable-logging=stderr"),
            *(f"--user-data-dir={page.parent / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}"),
            *("--window-size=1400,900", "--virtual-time-budget=4000", "--dump-dom", frames.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None
    return json.loads(found[1]), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.slow
def test_a_page_fits_and_can_be_read(tmp_path: Path) -> None:
    write_page(whole_report(), tmp_path / "page.html")
    check_page((tmp_path / "page.html").read_text())
    papers = set()
    for scheme in (DARK, LIGHT):
        shown, said = browse(tmp_path / "page.html", scheme)
        assert said == []
        assert set(shown) == {"390", "1280"}
        for found in shown.values():
            assert found["wide"] == 0
            assert found["outside"] == []
            assert found["smallest"] >= 9.5
            assert found["label"] == found["ink"] != found["paper"]
            papers.add(found["paper"])
    assert len(papers) == 2


@pytest.mark.slow
def test_a_page_that_does_not_is_found_out(tmp_path: Path) -> None:
    """Otherwise the test above would say nothing."""
    write_page(whole_report(), tmp_path / "page.html")
    content = (tmp_path / "page.html").read_text()
    wrong = '<p style="width: 500px">x</p><img src="https://example.invalid/x.png"><script>1</script>'
    (tmp_path / "page.html").write_text(content.replace("<main>", f"<main>{wrong}"))
    shown, said = browse(tmp_path / "page.html", LIGHT)
    assert shown["390"]["wide"] > 0
    assert shown["390"]["outside"] == ["P"]
    assert any("example.invalid" in line for line in said)
    assert any("script" in line for line in said)
