"""A run on a table: the data of a training, and how a stored run finds it again."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from nnx.callbacks import EarlyStopping
from nnx.cli.columns import fit
from nnx.cli.kept import Keep
from nnx.cli.options import again
from nnx.cli.preparation import Preparation, target_numbers
from nnx.cli.screen import sections
from nnx.cli.source import Source, split_rows
from nnx.cli.table import Table, read_table
from nnx.data_splits import SplitIndices
from nnx.enums import Checkpoints, Devices, Losses, Nets
from nnx.nn_model import NNModel
from nnx.params import NNModelParams, NNOptimParams, NNParams, NNTrainParams, RunConfig, TaskSpec
from nnx.seeding import set_seed
from nnx.store.checkpoint import NNCheckpoint
from nnx.store.errors import RunExistsError
from nnx.store.paths import RunPaths
from nnx.store.predictions import save_predictions
from nnx.utils.validation import close

FORMAT, EARLIER_FORMAT = "nnx.table-run/2", "nnx.table-run/1"
FILE = "table.json"
DEFAULTS: Mapping[str, Any] = {"hidden": "64,64", "learning_rate": 0.001, "dropout": 0.0}
PATIENCE = "patience="  # the salt of a run that early stopping may end


@dataclass(frozen=True, slots=True)
class Job:
    """A table that is ready to train on."""

    source: Source
    table: Table
    split: SplitIndices
    preparation: Preparation

    @staticmethod
    def open(source: Source, stored: Preparation | None = None) -> Job:
        """Read, split and prepare; every refusal of the data happens here."""
        table = read_table(source.path, delimiter=source.delimiter)
        table.column(source.target)
        split = split_rows(source, table)
        drop = [*source.drop, *([source.split_column] if source.split_column else [])]
        fitted = stored or fit(
            table, target=source.target, rows=split.train, regression=source.regression,
            impute=source.impute, drop=drop, numeric=source.numeric,
            categorical=source.categorical,
        )  # fmt: skip
        return Job(source, table, split, fitted)

    @property
    def task(self) -> TaskSpec:
        """What this table's target asks for, with its own classes."""
        labels = self.preparation.target.labels
        return TaskSpec.regression(1) if labels is None else TaskSpec.categorical(labels=labels)

    def configure(
        self, *, epochs: int, hidden: str, learning_rate: float, dropout: float, seed: int,
        device: str,
    ) -> tuple[NNModel, NNTrainParams]:  # fmt: skip
        """The model and training of the command's own options."""
        labels, task = self.preparation.target.labels, self.task
        set_seed(seed)  # of the initial weights; training seeds itself
        model = NNModel(
            net_params=NNParams(
                input_dim=self.preparation.width,
                output_dim=1 if labels is None else len(labels),
                hidden_dims=sizes(hidden),
                dropout_prob=dropout,
            ),
            params=NNModelParams(
                net=Nets.FEED_FWD,
                device=_device(device),
                loss=Losses.CROSS_ENTROPY if labels else Losses.MEAN_SQUARED_ERROR,
                task=task,
            ),
        )
        optim = NNOptimParams.builder().adam(max_lr=learning_rate).build()
        return model, NNTrainParams(n_epochs=epochs, optim=optim, seed=seed)

    def configured_by(
        self, config: str, *, epochs: int | None, learning_rate: float | None, seed: int | None
    ) -> tuple[NNModel, NNTrainParams, str | None]:
        """The model and training of a ``run.yaml``, with what was given beside it."""
        if not Path(config).exists():
            raise FileNotFoundError(f"{config}: no such file")
        stored = RunConfig.from_yaml(Path(config))
        net, params = stored.net, stored.train
        if stored.model.net is not Nets.FEED_FWD or net is None or params is None:
            raise ValueError(
                f"{config} is not the run of a feed-forward network; nnx train reads only those"
            )
        labels = self.preparation.target.labels
        outputs = 1 if labels is None else len(labels)
        for what, has, needs in (
            ("inputs", net.input_dim, self.preparation.width),
            ("outputs", net.output_dim, outputs),
        ):
            if has != needs:
                raise ValueError(
                    f"the network of {config} has {has} {what}, but {self.source.path} needs "
                    f"{needs}; train without --config, or on a table of the same columns"
                )
        asked, given = self.task.kind, getattr(stored.model.task, "kind", None)
        if asked != given:
            raise ValueError(
                f"the model of {config} predicts {given or 'undeclared'} targets, but the target "
                f"{self.source.target!r} of {self.source.path} is {asked}"
                + ("; pass --regression to predict a number" if given == "regression" else "")
            )
        changes: dict[str, Any] = {"resume_from_run_id": None, "parent_run_id": None}
        if epochs is not None:
            changes["n_epochs"] = epochs
        if seed is not None:
            changes["seed"] = seed
        if learning_rate is not None:
            changes["optim"] = dataclasses.replace(params.optim, max_lr=learning_rate)
        params = dataclasses.replace(params, **changes)
        if params.seed is not None:
            set_seed(params.seed)
        model = dataclasses.replace(stored.model, task=self.task)  # the classes of this table
        salt = None if (stored.salt or "").startswith(PATIENCE) else stored.salt
        return NNModel(net_params=net, params=model), params, salt

    def loaders(self, device: torch.device) -> tuple[Any, Any, Any]:
        """Training (shuffled), validation and test loaders; ``None`` for an empty split."""
        inputs = self.preparation.inputs(self.table).to(device)
        targets = self.preparation.target.encode(self.table).to(device)

        def loader(rows: Sequence[int], size: int, *, shuffle: bool) -> Any:
            if not rows:
                return None
            chosen = torch.tensor(rows, device=device)
            data = TensorDataset(inputs[chosen], targets[chosen])
            return DataLoader(data, batch_size=size, shuffle=shuffle)

        validation = loader(self.split.validation, 4096, shuffle=False)
        if validation is not None:
            validation.data_id = self.source.held_out(self.table.digest)
        return (
            loader(self.split.train, self.source.batch_size, shuffle=True),
            validation,
            loader(self.split.test, 4096, shuffle=False),
        )

    def train(
        self, model: NNModel, params: NNTrainParams, *, salt: str | None, overwrite: bool = False
    ) -> str:
        """Train, test, and say where everything is; the run's id."""
        training, validation, test = self.loaders(model.device)
        params = dataclasses.replace(
            params, train_loader=training, val_loader=validation,
            data_id=self.source.identity(self.table.digest), overwrite_existing=overwrite,
        )  # fmt: skip
        keep = Keep(FILE, self.state())
        callbacks: list[Any] = [keep]
        if self.source.patience is not None:
            callbacks.append(EarlyStopping(patience=self.source.patience))
            salt = salt or f"{PATIENCE}{self.source.patience}"
        try:
            run = model.train(params, callbacks=callbacks, salt=salt)
        except RunExistsError as error:
            raise FileExistsError(_already_there(error.run_id)) from None
        except OSError as error:
            raise _stopped(error, keep.run_id) from error
        self._keep_predictions(run.id, {"validation": validation, "test": test})
        self._report(run, test)
        return str(run.id)

    def state(self) -> dict[str, Any]:
        """What ``table.json`` holds."""
        source = {**self.source.state(), "path": os.path.abspath(self.source.path)}
        return {
            "format": EARLIER_FORMAT if self.source.earlier else FORMAT, "source": source, "content": self.table.digest,
            "preparation": self.preparation.state(),
        }  # fmt: skip

    def _keep_predictions(self, run_id: str, loaders: Mapping[str, Any]) -> None:
        """Store what the best checkpoint predicts of the held-out rows with the run."""
        model = load_model(run_id, "best")
        target = self.preparation.target
        for split, loader in loaders.items():
            if loader is None:
                continue
            truth = torch.cat([batch[1] for batch in loader]).cpu().numpy()
            logits = model.predict(loader).logits
            if target.labels is None:  # the table's own digits, not those of a float32
                numbers = target_numbers(self.table, target.name)
                targets = [numbers[row] for row in getattr(self.split, split)]
                predicted = target.restore(logits[:, 0])
            else:
                names = np.array(target.labels, dtype=object)
                targets, predicted = names[truth], names[logits.argmax(axis=1)]
            save_predictions(
                run_id, split, targets=list(targets), predicted=list(predicted),
                sample_ids=getattr(self.split, split),
            )  # fmt: skip

    def _report(self, run: Any, test: Any) -> None:
        folder = RunPaths.of(run.id).dir
        filled = self.preparation.filled(self.table)
        counts = [
            f"{len(getattr(self.split, name))} {name}" for name in ("train", "validation", "test")
        ]
        report = {
            "data": [
                ("file", self.source.path),
                ("rows", ", ".join(counts)),
                (
                    "inputs",
                    f"{self.preparation.width} from {len(self.preparation.features)} columns",
                ),
            ],
            "missing cells": [("filled", filled)] if filled else [],
            "test, best checkpoint": list(self.scores(run.id, "best", test)) if test else [],
            "where": [
                ("run", run.id),
                ("folder", folder),
                ("details", again(f"nnx show {run.id[:8]}")),
                ("predict", again(f"nnx predict {run.id[:8]} DATA.csv")),
            ],
        }
        sections({title: rows for title, rows in report.items() if rows})

    def scores(self, run_id: str, tag: str, loader: Any) -> list[tuple[str, str]]:
        """What a checkpoint scores on a loader, in the table's units."""
        model = load_model(run_id, tag)
        record = model.evaluate(loader)
        if self.preparation.target.labels is not None:
            named = ("accuracy", "f1", "precision", "recall", "loss")
            return [(n, f"{getattr(record, n):.4f}") for n in named]
        standardizer = self.preparation.target.standardizer
        assert standardizer is not None
        scale = standardizer.scale[0]
        wanted = torch.cat([batch[1] for batch in loader]).cpu().double()
        found = torch.from_numpy(model.predict(loader).logits).double()
        error = (found - wanted) * scale
        spread = ((wanted - wanted.mean()) ** 2).sum()
        unexplained = ((found - wanted) ** 2).sum() / spread if spread else torch.tensor(torch.nan)
        return [
            ("root mean squared error", f"{error.square().mean().sqrt():.4g}"),
            ("mean absolute error", f"{error.abs().mean():.4g}"),
            ("R2", f"{1 - unexplained:.4f}"),
        ]


