"""A training of a fraction of a second, for tests."""

from __future__ import annotations

from typing import Any


def tiny_training(
    *,
    n_epochs: int = 2,
    net: Any = None,
    batch: tuple[Any, Any] | None = None,
    optim: Any = None,
    metrics: Any = (),
    **train: Any,
) -> tuple[Any, Any]:
    """``(model, train_params)`` of a classifier, or of a regression for real targets.

    ``net`` is a ``ModelSpec`` or ``None`` for a small feed-forward net. ``batch``
    is ``(X, y)``: 48 rows of 6 features in 3 classes by default. It is both
    trained on and validated with. Further keywords are those of ``NNTrainParams``.
    """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import nnx

    X, y = _blobs() if batch is None else batch
    continuous = y.is_floating_point()
    params = nnx.NNModelParams(
        net=nnx.Nets.FEED_FWD if net is None else net,
        loss=nnx.Losses.MEAN_SQUARED_ERROR if continuous else nnx.Losses.CROSS_ENTROPY,
    )
    sizes = None
    if net is None:
        width = (1 if y.ndim == 1 else y.shape[1]) if continuous else int(y.max()) + 1
        sizes = nnx.NNParams(
            input_dim=X.shape[1], output_dim=width, hidden_dims=[8], dropout_prob=0.1
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nnx.NNModel(sizes, params)
    rows = TensorDataset(X, y)
    shuffled = DataLoader(
        rows, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    train.setdefault("seed", 0)
    if optim is not None:
        train["optim"] = optim
    return model, nnx.NNTrainParams(
        n_epochs=n_epochs,
        train_loader=shuffled,
        val_loader=DataLoader(rows, batch_size=16),
        metrics=list(metrics),
        **train,
    )


def _blobs() -> tuple[Any, Any]:
    """Labelled points around one centre per class."""
    import torch

    generator = torch.Generator().manual_seed(0)
    y = torch.arange(48) % 3
    centres = torch.randn(3, 6, generator=generator)
    return centres[y] + 0.5 * torch.randn(48, 6, generator=generator), y
