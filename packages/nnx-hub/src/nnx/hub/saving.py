"""``NNModel.save_pretrained``: weights, configuration and model card, as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from nnx.hub.card import CHART
from nnx.hub.layout import FILES
from nnx.hub.model_files import check_portable, contents
from nnx.hub.publishing import push_to_hub as push
from nnx.utils import files as fs
from nnx.utils.disk import UNSUPPORTED
from nnx.utils.folders import make_folder, remove_tree_quietly


def save_pretrained(
    model: Any,
    save_directory: str | os.PathLike[str],
    *,
    config: Mapping[str, Any] | None = None,
    repo_id: str | None = None,
    push_to_hub: bool = False,
    model_card_kwargs: Mapping[str, Any] | None = None,
    run: Any = None,
    calibrators: Iterable[Any] = (),
    **push_to_hub_kwargs: Any,
) -> Any:
    """Write ``model.safetensors``, ``config.json`` and ``README.md`` into a folder.

    Beside them are the model's own files, such as the ``tokenizer.json`` of a language model.

    The files are complete before the folder's own change. With ``push_to_hub`` the same is
    then pushed to ``repo_id`` (the folder's name without one) and the commit returned.
    ``config`` is accepted for the mixin's sake; the model's own is what is written.
    ``run`` (an ``NNRun``) and ``calibrators`` are what the card tells of: with a run it has a
    chart of the training, where nnx-viz draws one.

    Raises ``MissingModelFactoryError`` for a runtime-only module and ``ValueError`` for a
    net that was changed without a record, before anything is written.
    """
    check_portable(model)
    target = os.path.abspath(os.fspath(save_directory))
    _check_target(target)
    told = {"run": run, "calibrators": tuple(calibrators), **(model_card_kwargs or {})}
    _replace(target, contents(model, told), {*FILES, CHART, *model.artifact_names})
    if push_to_hub:
        repo = repo_id or os.path.basename(target)
        return push(model, repo, model_card_kwargs=told, **push_to_hub_kwargs)
    return None


def _check_target(target: str) -> None:
    if os.path.lexists(target) and not os.path.isdir(target):
        raise NotADirectoryError(f"{target} is a file; save into a folder")
    for mark, what in (("run.yaml", "a run"), ("bundle.json", "a run bundle")):
        if os.path.lexists(os.path.join(target, mark)):
            raise ValueError(f"{target} is {what}, not a folder to save a model into")


def _swap(staged: str, target: str) -> str:
    """Put one folder in the place of another, and say where that is now."""
    try:
        fs.disk.exchange(staged, target)
        return staged
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    old = fs.temporary_name(target)
    fs.disk.replace(target, old)
    try:
        fs.disk.replace(staged, target)
    except BaseException:
        fs.disk.replace(old, target)
        raise
    return old


def _replace(target: str, files: Mapping[str, list[Any]], ours: set[str]) -> None:
    """Put staged files in the place of those that are there.

    A folder with nothing but ``ours`` in it is replaced as a whole; beside other files each
    is replaced on its own, ``config.json`` last.
    """
    make_folder(os.path.dirname(target))
    staged = fs.temporary_name(target)
    fs.disk.mkdir(staged)
    old = None
    try:
        for name, parts in files.items():
            with fs.atomic_write(os.path.join(staged, name), "wb", strict=True) as stream:
                for part in parts:
                    stream.write(part)
        if not os.path.isdir(target):
            fs.disk.replace(staged, target)
        elif set(os.listdir(target)) <= ours:
            old = _swap(staged, target)
        else:
            for name in ours - files.keys():  # of another model
                fs.remove_quietly(os.path.join(target, name))
            for name in files:
                fs.disk.replace(os.path.join(staged, name), os.path.join(target, name))
        fs.disk.flush_directory(os.path.dirname(target))
    finally:
        for folder in (staged, old):
            if folder is not None and os.path.isdir(folder):
                remove_tree_quietly(folder)
