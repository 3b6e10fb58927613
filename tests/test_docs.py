"""The documents show the house as it is."""

from __future__ import annotations

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


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_relative_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / name).read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_commands_of_the_makefile_that_documents_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = {target for path in documents for target in re.findall(r"`make ([a-z-]+)", path.read_text())}
    assert {"demo", "test"} <= named <= targets
