"""What documents refer to is there: names of the library and their arguments, commands, files, pages and headings."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from markdown.extensions.toc import slugify
from typer.main import get_command

import rex_ray
from rex_ray.cli import app
from rex_ray.standalone import training

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")],
    key=lambda page: str(page.relative_to(ROOT)),
)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", flags=re.MULTILINE | re.DOTALL)
FOLDERS = ("deploy", "docs", "examples", "experiments", "rex_ray", "tests", "tools", "workloads")


class Piece(NamedTuple):
    """Something a page says, for the message of a test that fails."""

    page: str
    text: str


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(*languages: str) -> list[Piece]:
    """Every fenced block of these languages."""
    found = ((page, each) for page in PAGES for each in FENCE.finditer(page.read_text()))
    return [Piece(name_of(page), textwrap.dedent(each[3])) for page, each in found if each[2] in languages]


def inline() -> list[Piece]:
    """Every piece of code within a sentence; a line break in it is a space."""
    prose = ((name_of(page), FENCE.sub("", page.read_text())) for page in PAGES)
    return [Piece(page, " ".join(code.split())) for page, text in prose for code in re.findall(r"`([^`]+)`", text)]


def in_files(suffix: str) -> list[Piece]:
    return [Piece(name_of(path), path.read_text()) for path in sorted((ROOT / "examples").glob(f"*{suffix}"))]


@functools.cache
def trees() -> list[tuple[Piece, ast.Module]]:
    """Every Python block and example, and what of the code within sentences parses."""
    found = [(piece, ast.parse(piece.text)) for piece in [*blocks("python"), *in_files(".py")]]
    for piece in inline():
        with contextlib.suppress(SyntaxError):
            found.append((piece, ast.parse(piece.text)))
    return found


@pytest.mark.parametrize("piece", blocks("python"), ids=lambda piece: piece.page)
def test_python_in_the_documents_is_python(piece: Piece) -> None:
    ast.parse(piece.text)


# --- names of the library


def source_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    found = [each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()]
    return found[0] if found else None


@functools.cache
def names_in(module: str) -> frozenset[str]:
    """What can be imported from a module, without importing it: integrations import what may not be installed."""
    source = source_of(module)
    assert source is not None, module
    tree = ast.parse(source.read_text())
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return frozenset(defined | bound | imported)


def is_there(dotted: str) -> bool:
    """Whether a dotted name of the library is a module, or a name or a name's attribute in one."""
    words = dotted.split(".")
    for cut in range(len(words), 0, -1):
        if source_of(".".join(words[:cut])) or (ROOT / "/".join(words[:cut])).is_dir():
            return cut == len(words) or words[cut] in names_in(".".join(words[:cut]))
    return False


def test_what_is_imported_from_the_library_is_there() -> None:
    wanted = [
        (piece.page, f"{node.module}.{alias.name}")
        for piece, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("rex_ray", "workloads")
        for alias in node.names
    ]
    assert len(wanted) > 20
    assert [each for each in wanted if not is_there(each[1])] == []


def test_modules_that_are_named_are_there() -> None:
    named = [
        (page, name)
        for page, text in inline()
        for name in re.findall(r"(?<![\w./-])(?:rex_ray|experiments|workloads)(?:\.[A-Za-z_]\w*)+", text)
        if not name.endswith((".decisions", ".csv", ".json", ".yaml"))  # a logger, files
    ]
    assert len(named) > 20
    assert [each for each in named if not is_there(each[1])] == []


def test_a_name_that_is_gone_is_found_out() -> None:
    assert is_there("rex_ray.hosting.control_host.ControlHost")
    assert not is_there("rex_ray.train.control_host")
    assert not is_there("rex_ray.RexTrainner")


# --- calls


def callables() -> dict[str, Callable[..., Any]]:
    """What documents call by name, with what its arguments must fit."""
    found: dict[str, Callable[..., Any]] = {"training": training}
    found |= {name: getattr(rex_ray, name) for name in ("RexConfig", "RexTrainer", "get_session", "launch")}
    for name in ("MLflowLogger", "ProgressLine", "TensorBoardLogger", "WandbLogger"):
        found[name] = getattr(importlib.import_module("rex_ray.loggers"), name)
    session = rex_ray.Session
    return found | {f"session.{name}": method for name, method in inspect.getmembers(session, inspect.isfunction)}


def unknown_keywords(call: ast.Call, known: dict[str, Callable[..., Any]]) -> list[str]:
    function = known[ast.unparse(call.func)]
    parameters = dict(inspect.signature(function).parameters)
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if function is rex_ray.launch:  # the rest are fields of the configuration
        parameters |= inspect.signature(rex_ray.RexConfig).parameters
        open_ended = False
    given = [keyword.arg for keyword in call.keywords if keyword.arg]
    return [] if open_ended else [name for name in given if name not in parameters]


