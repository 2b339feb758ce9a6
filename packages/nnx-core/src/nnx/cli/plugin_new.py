"""``nnx plugin new NAME``: a working project of a plugin, with its own tests."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Annotated

import typer

plugin = typer.Typer(
    help="Write plugins of your own.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

TEMPLATES = Path(__file__).parent / "plugin_template"
NONE = "none"


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of contribution: its files, its hook, and a line in the README."""

    kind: str
    hook: str
    key: str
    attribute: str
    use: str


PARTS = (
    Part("model", "nnx_model_factories", '("{id}", 1)', "build", 'ModelSpec("{id}")'),
    Part(
        "optimizer", "nnx_optimizer_factories", '("{id}", 1)', "build",
        'OptimizerFactorySpec("{id}", 1)',
    ),
    Part("objective", "nnx_objectives", '("{id}", 1)', "build", 'build_objective("{id}")'),
    Part("metric", "nnx_metrics", '("{id}", 1)', "DEFINITION", 'MetricSpec("{id}")'),
    Part("exporter", "nnx_exporters", '"{id}"', "export", 'model.export(path, "{id}")'),
    Part("command", "nnx_commands", '"{id}"', "command", "nnx {id} RUN"),
)  # fmt: skip


@plugin.command("new")
def new(
    name: Annotated[str, typer.Argument(help="The distribution's name, say acme-lion.")],
    namespace: Annotated[
        str | None,
        typer.Option(help="What its ids begin with (default: NAME up to the first hyphen)."),
    ] = None,
    folder: Annotated[str, typer.Option(help="Where the project's folder is made.")] = ".",
    model: Annotated[str, typer.Option(help="The model factory, or 'none'.")] = "encoder",
    optimizer: Annotated[str, typer.Option(help="The optimizer factory, or 'none'.")] = "signum",
    objective: Annotated[str, typer.Option(help="The objective, or 'none'.")] = "focal",
    metric: Annotated[str, typer.Option(help="The metric, or 'none'.")] = "kappa",
    exporter: Annotated[str, typer.Option(help="The exporter, or 'none'.")] = "npz",
    command: Annotated[
        str | None, typer.Option(help="The command, or 'none' (default: NAME).")
    ] = None,
) -> None:
    """Write a project that passes its own tests.

    It holds a model factory, an optimizer, an objective, a metric, an exporter and
    a command, each under a name of your choice and each with a test.
    """
    project = Project.checked(
        name,
        namespace=namespace,
        names={
            "model": model, "optimizer": optimizer, "objective": objective, "metric": metric,
            "exporter": exporter, "command": name if command is None else command,
        },
    )  # fmt: skip
    written = project.write(Path(folder))
    print(f'Wrote {written}. Next:\n\n  cd {written}\n  pip install -e ".[tests]"\n  pytest')


