"""What ``import nnx`` costs, and which names it finds."""

from __future__ import annotations

import inspect
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable

import nnx
import pytest
from nnx.plugins import siblings

Run = Callable[..., subprocess.CompletedProcess[str]]

HEAVY = (
    "torch", "numpy", "pandas", "scipy", "sklearn", "yaml", "rich", "typer", "tqdm", "safetensors",
    "torch_geometric", "transformers", "plotly", "captum", "huggingface_hub", "tokenizers",
    "matplotlib", "asyncio", "multiprocessing",
)  # fmt: skip


def test_importing_nnx_loads_no_heavy_module(run: Run) -> None:
    result = run(f"""
        import sys, nnx
        print(sorted(m for m in {HEAVY!r} if m in sys.modules))
    """)
    assert result.stdout == "[]\n", result.stderr


def test_importing_nnx_loads_only_discovery_of_its_own_modules(run: Run) -> None:
    result = run("""
        import sys, nnx
        print(*sorted(m for m in sys.modules if m.startswith("nnx")))
    """)
    own = {m for m in result.stdout.split() if not m.endswith("_plugin")}
    assert own == {
        "nnx", "nnx._version", "nnx.plugins", "nnx.plugins.core", "nnx.plugins.hookspecs",
            "nnx.plugins.manager",
        "nnx.plugins.registry", "nnx.plugins.siblings",
    }  # fmt: skip


@pytest.mark.alone
def test_importing_nnx_takes_under_a_quarter_of_a_second() -> None:
    # Processor time, which is what it takes on a machine that does nothing else.
    def seconds(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    seconds("import nnx")  # compile once
    ours = min(seconds("import nnx") for _ in range(5))
    assert ours - min(seconds("pass") for _ in range(5)) <= 0.25


def test_a_name_of_core_is_its_real_object() -> None:
    from nnx import hookimpl
    from nnx.plugins.hookspecs import hookimpl as original

    assert hookimpl is original
    assert nnx.hookimpl is original


def test_every_public_name_can_be_imported_and_shows_its_real_module() -> None:
    for name in nnx.__all__:
        value = getattr(nnx, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__ != "nnx", name
            assert getattr(sys.modules[value.__module__], value.__name__) is value, name
            assert pickle.loads(pickle.dumps(value)) is value, name
            assert inspect.getsourcefile(value) is not None, name


def test_dir_lists_the_names_without_importing_them(run: Run) -> None:
    result = run("""
        import sys, nnx
        names = dir(nnx)
        assert names == sorted(names) and "__version__" in names and "hookimpl" in names
        assert set(nnx.__all__) <= set(names)
        print("torch" in sys.modules)
    """)
    assert result.stdout == "False\n", result.stderr


def test_a_star_import_brings_every_public_name(run: Run) -> None:
    result = run("""
        from nnx import *
        import nnx
        print(set(nnx.__all__) - set(globals()))
    """)
    assert result.stdout == "set()\n", result.stderr


def test_an_unknown_name_is_the_ordinary_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'no_such_name' from 'nnx'"):
        from nnx import no_such_name  # type: ignore[attr-defined] # noqa: F401
    with pytest.raises(AttributeError, match="module 'nnx' has no attribute 'no_such_name'"):
        nnx.no_such_name  # noqa: B018
    assert not hasattr(nnx, "__wrapped__")


def test_a_name_of_an_absent_extension_names_the_line_that_installs_it(run: Run) -> None:
    # Without its plugin, an extension publishes nothing, as when it is not installed.
    result = run(
        """
        from nnx import apply_lora_to
        """,
        plugins="none",
    )
    assert result.stderr.splitlines()[-1] == (
        "ImportError: 'apply_lora_to' is part of nnx-peft, which is not installed or not "
        'loaded. Install it with: pip install "nnx-peft"'
    )


@pytest.mark.parametrize("distribution", siblings.PUBLIC_NAMES)
def test_each_name_of_a_sibling_is_claimed_once(distribution: str) -> None:
    assert distribution in siblings.MODULES
    others = [
        name
        for other, names in siblings.PUBLIC_NAMES.items()
        if other != distribution
        for name in names
    ]
    assert not set(siblings.PUBLIC_NAMES[distribution]) & set(others)


def test_an_install_line_names_our_distribution() -> None:
    assert siblings.install_line("nnx-peft") == 'pip install "nnx-peft"'
    assert siblings.install_line("nnx-peft", "quantize") == 'pip install "nnx-peft[quantize]"'
