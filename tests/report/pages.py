"""What a browser would read of a page: a tree of elements."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}


@dataclass(kw_only=True)
class Element:
    """An element with its attributes, text and children."""

    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    text: str = ""

    def walk(self) -> list[Element]:
        """Return it and all below, in order."""
        return [self, *(below for child in self.children for below in child.walk())]

    def all_text(self) -> str:
        """Return its text and that of all below."""
        return self.text + "".join(child.all_text() for child in self.children)


class Page(HTMLParser):
    """A page as a tree; an element that is closed by another's end is an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root = Element(tag="", attributes={})
        self._open = [self.root]
        self.feed(page)
        self.close()
        assert self._open == [self.root], [element.tag for element in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        element = Element(tag=tag, attributes={name: value or "" for name, value in attrs})
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag=tag, attributes={name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].text += data

    def of(self, *tags: str) -> list[Element]:
        """Return all elements of these tags, in order."""
        return [element for element in self.root.walk() if element.tag in tags]
