"""What ``import nnx`` costs, and which names it finds."""

from __future__ import annotations

import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
        "nnx", "nnx._version", "nnx.errors", "nnx.plugins", "nnx.plugins.core", "nnx.plugins.hookspecs",
            "nnx.plugins.manager",
        "nnx.plugins.registry", "nnx.plugins.siblings", "nnx.utils", "nnx.utils.validation",
    }  # fmt: skip


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


def test_a_name_of_an_extension_that_is_off_says_so_and_sends_nobody_to_pip(run: Run) -> None:
    result = run("\nfrom nnx import apply_lora_to", plugins="none")
    assert result.stderr.splitlines()[-1] == (
        f"nnx.plugins.siblings.MissingPart: 'apply_lora_to' belongs to nnx-peft, which is installed ({nnx.__version__}) "
        "but does not provide it: its plugin is off or failed (`nnx plugins` shows that), or this "
        "version has nothing of the kind"
    )


def test_a_name_of_an_absent_extension_names_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(siblings, "installed", lambda distribution: None)
    assert str(siblings.missing_part("apply_lora_to")) == (
        "'apply_lora_to' belongs to nnx-peft, which is not installed. "
        f"Install it with: {siblings.install_line('nnx-peft')}"
    )
    monkeypatch.setattr(siblings, "RESERVED", {"nnx-peft"})
    assert str(siblings.missing_part("apply_lora_to")) == (
        "'apply_lora_to' is kept for nnx-peft, which is not installed and provides nothing "
        f"yet in version {nnx.__version__} of NNx"
    )


def test_every_public_module_is_an_attribute_and_loads_when_asked_for(run: Run) -> None:
    result = run("""
        import sys, nnx
        assert "nnx.history" not in sys.modules
        print(nnx.history.__name__, nnx.finetune.freeze.__name__, nnx.tasks.TaskSpec.__name__)
        print(nnx.data_splits.FORMAT, nnx.result.Ok.__name__, nnx.seeding.set_seed.__name__)
    """)
    assert result.stdout == "nnx.history freeze TaskSpec\nnnx.split/1 Ok set_seed\n", result.stderr


def test_an_absent_part_is_no_attribute_and_its_import_says_how_to_get_it(run: Run) -> None:
    result = run(
        """
        import nnx
        absent = ("apply_lora_to", "peft", "no_such_name", "no_such_module")
        print([hasattr(nnx, name) for name in absent], getattr(nnx, "peft", None) is None)
        try:
            nnx.apply_lora_to
        except AttributeError as error:
            print("belongs to nnx-peft" in str(error))
        for statement in ("from nnx import apply_lora_to", "import nnx.apply_lora_to"):
            try:
                exec(statement)
            except ImportError as error:
                print("belongs to nnx-peft" in str(error))
        """,
        plugins="none",
    )
    # The module is on the path here; only its plugin is off.
    assert result.stdout == "[False, True, False, False] False\nTrue\nTrue\nTrue\n", result.stderr


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


REPOSITORY = Path(__file__).parents[3]
GIT = {"url": "https://example.org/nnx.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}
EDITABLE = {"url": (REPOSITORY / "packages/nnx-core").as_uri(), "dir_info": {"editable": True}}
FOLDER = {"url": (REPOSITORY / "packages/nnx-core").as_uri(), "dir_info": {}}


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        (EDITABLE, f'pip install -e "{REPOSITORY}/packages/nnx-viz[onnx]"'),
        (FOLDER, f'pip install "{REPOSITORY}/packages/nnx-viz[onnx]"'),
        (
            {**GIT, "subdirectory": "packages/nnx-core"},
            'pip install "nnx-viz[onnx] @ git+https://example.org/nnx.git@c0ffee'
            '#subdirectory=packages/nnx-viz"',
        ),
        (
            {"url": "file:///gone/packages/nnx-core", "dir_info": {}},
            'pip install ./packages/nnx-core "./packages/nnx-viz[onnx]" '
            "(in a clone of NNx's repository)",
        ),
        (
            None,
            'pip install ./packages/nnx-core "./packages/nnx-viz[onnx]" '
            "(in a clone of NNx's repository)",
        ),
    ],
)
def test_an_install_line_says_from_where_the_core_came(
    origin: dict[str, Any] | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    came_from(origin, monkeypatch)
    assert siblings.install_line("nnx-viz", "onnx") == line


def test_a_wheel_lies_beside_the_wheel_of_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "nnx_viz-0.1.0-py3-none-any.whl"
    wheel.touch()
    core = tmp_path / "nnx_core-0.1.0-py3-none-any.whl"
    came_from({"url": core.as_uri(), "archive_info": {}}, monkeypatch)
    assert siblings.install_line("nnx-viz") == f'pip install "{wheel}"'
    assert "in a clone of" in siblings.install_line("nnx-lm")


def came_from(origin: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip's record of where nnx-core was found be ``origin``."""
    text = None if origin is None else json.dumps(origin)
    record = SimpleNamespace(read_text=lambda name: text if name == "direct_url.json" else None)
    monkeypatch.setattr("importlib_metadata.distribution", lambda name: record)
