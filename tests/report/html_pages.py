"""A page as a strict reader sees it."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Reads a page; fails where tags are not closed in turn.

    Attributes:
        ids: in their order.
        headings: text of every `h2`.
        tables: rows of cells, by the heading above each.
        loads: what attributes name that a browser could fetch.
        tags: every tag that there is.
        drawn: how many charts.
    """

    def __init__(self, content: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.headings: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.loads: list[str] = []
        self.tags: set[str] = set()
        self._open: list[str] = []
        self._title = ""
        self.feed(content)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    @property
    def drawn(self) -> int:
        return sum(name.endswith("-title") for name in self.ids)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        said = dict(attributes)
        self.ids += [value for name, value in attributes if name == "id" and value]
        self.loads += [
            said[name] or "" for name in ("src", "href", "xlink:href", "action", "srcset", "data") if name in said
        ]
        if tag in VOID:
            return
        self._open.append(tag)
        if tag in ("h2", "h3"):
            self._title = ""
        elif tag == "table":
            self.tables[self._title] = []
        elif tag == "tr":
            self.tables[self._title].append([])
        elif tag in ("td", "th"):
            self.tables[self._title][-1].append("")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag, f"</{tag}> comes too early"
        if tag == "h2":
            self.headings.append(self._title)

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("h2", "h3"):
            self._title += data
        elif self._open and self._open[-1] in ("td", "th"):
            self.tables[self._title][-1][-1] += data

    def rows(self, title: str) -> list[list[str]]:
        """Of a table, without its header."""
        return self.tables[title][1:]


def check_page(content: str) -> Page:
    """Well-formed, every id once, and nothing that is loaded or run."""
    assert content.startswith("<!DOCTYPE html>")
    page = Page(content)
    assert len(page.ids) == len(set(page.ids))
    assert not page.tags & {"script", "link", "iframe", "object", "embed", "form", "base"}
    assert all(name.startswith(("#", "data:image/png;base64,")) for name in page.loads)
    assert all(name[1:] in page.ids for name in page.loads if name.startswith("#"))
    assert "@import" not in content
    assert "url(" not in content.replace("url(#", "")
    return page
