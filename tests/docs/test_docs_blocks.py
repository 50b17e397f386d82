"""Every shell and Python block of README and docs, run as it is shown, on models that are small enough for it.

`pages.py` says what stands for the models and texts that are named there, what is not run, and why.
"""

import re
import runpy
from pathlib import Path

import pytest
from pages import NOT_RUN, PAGES, ROOT, RUNNING, blocks, shell_words

LANGUAGES = {"console", "bash", "cpp", "python", "text", "yaml", "json", "mermaid"}


@pytest.mark.parametrize("page", RUNNING)
def test_what_a_page_shows_runs(reader, page):
    shown = reader.read(page)
    assert len(shown) == sum(words[0] not in NOT_RUN for words in shell_words(page))


@pytest.mark.parametrize("page", PAGES)
def test_blocks_say_their_language(page):
    assert {block.language for block in blocks(page)} <= LANGUAGES


def test_nothing_is_left_out_without_need():
    """Every command that is not run is shown somewhere."""
    assert set(NOT_RUN) == {words[0] for page in PAGES for words in shell_words(page)} - {"moetool"}


def test_scripts_exist():
    """Files, scripts and make targets that pages name, and the options of scripts."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        for words in shell_words(page):
            if words[0] == "make":
                assert words[1] in targets, page
            for word in words:
                if word.startswith(("scripts/", "configs/", "tests/")):
                    assert (ROOT / word).exists(), f"{page}: {word}"
            if words[0] == "python":
                source = (ROOT / words[1]).read_text(encoding="utf-8")
                assert all(f'"{word}"' in source for word in words if word.startswith("--")), f"{page}: {words}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """Links within the repository: to files that exist, and to headings that their pages have."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, heading = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
            assert heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, target


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in PAGES:
        if page.startswith("docs/") and page != "docs/README.md":
            assert f"({Path(page).name})" in index


def test_the_readme_is_a_landing_page():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160


def test_options_are_those_of_the_commands():
    """`make docs` writes the page anew."""
    generator = runpy.run_path(str(ROOT / "scripts" / "docs" / "options.py"))
    assert generator["text"]() == (ROOT / "docs" / "options.md").read_text(encoding="utf-8"), "make docs"


def test_the_page_of_families_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    generator = runpy.run_path(str(ROOT / "scripts" / "docs" / "families.py"))
    assert generator["text"]() == (ROOT / "docs" / "families.md").read_text(encoding="utf-8"), "make docs"


def test_the_picture_shows_what_was_measured():
    chart = runpy.run_path(str(ROOT / "scripts" / "docs" / "chart.py"))
    points = {label: chart["points"](label) for label in chart["SERIES"]}
    assert len(points["moetool --method d2moe"]) == 3
    assert all(0 < size < 100 and loss > 0 for series in points.values() for size, loss in series)
    text = (ROOT / "docs" / "size-and-loss.svg").read_text(encoding="utf-8")
    other = chart["other_kind"]()
    assert other["hybrid 75 %", "half"] < other["hybrid 75 %", "text"] < other["nearest 3 bits", "no text"]
    assert {calibrated for _, calibrated in other} == {own for own, _ in chart["CALIBRATED"].values()}
    assert all(label in text for label in [*points, *chart["CALIBRATED"], *(method for method, _ in other)])
    assert "thousandths of a nat" in text, "as the pages around it say"


def test_the_format_names_every_representation():
    from moetool.representations import representations

    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    assert [kind for kind in representations() if not re.search(rf"\| `{kind}[:`]", text)] == []
