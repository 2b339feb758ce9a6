"""What a message of NNx tells its reader to do can be done."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nnx
import pytest
from nnx.plugins import manager, siblings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}

# -- distributions: what a sibling is said to provide is there ---------------------------

# What an extension is going to hold, as long as it has only a part of it.
NOT_YET: dict[str, set[str]] = {}


def test_the_reserved_distributions_are_those_that_contribute_nothing() -> None:
    plugins = {plugin.distribution: plugin for plugin in manager.default().plugins}
    empty = {name for name in siblings.MODULES if not plugins[name].contributes}
    assert empty == siblings.RESERVED


@pytest.mark.parametrize("distribution", sorted(set(siblings.MODULES) - siblings.RESERVED))
def test_a_distribution_provides_what_the_messages_say_of_it(distribution: str) -> None:
    missing = set()
    for name in (*siblings.PUBLIC_NAMES[distribution], *siblings.MODULES[distribution]):
        try:
            getattr(nnx, name)
        except (ImportError, AttributeError):
            missing.add(name)
    registered = {id for kind in manager.default().registries.values() for id, _ in kind}
    for prefix in siblings.IDS[distribution]:
        found = [i for i in registered if i == prefix or i.startswith(prefix.rstrip(".") + ".")]
        missing |= set() if found else {prefix}
    assert missing == NOT_YET.get(distribution, set())


def test_pip_finds_every_distribution_where_its_line_says() -> None:
    lines = [siblings.install_line(name) for name in PROJECTS]
    assert all(line.startswith("pip install ") for line in lines)
    wanted = [word for line in lines for word in re.findall(r'(?:-e )?"[^"]+"', line)]
    assert len(wanted) == len(PROJECTS), lines
    arguments = [part.strip('"') for word in wanted for part in word.split(" ", 1)]
    command = [
        sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index",
        "--no-build-isolation", "--force-reinstall", "--disable-pip-version-check", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = done.stdout.rsplit("Would install", 1)[1].split()
    assert {re.sub(r"-[0-9.]+$", "", name) for name in found} == set(PROJECTS)


# -- what the sources tell their readers to type ------------------------------------------

TYPED = re.compile(
    r"(?<![\w-])(?P<option>--[a-z][a-z-]+)"
    r"|`nnx (?P<command>[a-z]+)(?= |`)"
    r"|(?<![\w.])(?P<argument>[a-z][a-z_]+)=(?![=}<>])"
    r"|(?P<variable>NNX_[A-Z_]+)"
    r"|(?<![\w./:{}@])(?P<module>nnx(?:\.[a-z_]+)+)(?P<name>\.[A-Za-z]\w*)?"
)


@functools.cache
def messages() -> tuple[tuple[str, str], ...]:
    return tuple(_messages())


def _messages() -> Iterator[tuple[str, str]]:
    """Every text of the sources that reads as a sentence, with its place; not the docstrings."""
    for file in sorted(ROOT.glob("packages/*/src/**/*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        quiet = {
            id(child)
            for node in ast.walk(tree)
            if isinstance(node, (ast.JoinedStr, ast.Expr))
            for child in ast.walk(node)
            if child is not node and isinstance(child, ast.Constant)
            and (isinstance(node, ast.JoinedStr) or node.value is child)
        }  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "{}" for p in node.values]
                text = "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = "" if id(node) in quiet else node.value
            else:
                continue
            text = re.sub(r"<(?:[a-zA-Z!/][^<>]*)>", " ", text)  # of markup, what is read
            for line in text.splitlines():
                if " " in line.strip():
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", line


def words(kind: str) -> list[tuple[str, str]]:
    """All that the messages name of one kind, with the place."""
    return [
        (place, found[kind])
        for place, text in messages()
        for found in TYPED.finditer(text)
        if found[kind]
    ]


@functools.cache
def command_line() -> dict[str, set[str]]:
    """Every command with its options, those of plugins too."""
    import typer
    from nnx.cli.app import build

    group = typer.main.get_command(build())
    context = typer.Context(group)
    found: dict[str, set[str]] = {}

    def visit(name: str, command: Any) -> None:
        found[name] = {option for parameter in command.params for option in parameter.opts}
        for child in getattr(command, "commands", {}):
            visit(f"{name} {child}", command.commands[child])

    visit("", group)
    for name in group.list_commands(context):
        visit(name, group.get_command(context, name))
    return found


def test_every_command_that_a_message_names_is_there() -> None:
    named = words("command")
    assert named
    assert [(place, name) for place, name in named if name not in command_line()] == []


def test_every_option_that_a_message_names_is_one_of_a_command() -> None:
    options = {option for options in command_line().values() for option in options}
    options |= {"--help", "--nproc-per-node"}  # of every command, and of torchrun
    named = words("option")
    assert {"--impute", "--drop", "--delimiter", "--data"} <= {name for _, name in named}
    assert [(place, name) for place, name in named if name not in options] == []


@functools.cache
def arguments() -> set[str]:
    """Names of parameters and fields that a script can give to what NNx offers."""
    names: set[str] = set()
    for file in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                names |= {argument.arg for argument in every}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


# Arguments of torch and of other libraries that a message names as theirs.
OF_OTHERS = {
    "shuffle", "persistent_workers", "drop_last", "generator", "num_workers", "weights_only",
    "requires_grad", "dilation", "padding_mode", "max_norm", "dropouts", "subdirectory",
}  # fmt: skip


def test_every_argument_that_a_message_names_can_be_given() -> None:
    named = words("argument")
    assert {"salt", "resume_mode"} <= {name for _, name in named}
    known = arguments() | OF_OTHERS
    assert [(place, name) for place, name in named if name not in known] == []


def test_every_module_and_name_that_a_message_names_is_there() -> None:
    missing = []
    for place, text in messages():
        for found in filter(lambda found: found["module"], TYPED.finditer(text)):
            if not is_there(f"{found['module']}{found['name'] or ''}"):
                missing.append((place, found[0]))
    # Ids (nnx.lora), formats and loggers are written like modules.
    assert [m for m in missing if not is_an_id(m[1])] == []


def is_there(dotted: str) -> bool:
    value: Any = nnx
    for part in dotted.split(".")[1:]:
        try:
            value = getattr(value, part)
        except AttributeError:
            try:
                value = importlib.import_module(f"{value.__name__}.{part}")
            except (ImportError, AttributeError):
                return False
    return True


def is_an_id(text: str) -> bool:
    registered = {id for kind in manager.default().registries.values() for id, _ in kind}
    return text in registered


def test_install_lines_are_made_in_one_place() -> None:
    # Elsewhere they would name an index; a plugin of another author is on the author's.
    made = {
        place.split(":")[0].rsplit("/", 1)[1] for place, text in messages() if "pip install" in text
    }
    assert made <= {"siblings.py", "manager.py", "plugin_new.py"}


def test_every_variable_that_a_message_names_is_read() -> None:
    sources = "".join(p.read_text(encoding="utf-8") for p in ROOT.glob("packages/*/src/**/*.py"))
    for place, name in words("variable"):
        assert sources.count(f'"{name}"') >= 1, (place, name)
