"""Pictures of predictions: confusion matrices, reports, lines, scatters, t-SNE.

Every function returns a Plotly figure (the classification report a
DataFrame); a figure is also shown when ``renderer`` names a Plotly renderer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnx.seeding import isolated_rng
from nnx.viz._common import PALETTE, require
from nnx.viz.class_labels import aligned, as_array

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import plotly.graph_objects as go
    from nnx.store import NNCheckpoint

_MARGIN = {"l": 15, "r": 15, "t": 30, "b": 15, "pad": 0}


class VisUtils:
    """The functions of this module, under one name."""

    TITLE_SIZE = 14
    LABEL_SIZE = 12
    FIG_SIZE = (1000, 600)
    MARGIN_SIZE = _MARGIN
    RENDERER: str | None = None

    @staticmethod
    def generate_colors(n: int) -> list[str]:
        """``n`` colours that can be told apart: a colour-blind-safe set, then hues."""
        if n <= len(PALETTE):
            return list(PALETTE[:n])
        return [f"hsl({360 * i / n:.0f}, 65%, 45%)" for i in range(n)]

    @staticmethod
    def confusion_matrix(
        Y_true: Any,
        Y_pred: Any,
        class_names: Sequence[str] | None = None,
        title: str = "Confusion matrix",
        normalize: bool = False,
    ) -> go.Figure:
        """Counts (or row shares) of predicted classes for each true class.

        ``Y_true`` and ``Y_pred`` are 1-D class labels, of equal length; scores and
        probabilities are refused, not cut to classes. Integer classes in
        ``0 .. len(class_names) - 1`` use ``class_names``; otherwise the classes
        are those that occur, sorted. With ``normalize`` each row sums to one; a
        class that never occurs keeps a row of zeros.

        Raises ``ValueError`` on empty input, unequal lengths, more than one
        dimension, numbers that are no classes, or a class that ``class_names``
        does not cover.
        """
        graph = require("plotly.graph_objects", "confusion_matrix")
        import numpy as np

        true, predicted, names = aligned(Y_true, Y_pred, class_names)
        counts = np.zeros((len(names), len(names)), dtype=np.int64)
        np.add.at(counts, (true, predicted), 1)
        totals = counts.sum(axis=1, keepdims=True)
        shares = counts / np.maximum(totals, 1)
        few = len(names) <= 30
        figure = graph.Figure(
            graph.Heatmap(
                z=shares if normalize else counts,
                x=names,
                y=names,
                text=np.vectorize(lambda v: f"{v:.2f}")(shares) if normalize else counts,
                texttemplate="%{text}" if few else None,
                customdata=np.stack([counts, shares], axis=-1),
                hovertemplate="true %{y}<br>predicted %{x}<br>%{customdata[0]} samples "
                "(%{customdata[1]:.1%} of the row)<extra></extra>",
                colorscale="Blues",
                colorbar={"title": "share" if normalize else "samples"},
            )
        )
        figure.update_layout(
            title=title,
            template="plotly_white",
            xaxis={"title": "predicted", "type": "category", "constrain": "domain"},
            yaxis={"title": "true", "type": "category", "autorange": "reversed",
                   "scaleanchor": "x"},
        )  # fmt: skip
        return figure

    @staticmethod
    def classification_report(
        Y_true: Any, Y_pred: Any, class_names: Sequence[str] | None = None
    ) -> pd.DataFrame:
        """Precision, recall, F1 and support per class, as scikit-learn computes them.

        Rows are the classes, then accuracy and the macro and weighted averages.
        Undefined scores are zero. Needs the ``sklearn`` extra.
        """
        metrics = require("sklearn.metrics", "classification_report", extra="sklearn")
        pandas = require("pandas", "classification_report", extra="sklearn")
        true, predicted, names = aligned(Y_true, Y_pred, class_names)
        report = metrics.classification_report(
            true,
            predicted,
            labels=list(range(len(names))),
            target_names=names,
            output_dict=True,
            zero_division=0,
        )
        return pandas.DataFrame(report).transpose()

    @staticmethod
    def multi_line_plot(
        x: Sequence[Any],
        yss: Sequence[Any],
        title: str,
        yss_legend: Sequence[Any],
        x_axis_label: str,
        y_axis_label: str,
        x_ticks_inc: float = 20,
        label_size: int = 12,
        title_size: int = 14,
        fig_size: tuple = (1000, 600),
        margin_size: Mapping[str, int] = _MARGIN,
        renderer: str | None = None,
    ) -> go.Figure:
        """One line per series of ``yss`` over the shared ``x``.

        An entry of ``yss`` is a series (a number per ``x``) or a group of series,
        which share a colour. ``yss_legend`` has a name for each entry, or for each
        series; the lines of a group with one name are one entry of the legend.

        Raises ``ValueError`` when names and entries, or a series and ``x``, differ
        in number.
        """
        graph = require("plotly.graph_objects", "multi_line_plot")
        figure = graph.Figure()
        groups = _groups(yss, yss_legend)
        for (names, group), color in zip(groups, generate_colors(len(groups))):
            for index, (name, ys) in enumerate(zip(names, group)):
                if len(ys) != len(x):
                    raise ValueError(f"series {name!r} has {len(ys)} values for {len(x)} x values")
                figure.add_trace(
                    graph.Scatter(
                        x=list(x),
                        y=list(ys),
                        mode="lines",
                        name=name,
                        legendgroup=name,
                        showlegend=name not in names[:index],
                        line={"color": color},
                    )
                )
        numeric = len(x) > 0 and isinstance(x[0], (int, float))
        if numeric and (max(x) - min(x)) / x_ticks_inc <= 100:
            figure.update_xaxes(dtick=x_ticks_inc)
        figure.update_xaxes(title=x_axis_label)
        figure.update_yaxes(title=y_axis_label)
        return _finish(figure, title, fig_size, label_size, title_size, margin_size, renderer)

    @staticmethod
    def get_scatter_plot_vm(
        data: Any,
        title: str,
        col_xs: str,
        label_xs: str,
        col_ys: str,
        label_ys: str,
        col_ts: str,
        labels_ts: Mapping[Any, str] | Sequence[str] | None,
        colors_ts: Mapping[Any, str] | Sequence[str] | None,
        uni_ts: Sequence[Any],
    ) -> dict[str, Any]:
        """What :meth:`scatter_plot` draws: one group of points per value of ``col_ts``.

        ``data`` maps column names to equal-length columns (a DataFrame does).
        ``labels_ts`` and ``colors_ts`` are looked up by the group's value when
        they are mappings and by its position in ``uni_ts`` otherwise.
        """
        import numpy as np

        xs, ys, ts = (np.asarray(data[c]) for c in (col_xs, col_ys, col_ts))
        colors = generate_colors(len(uni_ts)) if colors_ts is None else colors_ts
        groups = [
            {
                "label": str(t if labels_ts is None else _lookup(labels_ts, t, i)),
                "color": _lookup(colors, t, i),
                "x": xs[ts == t],
                "y": ys[ts == t],
            }
            for i, t in enumerate(uni_ts)
        ]
        return {"title": title, "x_label": label_xs, "y_label": label_ys, "groups": groups}

    @staticmethod
    def scatter_plot(
        vm: Mapping[str, Any],
        renderer: str | None = None,
        fig_size: tuple = (1000, 600),
        label_size: int = 12,
        title_size: int = 14,
        margin_size: Mapping[str, int] = _MARGIN,
    ) -> go.Figure:
        """Draw what :meth:`get_scatter_plot_vm` prepared."""
        graph = require("plotly.graph_objects", "scatter_plot")
        figure = graph.Figure(
            [
                graph.Scattergl(
                    x=group["x"],
                    y=group["y"],
                    mode="markers",
                    name=group["label"],
                    marker={"color": group["color"], "size": 6, "opacity": 0.8},
                )
                for group in vm["groups"]
            ]
        )
        figure.update_xaxes(title=vm["x_label"])
        figure.update_yaxes(title=vm["y_label"])
        return _finish(figure, vm["title"], fig_size, label_size, title_size, margin_size, renderer)

    @staticmethod
    def two_dim_tsne_checkpoint_logits(
        checkpoint: NNCheckpoint,
        ds: Any,
        n_samples: int,
        random_state: int | None = 0,
        renderer: str | None = None,
        fig_size: tuple = (1000, 600),
        title_size: int = 14,
        label_size: int = 12,
        margin_size: Mapping[str, int] = _MARGIN,
        *,
        module: Any = None,
        batch_adapter: Any = None,
    ) -> go.Figure:
        """The logits of ``n_samples`` held-out samples, in two dimensions by t-SNE.

        The checkpoint's model is rebuilt (``module`` supplies the instance of
        a runtime module, ``batch_adapter`` its inputs) and predicts samples of
        the dataset's test loader (its validation or training loader when there
        is none) in loader order. Points are coloured by true class. Van der
        Maaten & Hinton (2008); needs the ``sklearn`` extra.
        """
        manifold = require("sklearn.manifold", "two_dim_tsne_checkpoint_logits", extra="sklearn")
        require("plotly.graph_objects", "two_dim_tsne_checkpoint_logits")
        if isinstance(n_samples, bool) or not isinstance(n_samples, int) or n_samples < 4:
            raise ValueError(f"n_samples must be an integer >= 4, not {n_samples!r}")
        if not checkpoint.reconstructible and module is None:
            raise ValueError(
                "this checkpoint holds a runtime module, which no factory can rebuild; "
                "pass an instance as module="
            )
        with isolated_rng():
            logits, targets = _held_out_logits(checkpoint, ds, n_samples, module, batch_adapter)
        points = manifold.TSNE(
            n_components=2, random_state=random_state, perplexity=min(30, (len(logits) - 1) / 3)
        ).fit_transform(logits)
        classes = sorted(set(targets.tolist()))
        names = getattr(ds, "classes", None) or getattr(ds, "class_names", None)
        vm = get_scatter_plot_vm(
            {"x": points[:, 0], "y": points[:, 1], "class": targets},
            f"t-SNE of the logits of {len(logits)} samples",
            "x", "t-SNE 1", "y", "t-SNE 2", "class",
            [str(names[int(c)]) if names is not None else str(c) for c in classes],
            None,
            classes,
        )  # fmt: skip
        return scatter_plot(vm, renderer, fig_size, label_size, title_size, margin_size)


def _groups(yss: Sequence[Any], legend: Sequence[Any]) -> list[tuple[list[str], list[Any]]]:
    """Each entry of ``yss`` as (names, series), a single series being a group of one."""
    import numpy as np

    groups = [list(ys) if np.ndim(ys[0] if len(ys) else 0) else [ys] for ys in yss]
    total = sum(map(len, groups))
    if len(legend) == len(groups):
        names = [
            [str(entry)] * len(group) if isinstance(entry, str) else [str(name) for name in entry]
            for entry, group in zip(legend, groups)
        ]
    elif len(legend) == total:
        left = iter(legend)
        names = [[str(next(left)) for _ in group] for group in groups]
    else:
        series = "" if total == len(groups) else f" in {len(groups)} groups"
        raise ValueError(f"{total} series{series} but {len(legend)} legend entries")
    for entry, group in zip(names, groups):
        if len(entry) != len(group):
            raise ValueError(f"a group of {len(group)} series has {len(entry)} legend entries")
    return list(zip(names, groups))


def _lookup(table: Any, value: Any, index: int) -> Any:
    return table[value] if isinstance(table, Mapping) else table[index]


def _held_out_logits(
    checkpoint: Any, ds: Any, n_samples: int, module: Any, batch_adapter: Any
) -> tuple[np.ndarray, np.ndarray]:
    import numpy as np
    from nnx.nn_model import NNModel

    loader = next(
        (found for found in (getattr(ds, n, None) for n in ("test_loader", "val_loader", "train_loader"))
         if found is not None),
        None,
    )  # fmt: skip
    if loader is None:
        raise ValueError("the dataset has no test, validation or training loader")
    model = NNModel.from_checkpoint(checkpoint, module=module, batch_adapter=batch_adapter)
    logits: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    seen = 0
    for batch in loader:
        if getattr(batch, "graph_id", None) is not None:
            raise ValueError(
                "this loader gives batches of whole graphs, whose rows are no samples of a "
                "dataset; draw the logits of predict_proba(...) by their graph ids instead"
            )
        _, _, target = model.split_batch(batch)
        predicted = np.asarray(model.predict([batch]).logits)
        logits.append(predicted.reshape(len(predicted), -1))
        targets.append(as_array(target)[: len(predicted)])
        seen += len(predicted)
        if seen >= n_samples:
            break
    if seen < 4:
        raise ValueError(f"t-SNE needs at least 4 samples; the loader has {seen}")
    return np.concatenate(logits)[:n_samples], np.concatenate(targets)[:n_samples]


def _finish(
    figure: go.Figure,
    title: str,
    size: tuple,
    label_size: int,
    title_size: int,
    margin: Mapping[str, int],
    renderer: str | None,
) -> go.Figure:
    figure.update_layout(
        title={"text": title, "font": {"size": title_size}},
        template="plotly_white",
        width=size[0],
        height=size[1],
        margin={**margin, "t": max(margin.get("t", 0), 3 * title_size)},
        font={"size": label_size},
    )
    chosen = renderer or VisUtils.RENDERER
    if chosen:
        figure.show(renderer=chosen)
    return figure


generate_colors = VisUtils.generate_colors
confusion_matrix = VisUtils.confusion_matrix
classification_report = VisUtils.classification_report
multi_line_plot = VisUtils.multi_line_plot
get_scatter_plot_vm = VisUtils.get_scatter_plot_vm
scatter_plot = VisUtils.scatter_plot
two_dim_tsne_checkpoint_logits = VisUtils.two_dim_tsne_checkpoint_logits