@dataclass(frozen=True, slots=True)
class Project:
    """A plugin to write: its names, checked."""

    distribution: str
    module: str
    namespace: str
    names: dict[str, str]

    @staticmethod
    def checked(name: str, *, namespace: str | None, names: dict[str, str]) -> Project:
        """Refuse, with the reason, a name that could not be installed, imported or registered."""
        module = _check_distribution(name)
        if namespace is None:
            namespace = re.split(r"[-_.]", name)[0].lower()
        _check_word("namespace", namespace)
        if namespace in ("nnx", "torchao"):
            raise ValueError(f"the namespace {namespace!r} belongs to NNx; take one of your own")
        names = {kind: value for kind, value in names.items() if value != NONE}
        if not names:
            raise ValueError("every part is 'none': a plugin contributes at least one")
        for kind, value in names.items():
            if kind != "command":
                _check_word(kind, value)
        if "command" in names:
            names["command"] = _check_command(names["command"], given=names["command"] != name)
        return Project(name, module, namespace, names)

    def write(self, folder: Path) -> Path:
        """Write the project to ``folder/<distribution>``, whole or not at all."""
        target = folder / self.distribution
        if os.path.lexists(target):
            raise FileExistsError(f"{target} is already there; choose another name or --folder")
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}; make it, or choose --folder")
        draft = Path(tempfile.mkdtemp(prefix=f".{self.distribution}-", dir=folder))
        try:
            for path, text in self.files().items():
                file = draft / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            draft.chmod(0o777 & ~_umask())
            draft.rename(target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return target

    def files(self) -> dict[str, str]:
        """The text of every file, by its path in the project."""
        source = f"src/{self.module}"
        files = {
            "pyproject.toml": self._text("pyproject.toml"),
            "README.md": self._text("README.md"),
            ".gitignore": "__pycache__/\n.pytest_cache/\nbuild/\ndist/\nruns/\n",
            f"{source}/__init__.py": f'"""{self.distribution}: a plugin of NNx."""\n',
            f"{source}/py.typed": "",
            f"{source}/plugin.py": self._text("plugin.py"),
            "tests/conftest.py": self._text("conftest.py"),
            "tests/test_plugin.py": self._text("test_plugin.py"),
        }
        for kind, name in self.names.items():
            files[f"{source}/{kind}.py"] = self._text(f"{kind}.py", name=name)
            files[f"tests/test_{kind}.py"] = self._text(f"test_{kind}.py", name=name)
        return files

    def _text(self, template: str, **more: str) -> str:
        from nnx._version import __version__
        from nnx.plugins.hookspecs import HOOKSPEC_VERSION

        text = (TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
        return Template(text).substitute(
            distribution=self.distribution,
            module=self.module,
            namespace=self.namespace,
            nnx_version=__version__,
            hookspec_version=HOOKSPEC_VERSION,
            hooks="".join(self._hook(part) for part in self._parts()),
            rows="\n".join(self._row(part) for part in self._parts()),
            **more,
        )

    def _parts(self) -> list[Part]:
        return [part for part in PARTS if part.kind in self.names]

    def _id(self, part: Part) -> str:
        name = self.names[part.kind]
        return name if part.kind == "command" else f"{self.namespace}.{name}"

    def _hook(self, part: Part) -> str:
        key = part.key.format(id=self._id(part))
        reference = f"{self.module}.{part.kind}:{part.attribute}"
        return f'\n\n@hookimpl\ndef {part.hook}():\n    return {{{key}: "{reference}"}}\n'

    def _row(self, part: Part) -> str:
        id = self._id(part)
        return f"| {part.kind} | `{id}` | `{part.use.format(id=id)}` |"


def _check_distribution(name: str) -> str:
    """The import name that goes with a distribution's name."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*([-_.][A-Za-z0-9]+)*", name):
        raise ValueError(
            f"{name!r} is no name for a distribution: it is letters and digits, in words "
            "joined by a hyphen, and begins with a letter"
        )
    module = re.sub(r"[-.]", "_", name).lower()
    if module == "nnx" or module.startswith("nnx_"):
        raise ValueError(
            f"{name!r} reads as a part of NNx itself; begin with a name of your own, "
            f"for example 'acme-{name.removeprefix('nnx').strip('-_.') or 'plugin'}'"
        )
    if keyword.iskeyword(module) or module in sys.stdlib_module_names:
        raise ValueError(f"{module!r} cannot be imported as a module of yours: Python has its own")
    found = importlib.util.find_spec(module)
    if found is not None and found.origin is not None:
        raise ValueError(f"a module {module!r} is installed already; choose another name")
    return module


def _check_word(what: str, value: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*", value):
        raise ValueError(
            f"{value!r} is no name for the {what}: it is lower-case letters and digits, in words "
            "joined by a hyphen or underscore, and begins with a letter"
        )


def _check_command(value: str, *, given: bool) -> str:
    from nnx.cli.app import COMMANDS
    from nnx.plugins import manager

    if not given:  # the distribution's name, as a command is spelt
        value = re.sub(r"[._]", "-", value).lower()
    _check_word("command", value)
    holder = "NNx" if value in COMMANDS else None
    commands = manager.registry("command")
    if (value, 1) in commands:
        holder = commands.owner(value)
    if holder is not None:
        raise ValueError(f"`nnx {value}` is taken by {holder}; choose another --command")
    return value


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
