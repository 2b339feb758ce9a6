"""``nnx train --tune``: sizes, rates and dropouts tried on the validation rows.

The search is nnx-eval's; what it needs is handed over as a plan. The test rows are in none
of its loaders: the configuration that is chosen trains once more, as a run of its own, and
is tested on rows that no trial saw.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from nnx.callbacks import EarlyStopping
from nnx.cli.screen import sections
from nnx.cli.table_run import DEFAULTS, Job, sizes
from nnx.params import MonitorSpec, NNOptimParams

HIDDEN = ("none", "32", "64", "128", "64,64", "128,64", "256,128")
RATES = (1e-4, 3e-2)
MONITOR = MonitorSpec("loss")
DROPOUTS = (0.0, 0.1, 0.2, 0.35, 0.5)


def tune(
    job: Job,
    *,
    trials: int,
    seconds: float | None,
    fixed: Mapping[str, Any],
    epochs: int,
    seed: int,
    device: str,
) -> dict[str, Any]:
    """The ``hidden``, ``learning_rate`` and ``dropout`` with the lowest validation loss.

    What ``fixed`` gives is not searched. Trials are runs in the folder, seeded as the
    training is.
    """
    defaults = {**DEFAULTS, **fixed}
    if len(fixed) == 3:
        raise ValueError(
            "--tune has nothing to try: --hidden, --learning-rate and --dropout are all given"
        )
    if not job.split.validation:
        raise ValueError("--tune compares on validation rows, and --validation is 0")
    search = importlib.import_module("nnx.search")
    plan = _plan(job, epochs=epochs, seed=seed, device=device, **defaults)

    def apply(base: Any, tried: Mapping[str, Any]) -> Any:
        chosen = {**defaults, **tried}
        net = dataclasses.replace(
            base.net, hidden_dims=sizes(chosen["hidden"]), dropout_prob=chosen["dropout"]
        )
        optim = NNOptimParams.builder().adam(max_lr=chosen["learning_rate"]).build()
        return base.with_net(net).with_optim(optim)

    axes = {
        "hidden": search.CategoricalParam("hidden", HIDDEN),
        "learning_rate": search.FloatParam("learning_rate", *RATES, log=True),
        "dropout": search.CategoricalParam("dropout", DROPOUTS),
    }
    space = search.SearchSpace(tuple(axis for name, axis in axes.items() if name not in fixed))
    with contextlib.redirect_stdout(io.StringIO()):  # where each trial's run was saved
        found = search.search(
        plan, space,
        apply=apply, monitor=MONITOR, study_name="tune", sampler=_sampler(seed),
        budget=search.SearchBudget(trials, deadline_seconds=seconds),
        )  # fmt: skip
    if found.best is None:
        raise ValueError(
            f"none of the {found.asked} tried configurations could be scored: "
            f"{found.outcomes[0].error if found.outcomes else 'the time was too short'}"
        )
    best = dict(found.best.params)
    sections(
        {
            f"tuned, {found.asked} configurations tried": [
                *((name, f"{v:.4g}" if isinstance(v, float) else v) for name, v in best.items()),
                ("validation loss", f"{found.best.monitor_value:.4g}"),
            ]
        }
    )
    return {**defaults, **best}


def _plan(job: Job, *, seed: int, **options: Any) -> Any:
    """The training of the command's options as a plan, whose every fit has loaders of its own."""
    plans = importlib.import_module("nnx.plans")
    model, params = job.configure(seed=seed, **options)
    training, validation, _ = job.loaders(model.device)
    patience = job.source.patience

    def again(loader: DataLoader[Any], *, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(loader.dataset, batch_size=loader.batch_size, shuffle=shuffle)

    return plans.ExperimentPlan(
        net=model.net_params, model=model.params,
        train=dataclasses.replace(
            params, monitor=MONITOR, data_id=job.source.identity(job.table.digest)
        ),
        train_data=lambda: again(training, shuffle=True),
        val_data=lambda: again(validation, shuffle=False), seed=seed,
        callback_factories=() if patience is None else (lambda: EarlyStopping(patience=patience),),
    )  # fmt: skip


def _sampler(seed: int) -> Any:
    """Optuna's seeded default; ``None`` where Optuna is missing, which the search says."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        return None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.samplers.TPESampler(seed=seed)
