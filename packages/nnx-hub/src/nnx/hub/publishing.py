"""Models and runs on the Hub: one commit each, on the revision that was looked at."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnx.bundles import BundleInfo, export_bundle, validate_bundle
from nnx.hub.card import CHART, LOAD_RUN, chart_of, model_card
from nnx.hub.layout import CARD, WEIGHTS
from nnx.hub.model_files import check_portable, contents
from nnx.store import NNRun
from nnx.utils import files as fs
from nnx.utils.folders import make_folder, remove_tree_quietly
from nnx.utils.strict import open_regular
from nnx.utils.tensor_file import read_header

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

_BLOCK = 1 << 20
_MESSAGE = "Push model using huggingface_hub."  # the mixin's, which scripts may look for


def push_to_hub(
    model: Any,
    repo_id: str,
    *,
    config: Mapping[str, Any] | None = None,
    commit_message: str = _MESSAGE,
    private: bool | None = None,
    token: str | None = None,
    branch: str | None = None,
    create_pr: bool | None = None,
    allow_patterns: list[str] | str | None = None,
    ignore_patterns: list[str] | str | None = None,
    delete_patterns: list[str] | str | None = None,
    model_card_kwargs: Mapping[str, Any] | None = None,
    run: Any = None,
    calibrators: Iterable[Any] = (),
) -> CommitInfo:
    """Publish what ``save_pretrained`` writes as one commit of ``repo_id``.

    The repository is made when it is missing. The commit names the revision that it
    follows, so that a push in between makes it fail; a failed push can be repeated.
    Patterns choose among the files as in ``HfApi.upload_folder``. ``run`` and
    ``calibrators`` are what the card tells of, as for ``save_pretrained``.
    """
    check_portable(model)
    told = {"run": run, "calibrators": tuple(calibrators), **(model_card_kwargs or {})}
    with tempfile.TemporaryDirectory() as folder:
        for name, parts in contents(model, {"where": repo_id, **told}).items():
            with open(os.path.join(folder, name), "wb") as stream:
                stream.writelines(parts)
        named = [delete_patterns] if isinstance(delete_patterns, str) else delete_patterns
        stale = [name for name in (CHART, *model.artifact_names) if name not in os.listdir(folder)]
        return _commit(
            folder, repo_id, commit_message=commit_message, private=private, token=token,
            branch=branch, create_pr=create_pr, allow_patterns=allow_patterns,
            ignore_patterns=ignore_patterns, delete_patterns=[*(named or []), *stale] or None,
        )  # fmt: skip


def push_run(
    run_id: str,
    repo_id: str,
    *,
    checkpoint: str = "last",
    root: str | None = None,
    calibrators: Iterable[Any] = (),
    commit_message: str = "Push a run of NNx as a bundle",
    private: bool | None = None,
    token: str | None = None,
    branch: str | None = None,
    create_pr: bool | None = None,
) -> CommitInfo:
    """Publish a training as a run bundle in one commit; :func:`pull_run` brings it back.

    The bundle of an earlier push is replaced. Beside it lie a card and, where nnx-viz draws
    one, a chart. The commit's ``oid`` is the revision to pull.
    """
    calibrators = tuple(calibrators)
    with tempfile.TemporaryDirectory() as folder:
        bundle = os.path.join(folder, "bundle")
        info = export_bundle(
            run_id, bundle, checkpoint=checkpoint, root=root, calibrators=calibrators
        )
        for name, data in _about(info, NNRun.load(info.source_run_id, root), calibrators, repo_id):
            with open(os.path.join(bundle, name), "wb") as stream:
                stream.write(data)
        return _commit(
            bundle, repo_id, commit_message=commit_message, private=private, token=token,
            branch=branch, create_pr=create_pr, delete_patterns=["g-*/*", CHART],
        )  # fmt: skip


def _about(
    info: BundleInfo, run: NNRun, calibrators: tuple[Any, ...], repo_id: str
) -> Iterator[tuple[str, bytes]]:
    """The card of a run and its chart, by file name."""
    weights = os.path.join(info.path, f"g-{info.generation}", WEIGHTS)
    with open_regular(weights) as stream:
        count = read_header(stream, weights).parameters
    config = {
        "params": info.model_params, "net_params": info.net_params,
        "transforms": info.transforms,
    }  # fmt: skip
    chart = chart_of(run)
    if chart is not None:
        yield CHART, chart
    text = model_card(
        config, count, load=LOAD_RUN, where=repo_id, run=run, calibrators=calibrators,
        chart=chart is not None, checkpoint=f"{info.source_checkpoint}, epoch {info.epoch}",
    )  # fmt: skip
    yield CARD, text.encode("utf-8")


def pull_run(
    repo_id: str,
    destination: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> BundleInfo:
    """Download a pushed run into a new folder, check every byte, and say what it holds.

    ``reconstruct_bundle(destination).resume(...)`` then continues it. ``FileExistsError``
    for a folder that is there; one that fails the check is not left.
    """
    import shutil

    from huggingface_hub import HfApi, hf_hub_download
    from nnx.bundles.layout import MANIFEST, read_manifest

    target = os.path.abspath(os.fspath(destination))
    if os.path.lexists(target):
        raise FileExistsError(f"{target} is there already; pull into a new folder")
    fixed = revision
    if not local_files_only:
        fixed = HfApi(token=token).repo_info(repo_id, revision=revision).sha or revision
    make_folder(os.path.dirname(target))
    staged = fs.temporary_name(target)
    fs.disk.mkdir(staged)

    def fetch(name: str) -> None:
        found = hf_hub_download(
            repo_id, name, revision=fixed, token=token, cache_dir=cache_dir,
            local_files_only=local_files_only,
        )  # fmt: skip
        place = os.path.join(staged, *name.split("/"))
        make_folder(os.path.dirname(place))
        with (
            open(os.path.realpath(found), "rb") as source,
            fs.atomic_write(place, "wb", strict=True) as copy,
        ):
            shutil.copyfileobj(source, copy, _BLOCK)

    try:
        fetch(MANIFEST)
        manifest = read_manifest(staged)
        for name in manifest.payloads:  # checked names: none leaves the folder
            fetch(f"{manifest.folder}/{name}")
        info = validate_bundle(staged)
        fs.disk.replace(staged, target)
        fs.disk.flush_directory(os.path.dirname(target))
    except BaseException:
        if os.path.isdir(staged):
            remove_tree_quietly(staged)
        raise
    return dataclasses.replace(info, path=target)


def _commit(
    folder: str,
    repo_id: str,
    *,
    commit_message: str,
    private: bool | None,
    token: str | None,
    branch: str | None,
    create_pr: bool | None,
    allow_patterns: Any = None,
    ignore_patterns: Any = None,
    delete_patterns: Any = None,
) -> CommitInfo:
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if branch is not None:
        api.create_branch(repo, branch=branch, exist_ok=True)
    parent = api.repo_info(repo, revision=branch).sha
    return api.upload_folder(
        repo_id=repo, folder_path=folder, commit_message=commit_message, revision=branch,
        create_pr=create_pr, parent_commit=parent, allow_patterns=allow_patterns,
        ignore_patterns=ignore_patterns, delete_patterns=delete_patterns,
    )  # fmt: skip
