"""``nnx export`` and ``nnx hub``. Typer annotations alone: torch comes when one of them runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from nnx.cli.options import RunId, RunsFolder, use_runs

hub = typer.Typer(
    help="Take trainings to the Hugging Face Hub and back.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Revision = Annotated[str | None, typer.Option("--revision", help="A branch, tag or commit.")]


@hub.command()
def push(
    run: RunId,
    repository: Annotated[str, typer.Argument(metavar="USER/NAME", help="A Hub repository.")],
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="Which of its checkpoints.")
    ] = "last",
    branch: Annotated[str | None, typer.Option("--branch", help="Instead of the main one.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new one private.")] = False,
    pull_request: Annotated[
        bool, typer.Option("--pull-request", help="Propose it instead of committing.")
    ] = False,
    runs: RunsFolder = None,
) -> None:
    """Publish a training, which continues elsewhere exactly where it stands."""
    use_runs(runs)
    from nnx.hub import push_run
    from nnx.store.pointer import resolve_run_id

    done = push_run(
        resolve_run_id(run), repository, checkpoint=checkpoint, branch=branch,
        private=private or None, create_pr=pull_request or None,
    )  # fmt: skip
    print(f"{repository}: {done.pr_url or done.oid}")


@hub.command()
def pull(
    repository: Annotated[str, typer.Argument(metavar="USER/NAME", help="A Hub repository.")],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A new folder for the bundle.")],
    revision: Revision = None,
) -> None:
    """Fetch a training as a bundle, checked; `nnx bundle resume` continues it."""
    from nnx.hub import pull_run

    info = pull_run(repository, folder, revision=revision)
    print(f"{folder}: run {info.source_run_id[:12]}, epoch {info.epoch}, {info.size:,} bytes")


def export(
    run: RunId,
    to: Annotated[str, typer.Option("--to", help="onnx, pt2, safetensors, or a plugin's format.")],
    path: Annotated[str | None, typer.Argument(help="The file (default: RUN.FORMAT).")] = None,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="Which of its checkpoints.")
    ] = "best",
    shape: Annotated[
        str | None, typer.Option("--shape", help="Of one row, say 3,32,32 (default: by the net).")
    ] = None,
    dynamo: Annotated[
        bool, typer.Option("--dynamo", help="ONNX by torch's newer exporter (language models).")
    ] = False,
    runs: RunsFolder = None,
) -> None:
    """Write a run's model for another runtime, and check that it gives the same."""
    use_runs(runs)
    from nnx import NNModel
    from nnx.store.pointer import resolve_run_id
    from nnx.store.points import read_point

    run_id = resolve_run_id(run)
    model = NNModel.from_checkpoint(read_point(run_id, checkpoint, with_state=False).checkpoint)
    target = path or f"{run_id[:12]}.{to}"
    options: dict[str, Any] = {"dynamo": True} if dynamo else {}
    if to in ("onnx", "pt2"):
        options["example_input"] = _example(model, shape)
    print(model.export(target, to, **options))


def _example(model: Any, shape: str | None) -> Any:
    import torch

    params = model.net_params
    generator = torch.Generator().manual_seed(0)
    if shape is not None:
        try:
            sizes = [int(n) for n in shape.split(",")]
        except ValueError:
            raise typer.BadParameter(f"--shape {shape} is not numbers, say 3,32,32") from None
        return torch.randn(3, *sizes, generator=generator)
    if hasattr(params, "vocab_size"):
        size = (3, params.max_seq_len)
        return torch.randint(0, params.vocab_size, size, generator=generator)
    if params is None or getattr(params, "input_dim", None) is None:
        raise typer.BadParameter("the shape of an input is not known; say it with --shape")
    return torch.randn(3, params.input_dim, generator=generator)