def calls() -> list[tuple[str, ast.Call]]:
    return [(piece.page, node) for piece, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_calls_give_arguments_that_exist() -> None:
    known = callables()
    ours = [(page, call) for page, call in calls() if ast.unparse(call.func) in known]
    assert len(ours) > 100
    wrong = [(page, ast.unparse(call)[:80], bad) for page, call in ours if (bad := unknown_keywords(call, known))]
    assert wrong == []


def test_what_a_session_is_asked_for_exists() -> None:
    members = set(dir(rex_ray.Session)) | {"rank", "world_size", "device_kind", "node", "generation"}
    asked = [
        (piece.page, node.attr)
        for piece, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "session"
    ]
    assert len(asked) > 100
    assert [each for each in asked if each[1] not in members] == []


def test_as_many_names_take_what_is_prepared_as_were_given() -> None:
    assignments = [
        (piece.page, node)
        for piece, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) in ("session.prepare", "accelerator.prepare")
        and isinstance(node.targets[0], ast.Tuple)
        and not any(isinstance(given, ast.Constant) for given in node.value.args)  # prepare(...)
    ]
    assert len(assignments) > 8
    wrong = [
        (page, ast.unparse(node))
        for page, node in assignments
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Call)
        if len(node.targets[0].elts) != len(node.value.args) + len(node.value.keywords)
    ]
    assert wrong == []


# --- commands


def shell_lines() -> list[Piece]:
    """Every line that somebody may type: of shell blocks, transcripts, sentences and the examples' first words."""
    fenced = [
        Piece(page, line.removeprefix("$ "))
        for page, text in [*blocks("sh", "bash"), *(each for each in blocks("text") if "$ " in each.text)]
        for line in re.sub(r" *\\\n *", " ", text).splitlines()
    ]
    typed = [piece for piece in inline() if re.match(r"(python|rex-ray|make|torchrun|ray) ", piece.text)]
    documented = [
        Piece(page, line.strip())
        for page, text in in_files(".py")
        for line in re.sub(r" *\\\n *", " ", ast.get_docstring(ast.parse(text)) or "").splitlines()
        if re.match(r"\s+(\w+=\S+ )?(python|rex-ray|make|torchrun|ray) ", line)
    ]
    return fenced + typed + documented


def words_after(command: str) -> Iterator[tuple[str, list[str]]]:
    """Each use of a command, as the words behind it."""
    for page, line in shell_lines():
        text = re.split(r"\s#\s|\||&&|;", line)[0]
        try:
            words = shlex.split(text.replace("...", ""))
        except ValueError:  # a quotation that goes on in the next line
            continue
        for k, word in enumerate(words):
            if word == command and all("=" in before for before in words[:k]):
                yield page, words[k + 1 :]


def test_commands_of_rex_ray_and_their_options_exist() -> None:
    group: Any = get_command(app)  # of click, or of the copy of it that typer brings
    used = list(words_after("rex-ray"))
    assert len(used) > 50
    wrong: list[tuple[Any, ...]] = []
    for page, words in used:
        command: Any = group
        rest = list(words)
        while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
            command = command.commands.get(rest.pop(0).rstrip(","))
        if command is None:
            wrong.append((page, words))
            continue
        options = {"--help", *(name for each in command.params for name in (*each.opts, *each.secondary_opts))}
        wrong += [
            (page, words, word) for word in rest if re.match(r"--?[a-z]", word) and word.split("=")[0] not in options
        ]
    assert wrong == []


def test_modules_and_scripts_that_are_to_be_run_exist() -> None:
    texts = [(page, text) for page, text in shell_lines()]
    modules = [(page, name) for page, text in texts for name in re.findall(r"python -m ([\w.]+)", text)]
    ours = [(page, name) for page, name in modules if name.split(".")[0] in FOLDERS]
    scripts = [(page, name) for page, text in texts for name in re.findall(r"\bexamples/\w+\.py", text)]
    assert len(ours) > 30
    assert len(scripts) > 5
    assert [each for each in ours if not source_of(each[1])] == []
    assert [each for each in scripts if not (ROOT / each[1]).exists()] == []


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = [(page, word) for page, words in words_after("make") for word in words if re.fullmatch(r"[a-z-]+", word)]
    assert len(named) > 10
    assert [each for each in named if each[1] not in targets] == []


# --- files, pages and headings


def test_files_that_are_named_exist() -> None:
    place = "|".join(FOLDERS)
    named = [
        (page, path)
        for page, text in inline()
        for path in re.findall(rf"(?<![\w./<>-])(?:{place})/[\w./-]*[\w/]", text)
        if not path.startswith("rex_ray/") or path.endswith(".py")  # else: in a run's folder
        if not re.search(r"\b[A-Z]+\b", path)  # NAME: to be filled in
    ]
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    bare = [(page, text) for page, text in inline() if re.fullmatch(r"test_\w+\.py", text)]
    assert len(named) > 50
    assert [each for each in named if not (ROOT / each[1]).exists()] == []
    assert [each for each in bare if each[1] not in tests] == []


@functools.cache
def headings(page: Path) -> frozenset[str]:
    """Anchors of a page, as the site makes them."""
    text = FENCE.sub("", page.read_text())
    found: list[str] = []
    for title in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", title.replace("`", ""))
        slug = str(slugify(plain, "-"))
        repeats = sum(1 for each in found if each == slug or re.fullmatch(rf"{re.escape(slug)}_\d+", each))
        found.append(f"{slug}_{repeats}" if repeats else slug)
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    links = re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)", text)
    for name, heading in links:
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{name_of(page)}: {name}"
        assert ROOT in target.parents, f"{name_of(page)}: {name} lies outside"
        if heading:
            assert heading in headings(target), f"{name_of(page)}: {name}#{heading}"
