"""The application: core's commands, those of plugins, and one way to report an error."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from nnx.plugins import manager

# Command -> "module:function". The modules declare typer functions and are
# imported with the application, so they import no torch, numpy or rich at module level.
COMMANDS: dict[str, str] = {
    "train": "nnx.cli.train:train",
    "predict": "nnx.cli.train:predict",
    "resume": "nnx.cli.train:resume",
    "runs": "nnx.cli.runs:runs",
    "show": "nnx.cli.runs:show",
    "verify": "nnx.cli.runs:verify",
    "compare": "nnx.cli.runs:compare",
    "best": "nnx.cli.runs:best",
    "rm": "nnx.cli.runs:rm",
    "gc": "nnx.cli.runs:gc",
    "demo": "nnx.cli.demo:demo",
    "doctor": "nnx.cli.doctor:doctor",
    "bundle": "nnx.cli.bundle:bundle",
    "plugins": "nnx.cli.plugins:plugins",
    "plugin": "nnx.cli.plugin_new:plugin",
}

# A refusal explains itself; any other error is ours to mend.
_REFUSALS = (ValueError, LookupError, OSError, ImportError, RuntimeError, TypeError)


class NnxGroup(TyperGroup):
    """Core's commands and the registry's, and errors as one message."""

    def list_commands(self, ctx: Any) -> list[str]:
        contributed = (id for id, _ in manager.registry("command"))
        return list(dict.fromkeys([*super().list_commands(ctx), *contributed]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        contributed = manager.registry("command")
        if own is not None or (cmd_name, 1) not in contributed:
            return own
        try:
            return as_command(cmd_name, contributed.resolve(cmd_name))
        except Exception as error:  # one broken plugin leaves the other commands alone
            return _unavailable(cmd_name, error)

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                if not ctx.params.get("debug"):
                    warnings.showwarning = _show_warning
                result = super().invoke(ctx)
                sys.stdout.flush()
                return result
        except (typer.Exit, typer.Abort, BrokenPipeError):
            raise  # who read the output has seen enough: typer ends quietly
        except KeyboardInterrupt:
            report("interrupted")
            raise typer.Exit(130) from None
        except Exception as error:
            if ctx.params.get("debug") or hasattr(error, "format_message"):
                raise  # a usage error shows itself
            report(explain(error))
            raise typer.Exit(1) from None


def build() -> typer.Typer:
    """The whole application."""
    app = typer.Typer(
        name="nnx",
        cls=NnxGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, reference in COMMANDS.items():
        module, _, attribute = reference.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if isinstance(command, typer.Typer):  # a group of commands
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _version(asked: bool) -> None:
    if asked:
        from nnx._version import __version__

        print(f"nnx {__version__}")
        raise typer.Exit


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Train, resume, inspect and compare PyTorch models; every run is a directory."""


def as_command(name: str, function: Any) -> Any:
    """One function, or a ``typer.Typer`` of several, as the command object that a group runs."""
    if isinstance(function, typer.Typer):
        return typer.main.get_command(function)
    single = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    single.command(name)(function)
    return typer.main.get_command(single)


def _unavailable(name: str, error: Exception) -> Any:
    """A command in the place of one that cannot be imported; it takes anything and says why."""
    provider = manager.default().provider("command", name)
    owner = manager.registry("command").owner(name)
    way_out = "`nnx plugins` shows what is installed"
    if provider is not None:
        way_out = (
            f"Mend or reinstall {provider.distribution} {provider.version}, or do without it: "
            f"{manager.SELECT_VARIABLE}=-{provider.name} nnx ..."
        )
    reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"

    def command() -> None:
        raise ImportError(f"`nnx {name}` of {owner} cannot be used: {reason}. {way_out}") from error

    command.__doc__ = f"Unavailable: {reason}"
    single = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    single.command(name, context_settings=anything)(command)
    return typer.main.get_command(single)


def explain(error: Exception) -> str:
    """The message of a refusal; an unexpected error says so and how to see more."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        text = " -> ".join(names) + (": " if names else "") + error.strerror
    if text and isinstance(error, _REFUSALS):
        return text
    return f"{type(error).__name__}: {text} (`nnx --debug ...` shows where)"


def _show_warning(message: Any, *_: Any, **__: Any) -> None:
    report(f"warning: {message}")


def report(message: str) -> None:
    """Print one error on stderr."""
    print(f"nnx: {message}", file=sys.stderr)
