"""The documents show the house as it is."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rex_ray"


def files_section() -> str:
    return (ROOT / "docs" / "architecture.md").read_text().partition("## Files")[2]


def room_lines(room: str) -> str:
    """The lines of a room in the files section, up to the next room's."""
    found = re.search(rf"^  {room}/ (.*?)(?=^  \w+/|^\w)", files_section(), flags=re.MULTILINE | re.DOTALL)
    assert found, f"docs/architecture.md names no room {room}/"
    return found[1]


@pytest.mark.parametrize("room", sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()))
def test_every_module_stands_in_the_architecture_under_its_room(room: str) -> None:
    named = set(re.findall(r"\w+", room_lines(room)))
    modules = {path.stem for path in (PACKAGE / room).rglob("*.py")} - {"__init__"}
    assert modules <= named, f"add to docs/architecture.md: {sorted(modules - named)}"


def listed_names(module: str) -> list[str]:
    """What a module's ``__all__`` says, without importing it: integrations import what may not be installed."""
    path = ROOT / (module.replace(".", "/") + ".py")
    source = path if path.exists() else path.with_suffix("") / "__init__.py"
    found = re.search(r"^__all__ = (\[.*?\])", source.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert found, f"{module} says nothing of what is public"
    return [name for name in ast.literal_eval(found[1]) if not name.startswith("_")]


@pytest.mark.parametrize(
    "module",
    [
        "rex_ray",
        "rex_ray.loggers",
        "rex_ray.standalone",
        *(f"rex_ray.integrations.{name}" for name in ("accelerate", "huggingface", "lightning")),
    ],
)
def test_the_api_reference_has_every_public_name(module: str) -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    entries = re.findall(r"^::: (\S+)", pages, flags=re.MULTILINE)
    # Errors stand there as their whole module.
    documented = {entry.rpartition(".")[2] for entry in entries} | set(listed_names("rex_ray.core.errors"))
    assert "rex_ray.core.errors" in entries
    assert set(listed_names(module)) <= documented | {"SessionAccelerator"}  # the base of two integrations


def test_the_readme_shows_the_diff_of_the_five_lines() -> None:
    (shown,), (meant,) = (
        re.findall(r"```diff\n.*?```", (ROOT / name).read_text(), flags=re.DOTALL)
        for name in ("README.md", "docs/five_lines.md")
    )
    assert shown == meant


HOLE = "…"


def text_of(node: ast.expr) -> str:
    """A string as the source has it, with a hole for every value."""
    match node:
        case ast.Constant(value=str() as text):
            return re.sub(r"%(?:\.\d)?[sdgf]", HOLE, text)
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) if isinstance(part, ast.Constant) else HOLE for part in parts)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return text_of(left) + text_of(right)
        case _:
            return HOLE


@functools.cache
def texts_of_the_package() -> tuple[str, ...]:
    """Every string of the library, and every line of its templates, with holes for values."""
    nodes = (node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    strings = {text_of(node) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)}
    templates = {line for path in PACKAGE.rglob("*.j2") for line in path.read_text().splitlines()}
    return tuple(strings | templates)


def holds_in_order(text: str, pieces: list[str]) -> bool:
    at = 0
    for piece in pieces:
        if (found := text.find(piece, at)) < 0:
            return False
        at = found + len(piece)
    return True


def is_said(quote: str) -> bool:
    """Whether one text of the package has all pieces of a quote in their order; a hole of either stands for a value."""
    return any(holds_in_order(text, quote.split(HOLE)) for text in texts_of_the_package())


def quotes() -> list[str]:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    lines = re.findall(r"^>.*$", page, flags=re.MULTILINE)
    assert all(re.fullmatch(r"> - `[^`]+`", line) for line in lines), "a quote is one line in backticks"
    return [line[5:-1] for line in lines]


@pytest.mark.parametrize("quote", quotes())
def test_every_message_that_troubleshooting_quotes_is_one_of_the_library(quote: str) -> None:
    assert len(quote.replace(HOLE, "")) > 15, "a quote of holes is said by everything"
    assert is_said(quote)


def test_a_message_that_nobody_says_is_found_out() -> None:
    assert len(quotes()) > 40
    assert not is_said("no node meets … with … per worker, after waiting … hours")
    assert not is_said("per worker, after waiting … s … no node meets")
