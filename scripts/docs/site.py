"""Build the documentation as a website in build/site, by mkdocs-material; a broken link fails.

Pages are read from README.md, docs and the committed results, with the same paths to each other as in the repository.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
COPIED = (
    "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*", "configs/*", "scripts/*.sh", "scripts/*.py",
    "scripts/benchmarks/*.py", "scripts/benchmarks/results/*", "scripts/text/SOURCES.md",
)  # fmt: skip
LISTED = ("configs", "scripts/benchmarks/results")  # folders that pages link to


def navigation() -> list[object]:
    """The website's menu: sections and pages of docs/README.md, in its order."""
    sections: list[object] = [{"moetool": "README.md"}, {"Documentation": "docs/README.md"}]
    pages: list[str] = []
    for line in (ROOT / "docs/README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("**"):
            pages = []
            sections.append({line.strip("*"): pages})
        elif line.startswith("- ") and ".md)" in line:
            pages.append("docs/" + line.split("](")[1].split(")")[0])
    return sections


def main() -> None:
    """Copy the pages and build the website."""
    source, target = BUILD / "pages", BUILD / "site"
    shutil.rmtree(source, ignore_errors=True)
    for pattern in COPIED:
        for path in sorted(ROOT.glob(pattern)):
            copy = source / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                shutil.copyfile(path, copy)
    for folder in LISTED:
        names = sorted(path.name for path in (source / folder).iterdir())
        lines = (f"- [{name}]({name})" for name in names)
        (source / folder / "index.md").write_text("\n".join((f"# {folder}", "", *lines, "")), encoding="utf-8")
    settings = BUILD / "mkdocs.yml"
    places = {
        "INHERIT": str(ROOT / "scripts/docs/mkdocs.yml"),
        "docs_dir": str(source),
        "site_dir": str(target),
        "nav": navigation(),
    }
    settings.write_text(yaml.safe_dump(places), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(settings)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    sys.exit(subprocess.run(command, check=False, env=environment).returncode)


if __name__ == "__main__":
    main()
