"""One ordinary checkpoint of what several processes wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx.enums import Checkpoints


def gather_checkpoint(
    run_id: str, tag: Checkpoints | str = "last", *, to: str | None = None, root: str | None = None
) -> str:
    """Make an ordinary checkpoint of one that a sharded fit (``FSDP()``) wrote; its path.

    Afterwards the tag holds one file of weights and one of training state like that of
    any run: a single process resumes from it, its random stream being the writer's.
    With ``to`` the ordinary checkpoint gets that name and the sharded one stays. A
    point that is ordinary already is left alone, or copied to ``to``. No process group
    is needed; the whole tensors must fit in this process's memory.

    Raises ``FileNotFoundError`` when the run or the tag is not there,
    ``ResumePointError`` for a damaged point and ``RunBusyError`` while the run is
    being trained.
    """
    from nnx.store import codec, lease
    from nnx.store.commit import Commit
    from nnx.store.paths import PointFiles, tag_name
    from nnx.store.pointer import locate_run
    from nnx.store.points import read_point, shards_of

    paths = locate_run(run_id, root)
    source = tag_name(tag)
    target = source if to is None else tag_name(to)
    files = PointFiles(paths.checkpoints, target)
    with lease.lease(paths):
        point = read_point(paths.id, source, paths.root)
        sharded = point.manifest is not None and shards_of(
            PointFiles(paths.checkpoints, point.tag), point.manifest
        )
        if not sharded and target == point.tag:
            return files.checkpoint
        state: dict[str, Any] | None = None
        if point.training_state is not None:
            state = {k: v for k, v in point.training_state.items() if k in codec.STATE_FIELDS}
            state.pop("distributed", None)
        about = (point.manifest or {}).get("run")
        with Commit(
            paths.checkpoints, point.checkpoint, state, tags=(target,), about=about
        ) as commit:
            commit.publish(target)
    return files.checkpoint
