"""The website of all pages is built, and every link in it leads somewhere."""

import subprocess
import sys

from pages import ROOT


def test_the_website_is_built_without_a_broken_link() -> None:
    """`--strict` makes mkdocs fail on a link or an anchor that is missing, and on a page that the menu lacks."""
    command = [sys.executable, str(ROOT / "scripts/docs/site.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "build/site/docs/architecture.html").read_text(encoding="utf-8")
    assert 'class="mermaid"' in page
    assert (ROOT / "build/site/index.html").is_file()