def _already_there(run_id: str) -> str:
    """What can be done about a run of the same configuration on the same data."""
    short = run_id[:8]
    return (
        f"this configuration was trained on this table already, as run {run_id}. "
        f"`{again(f'nnx show {short}')}` shows it, `{again(f'nnx resume {short}')}` continues it, "
        "--overwrite replaces it, and another --seed trains another one"
    )


def _stopped(error: OSError, run_id: str | None) -> OSError:
    """The same error, with how far the run came and how it goes on."""
    from nnx.cli.app import explain
    from nnx.store.committed import committed_epoch

    last = None if run_id is None else committed_epoch(RunPaths.of(run_id))
    if run_id is None or last is None or last < 0:
        return error
    return OSError(
        f"{explain(error)}. Run {run_id} has {last + 1} committed epochs; once the file can be "
        f"written, `{again(f'nnx resume {run_id[:8]}')}` continues it"
    )


def load_model(run_id: str, tag: str) -> NNModel:
    """The model of a run's checkpoint."""
    tags = [member.value for member in Checkpoints]
    if tag not in tags:
        raise ValueError(
            f"no checkpoint is called {tag!r}{close(tag, tags)} One of {', '.join(tags)}"
        )
    found = NNCheckpoint.load(run_id, Checkpoints(tag))
    if found is None:
        raise FileNotFoundError(f"run {run_id} has no checkpoint {tag!r}")
    device = found.model_params.device
    if not device.is_available:
        warnings.warn(
            f"run {run_id} was trained on {device.value}, which this machine has not; its "
            "checkpoint is used on the CPU",
            stacklevel=2,
        )
        device = Devices.CPU
    return NNModel.from_checkpoint(found, device=device)


def sizes(hidden: str) -> list[int] | None:
    """Hidden sizes as the command spells them."""
    words = [word.strip() for word in hidden.split(",")]
    if words in (["none"], [""]):
        return None
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise ValueError(f"--hidden is sizes such as 64,32, or none; not {hidden!r}")
    return [int(word) for word in words]


def _device(name: str) -> Devices:
    known = [member.value for member in Devices]
    if name not in known:
        raise ValueError(f"--device is one of {', '.join(known)}, not {name!r}")
    if not Devices(name).is_available:
        raise ValueError(f"--device {name}: this machine has none; `nnx doctor` shows the devices")
    return Devices(name)
