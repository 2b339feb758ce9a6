"""The ``nnx graph`` commands. Typer annotations alone: torch comes when one of them runs."""

from __future__ import annotations

from typing import Annotated

import typer
from nnx.cli.options import Quiet, RunId, RunsFolder, use_quiet, use_runs

graph = typer.Typer(
    help="Classify nodes and predict links of a graph in two tables.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Output = Annotated[
    str | None, typer.Option("--output", "-o", help="Write here instead of to the terminal.")
]
Columns = list[str] | None


@graph.command()
def train(
    nodes: Annotated[str, typer.Argument(metavar="NODES.csv", help="A row per node.")],
    edges: Annotated[str, typer.Argument(metavar="EDGES.csv", help="A row per edge.")],
    target: Annotated[
        str | None, typer.Option(help="The column of NODES.csv to predict; empty: unknown.")
    ] = None,
    task: Annotated[str, typer.Option(help="node, or link.")] = "node",
    id: Annotated[
        str | None, typer.Option(help="The column that names a node.  [default: the first]")
    ] = None,
    ends: Annotated[
        str | None,
        typer.Option(help="The two columns of an edge, as FROM,TO.  [default: the first two]"),
    ] = None,
    directed: Annotated[
        bool, typer.Option("--directed", help="An edge leads one way only.")
    ] = False,
    encoder: Annotated[
        str, typer.Option(help="graph_conv, graph_sage, graph_att, gin, gatv2 or transformer.")
    ] = "graph_sage",
    hidden: Annotated[str, typer.Option(help="Widths of the layers.")] = "32",
    neighbours: Annotated[
        str | None,
        typer.Option(help="Sample so many neighbours per layer, as 10,10.  [default: all at once]"),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Nodes or links per update.")] = 256,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data.")] = 100,
    learning_rate: Annotated[float, typer.Option(help="Of Adam.")] = 0.01,
    dropout: Annotated[float, typer.Option(help="Dropout.")] = 0.0,
    patience: Annotated[
        int | None, typer.Option(help="Stop after this many epochs without improvement.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and training.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu",
    validation: Annotated[float, typer.Option(help="Share to validate on.")] = 0.15,
    test: Annotated[float, typer.Option(help="Share to test on.")] = 0.15,
    split_seed: Annotated[int, typer.Option(min=0, help="Of the split.")] = 0,
    impute: Annotated[
        bool, typer.Option("--impute", help="Fill missing cells from the training nodes.")
    ] = False,
    drop: Annotated[Columns, typer.Option(metavar="COLUMN", help="Leave a column out.")] = None,
    numeric: Annotated[
        Columns, typer.Option(metavar="COLUMN", help="Read a column as numbers.")
    ] = None,
    categorical: Annotated[
        Columns, typer.Option(metavar="COLUMN", help="Read a column as categories.")
    ] = None,
    delimiter: Annotated[str, typer.Option(help="Between the cells.")] = ",",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a run of the same configuration.")
    ] = False,
    runs: RunsFolder = None,
    quiet: Quiet = False,
) -> None:
    """Train on a table of nodes and a table of edges, and test.

    Nodes are named by ids of any kind. Columns of NODES.csv are prepared as nnx train
    prepares them; a node without a target passes messages and is predicted.
    """
    use_runs(runs)
    use_quiet(quiet)
    from nnx.graph.csv_graph import GraphSource
    from nnx.graph.csv_run import GraphJob

    source = GraphSource(
        nodes=nodes, edges=edges, task=task, target=target, id=id,
        ends=None if ends is None else tuple(part.strip() for part in ends.split(",")),
        directed=directed, neighbours=neighbours, batch_size=batch_size, patience=patience,
        validation=validation, test=test, split_seed=split_seed, impute=impute,
        drop=tuple(drop or ()), numeric=tuple(numeric or ()), categorical=tuple(categorical or ()),
        delimiter=delimiter,
    )  # fmt: skip
    job = GraphJob.open(source)
    model, params = job.configure(
        encoder=encoder, hidden=hidden, dropout=dropout, epochs=epochs,
        learning_rate=learning_rate, seed=seed, device=device,
    )  # fmt: skip
    job.train(model, params, overwrite=overwrite)


@graph.command()
def predict(
    run: RunId,
    nodes: Annotated[
        str | None, typer.Argument(metavar="[NODES.csv", help="Other nodes than it learned from.")
    ] = None,
    edges: Annotated[
        str | None, typer.Argument(metavar="EDGES.csv]", help="The edges of those nodes.")
    ] = None,
    pairs: Annotated[
        str | None, typer.Option(metavar="PAIRS.csv", help="Of a link run: the pairs to score.")
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="best, last, first, q1, q2 or q3.")] = "best",
    output: Output = None,
    runs: RunsFolder = None,
) -> None:
    """Predict every node with a run, or score pairs of nodes.

    The run must be one that nnx graph train made.
    """
    use_runs(runs)
    from nnx.graph.csv_run import predict_with

    predict_with(run, nodes, edges, pairs=pairs, checkpoint=checkpoint, output=output)


@graph.command()
def resume(
    run: RunId,
    epochs: Annotated[
        int | None,
        typer.Option(help="Train this many more, instead of up to what was planned."),
    ] = None,
    runs: RunsFolder = None,
    quiet: Quiet = False,
) -> None:
    """Continue a run from its last committed epoch, on the same two files."""
    use_runs(runs)
    use_quiet(quiet)
    from nnx.graph.csv_run import resume_run

    resume_run(run, epochs=epochs)
