"""Installed distributions join NNx at import; a broken one never keeps NNx from importing."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import nnx
import pytest

Install = Callable[..., None]
Run = Callable[..., subprocess.CompletedProcess[str]]

LION = """
    from nnx.plugins import hookimpl

    @hookimpl
    def nnx_optimizer_factories():
        return {("acme.lion", 1): "acme_lion_parts:build"}

    @hookimpl
    def nnx_metrics():
        return {("acme.kappa", 1): "acme_lion_parts:KAPPA"}

    @hookimpl
    def nnx_nets():
        return {"acme_net": "acme_lion_parts:net"}

    @hookimpl
    def nnx_public_names():
        return {"Lion": "decimal:Decimal", "Broken": "acme_lion_parts:Lion"}
"""


def test_a_plugin_fills_the_registries_and_publishes_names(install: Install, run: Run) -> None:
    install("acme-lion", LION)
    result = run("""
        import decimal, nnx
        from nnx import Lion
        from nnx.plugins.manager import registry
        assert Lion is decimal.Decimal and nnx.Lion is Lion
        assert "Lion" in dir(nnx) and "Lion" in nnx.__all__
        assert ("acme.lion", 1) in registry("optimizer factory")
        assert ("acme_net", 1) in registry("net")
        print(registry("metric").owner("acme.kappa"))
    """)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "plugin 'acme-lion' (acme-lion)\n"
    assert result.stderr == ""


def test_a_published_name_that_cannot_be_imported_names_its_plugin(
    install: Install, run: Run
) -> None:
    install("acme-lion", LION)
    result = run("""
        from nnx import Broken
    """)
    assert result.returncode == 1
    assert (
        "ImportError: 'Broken' of plugin 'acme-lion' (acme-lion) cannot be imported from "
        "'acme_lion_parts:Lion': No module named 'acme_lion_parts'"
    ) in result.stderr


def test_nnx_plugins_shows_what_loaded_and_what_it_contributed(install: Install, run: Run) -> None:
    install("acme-lion", LION)
    table = run("plugins")
    assert table.returncode == 0
    row = next(line for line in table.stdout.splitlines() if "acme-lion" in line)
    assert row.split()[:4] == ["acme-lion", "acme-lion", "1.2.3", "loaded"]
    assert "1 net, 1 optimizer factory, 1 metric, 2 names" in row
    assert float(row.split()[4]) >= 0  # milliseconds
    listed = json.loads(run("plugins", "--json").stdout)
    (plugin,) = [p for p in listed if p["name"] == "acme-lion"]
    assert plugin["reference"] == "acme_lion"
    assert plugin["location"].endswith("acme_lion.py")
    assert plugin["location"] in table.stdout
    assert plugin["seconds"] > 0
    assert (plugin["status"], plugin["error"], plugin["heavy_modules"]) == ("loaded", None, [])
    assert plugin["contributes"] == {
        "net": ["acme_net"],
        "optimizer factory": ["acme.lion@v1"],
        "metric": ["acme.kappa@v1"],
        "name": ["Lion", "Broken"],
    }


def test_a_plugin_that_raises_at_import_is_one_warning_and_nothing_else(
    install: Install, run: Run
) -> None:
    install("acme-broken", "raise RuntimeError('no licence found')\n")
    install("acme-lion", LION)
    result = run("""
        import nnx
        from nnx import Lion
        print("imported")
    """)
    assert result.returncode == 0
    assert result.stdout == "imported\n"
    assert result.stderr == (
        "nnx:1: PluginWarning: the NNx plugin 'acme-broken' of acme-broken 1.2.3 failed to "
        "load and is off: RuntimeError: no licence found\n"
    )


def test_a_plugin_that_exits_at_import_does_not_end_the_process(install: Install, run: Run) -> None:
    install("acme-exits", "raise SystemExit(7)\n")
    result = run("""
        import nnx
        print("imported")
    """)
    assert (result.returncode, result.stdout) == (0, "imported\n")
    assert "acme-exits" in result.stderr


def test_nnx_plugins_shows_a_failure_and_exits_with_one(install: Install, run: Run) -> None:
    install("acme-broken", "raise RuntimeError('no [bold]licence[/bold] found')\n")
    result = run("plugins")
    assert result.returncode == 1
    row = next(line for line in result.stdout.splitlines() if "acme-broken" in line)
    assert "failed" in row
    assert "RuntimeError: no [bold]licence[/bold] found" in row
    assert "Traceback" not in result.stderr


def test_two_plugins_that_claim_one_id_are_told_apart_and_the_first_stays(
    install: Install, run: Run
) -> None:
    install("acme-lion", LION)
    install(
        "rival-lion",
        """
        from nnx.plugins import hookimpl

        @hookimpl
        def nnx_exporters():
            return {"rival": "rival:export"}

        @hookimpl
        def nnx_metrics():
            return {("acme.kappa", 1): "rival:KAPPA", ("rival.other", 1): "rival:OTHER"}
        """,
    )
    result = run("""
        from nnx.plugins.manager import registry
        print(registry("metric").owner("acme.kappa"))
        print(("rival.other", 1) in registry("metric"), ("rival", 1) in registry("exporter"))
    """)
    assert result.returncode == 0
    # All of a plugin or nothing: what the rival registered before the clash is gone again.
    assert result.stdout.split("\n")[:2] == ["plugin 'acme-lion' (acme-lion)", "False False"]
    assert (
        "metric acme.kappa@v1 is already registered by plugin 'acme-lion' (acme-lion); "
        "plugin 'rival-lion' (rival-lion) cannot register it again"
    ) in result.stderr


def test_two_plugins_of_one_name_are_told_apart_by_their_distributions(
    install: Install, run: Run
) -> None:
    install("acme-lion", LION, plugin="lion")
    install(
        "rival-lion",
        "from nnx.plugins import hookimpl\n"
        "@hookimpl\n"
        "def nnx_exporters():\n"
        "    return {'rival': 'rival:export'}\n",
        plugin="lion",
    )
    listed = json.loads(run("plugins", "--json").stdout)
    by_distribution = {p["distribution"]: p for p in listed}
    statuses = sorted(by_distribution[d]["status"] for d in ("acme-lion", "rival-lion"))
    assert statuses == ["failed", "loaded"]
    loaded = next(p for p in listed if p["name"] == "lion" and p["status"] == "loaded")
    assert loaded["contributes"]


def test_a_public_name_has_one_publisher(install: Install, run: Run) -> None:
    install("acme-lion", LION)
    publish = """
        from nnx.plugins import hookimpl

        @hookimpl
        def nnx_public_names():
            return {%r: "json:dumps"}
    """
    install("rival-lion", publish % "Lion")
    install("usurper", publish % "hookimpl")
    result = run("""
        import nnx
        print(nnx.Lion.__name__, nnx.hookimpl.__class__.__name__)
    """)
    assert result.stdout == "Decimal HookimplMarker\n"
    assert (
        "the public name 'Lion' is already published by plugin 'acme-lion' (acme-lion); "
        "plugin 'rival-lion' (rival-lion) cannot publish it again"
    ) in result.stderr
    assert (
        "the public name 'hookimpl' is already published by nnx-core; plugin 'usurper'"
        in result.stderr
    )


def test_a_hook_that_returns_the_wrong_thing_is_named(install: Install, run: Run) -> None:
    install(
        "acme-list",
        """
        from nnx.plugins import hookimpl

        @hookimpl
        def nnx_metrics():
            return [("acme.kappa", 1)]
        """,
    )
    result = run("""
        import nnx
    """)
    assert result.returncode == 0
    assert "TypeError: nnx_metrics must return a mapping, not list" in result.stderr


def test_an_unknown_id_names_the_plugins_that_are_not_on(install: Install, run: Run) -> None:
    install("acme-broken", "raise RuntimeError('no licence found')\n")
    install("acme-lion", LION)
    result = run(
        """
        from nnx.plugins.manager import registry
        registry("metric").resolve("acme.kappa")
        """,
        plugins="-acme-lion",
    )
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("nnx.plugins.registry.UnknownIdError: no metric is registered as")
    assert "plugin 'acme-lion' (acme-lion) is switched off by NNX_PLUGINS" in last
    assert "plugin 'acme-broken' (acme-broken) failed to load: RuntimeError" in last


def test_a_plugin_for_a_newer_hook_specification_is_refused_with_what_is_unknown(
    install: Install, run: Run
) -> None:
    install(
        "acme-future",
        """
        from nnx.plugins import hookimpl

        nnx_hookspec_version = 3

        @hookimpl
        def nnx_metrics():
            return {("acme.kappa", 1): "acme_future:KAPPA"}

        @hookimpl
        def nnx_samplers():
            return {("acme.sampler", 1): "acme_future:sampler"}
        """,
    )
    result = run("""
        import nnx
        from nnx.plugins.manager import registry
        print(("acme.kappa", 1) in registry("metric"))
    """)
    assert (result.returncode, result.stdout) == (0, "False\n")
    assert result.stderr == (
        "nnx:1: PluginWarning: the NNx plugin 'acme-future' of acme-future 1.2.3 failed to load "
        "and is off: ValueError: it is built for version 3 of the hook specification, and "
        f"nnx-core {nnx.__version__} knows version 2 and not its nnx_samplers. "
        "Install a newer nnx-core, or an older release of the plugin.\n"
    )


def test_a_misspelt_hook_is_refused_with_the_one_that_is_meant(install: Install, run: Run) -> None:
    install(
        "acme-typo",
        """
        from nnx.plugins import hookimpl

        @hookimpl
        def nnx_metric():
            return {("acme.kappa", 1): "acme_typo:KAPPA"}
        """,
    )
    result = run("plugins")
    assert result.returncode == 1
    assert (
        "ValueError: there is no hook nnx_metric in version 2 of the hook specification; "
        "did you mean nnx_metrics?"
    ) in result.stderr


def test_a_hook_specification_version_is_a_positive_integer(install: Install, run: Run) -> None:
    install("acme-odd", "nnx_hookspec_version = '1'\n")
    assert "ValueError: nnx_hookspec_version must be an integer >= 1, not '1'" in (
        run("plugins").stderr
    )


def statuses(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    return {p["name"]: p["status"] for p in json.loads(result.stdout)}


def test_nnx_plugins_variable_selects_and_switches_off(install: Install, run: Run) -> None:
    install("acme-lion", LION, plugin="lion")
    install("acme-other", "", plugin="other")

    def shown(plugins: str) -> dict[str, str]:
        found = statuses(run("plugins", "--json", plugins=plugins))
        return {name: found[name] for name in ("lion", "other")}

    assert shown("") == {"lion": "loaded", "other": "loaded"}
    assert shown("lion") == {"lion": "loaded", "other": "off"}
    assert shown("acme-lion") == {"lion": "loaded", "other": "off"}
    assert shown(" -lion ,") == {"lion": "off", "other": "loaded"}
    assert set(statuses(run("plugins", "--json", plugins="none")).values()) == {"off"}


def test_a_plugin_that_is_off_is_not_even_imported(install: Install, run: Run) -> None:
    install("acme-broken", "raise RuntimeError('imported')\n")
    result = run("plugins", plugins="-acme-broken")
    assert (result.returncode, result.stderr) == (0, "")


def test_a_misspelt_selection_is_said(install: Install, run: Run) -> None:
    install("acme-lion", LION)
    result = run("plugins", plugins="-acme-lino")
    assert "NNX_PLUGINS names 'acme-lino', which is not installed; installed: acme-lion" in (
        result.stderr
    )


def test_nnx_plugins_tells_load_times_and_heavy_imports(install: Install, run: Run) -> None:
    install("acme-heavy", "import torch\n")
    result = run("plugins", "--timing")
    assert result.returncode == 0
    row = next(
        line for line in result.stdout.splitlines() if line.lstrip().startswith("acme-heavy ")
    )
    assert row.rstrip().endswith("torch, numpy")
    assert float(row.split()[4]) > 0
    assert (
        "plugin 'acme-heavy' (acme-heavy) makes every `import nnx` import torch, numpy: its "
        "acme_heavy should only name what it contributes, as 'package.module:attribute'."
    ) in result.stdout
    (plugin,) = [
        p for p in json.loads(run("plugins", "--json").stdout) if p["name"] == "acme-heavy"
    ]
    assert plugin["heavy_modules"][0] == "torch"


def test_a_plugin_adds_a_command(install: Install, run: Run) -> None:
    install(
        "acme-cli",
        '''
        from nnx.plugins import hookimpl

        @hookimpl
        def nnx_commands():
            return {"greet": "acme_cli:greet", "plugins": "acme_cli:greet", "lost": "nowhere:x"}

        def greet(name: str, loud: bool = False) -> None:
            """Greet NAME."""
            if name == "nobody":
                raise ValueError("nobody to greet: give a name")
            print(f"hello {name.upper() if loud else name}")
        ''',
    )
    assert run("greet", "Ada", "--loud").stdout == "hello ADA\n"
    refused = run("greet", "nobody")
    assert (refused.returncode, refused.stderr) == (1, "nnx: nobody to greet: give a name\n")
    assert "Traceback" in run("--debug", "greet", "nobody").stderr
    assert "Greet NAME." in run("--help").stdout
    lost = run("lost")
    assert lost.returncode == 1
    assert "command lost@v1 of plugin 'acme-cli' (acme-cli) cannot be imported" in lost.stderr
    # Core's own commands cannot be taken over.
    assert "acme-cli" in run("plugins").stdout


BROKEN_COMMANDS = """
    from nnx.plugins import hookimpl

    @hookimpl
    def nnx_commands():
        return {"acme-absent": "no_such_module_of_acme:run", "acme-wrong": "acme_wrong:run"}
"""


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("acme-absent", "No module named 'no_such_module_of_acme'"),
        ("acme-wrong", "ValueError: no licence"),
    ],
)
def test_a_command_that_cannot_be_imported_says_whose_it_is_and_the_way_out(
    install: Install, run: Run, tmp_path: Path, command: str, reason: str
) -> None:
    install("acme-broken", BROKEN_COMMANDS)
    (tmp_path / "acme_wrong.py").write_text("raise ValueError('no licence')")
    refused = run(command, "RUN", "--option", "1")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith(
        f"nnx: `nnx {command}` of plugin 'acme-broken' (acme-broken) cannot be used: "
    )
    assert reason in refused.stderr
    assert refused.stderr.endswith(
        "Mend or reinstall acme-broken 1.2.3, or do without it: NNX_PLUGINS=-acme-broken nnx ...\n"
    )
    listed = run("--help")
    assert listed.returncode == 0
    assert f"Unavailable: command {command}" in " ".join(listed.stdout.split())
    assert run("runs", plugins="-acme-broken").returncode == 0
