"""One small training task for four trainers: by hand, NNx, Lightning, Hugging Face.

The same net, data order, loss and ``torch.optim.Adam`` for each, in the leanest
configuration that its documentation offers: no logger, progress bar, summary or
clipping. Each returns a :class:`Fit`, and :func:`check_equal` holds their weights
against each other.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

os.environ.setdefault("NNX_TQDM_DISABLE", "1")
torch.set_num_threads(1)

HAS_LIGHTNING = importlib.util.find_spec("lightning") is not None
HAS_TRANSFORMERS = all(map(importlib.util.find_spec, ("transformers", "accelerate")))
LIGHTNING, HUGGING_FACE = "Lightning", "Hugging Face Trainer"


@dataclass
class Task:
    """What is trained; ``val`` also asks for LAST and BEST at every epoch's end."""

    net: Callable[[], nn.Module]
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]]
    epochs: int
    lr: float = 1e-3
    val: Iterable[tuple[torch.Tensor, torch.Tensor]] | None = None
    record: bool = False  # the six scores of every batch, which NNx always keeps
    shared: Any = None  # the dataset of all ranks, of which ``batches`` are this rank's
    clock: Callable[[], float] = time.perf_counter


@dataclass
class Fit:
    """When epochs began and their batches ended, what commits took, and the trained net."""

    begin: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    net: nn.Module | None = None

    @property
    def batches(self) -> list[float]:
        return [b - a for a, b in zip(self.begin, self.end)]

    @property
    def periods(self) -> list[float]:
        return [b - a for a, b in zip(self.begin, self.begin[1:])]


def mlp(*widths: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    return build


class Batches:
    """Batches in memory, as a loader: a plain list means several loaders to Lightning."""

    def __init__(self, batches: list[tuple[torch.Tensor, ...]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return iter(self.batches)


def rows(count: int, width: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, width, generator=generator)
    return x, (x[:, 0] + 2 * torch.randn(count, generator=generator) > 0).long()


def in_batches(data: tuple[torch.Tensor, ...], size: int) -> Batches:
    return Batches(list(zip(*(part.split(size) for part in data))))


def scores(output: torch.Tensor, target: torch.Tensor) -> tuple[float, ...]:
    """Accuracy, error, and macro f1, recall and precision, as one would by hand."""
    import numpy as np

    table = np.bincount(target.numpy() * 2 + output.argmax(1).numpy(), minlength=4).reshape(2, 2)
    hits, claimed, real = np.diag(table), table.sum(0), table.sum(1)
    accuracy = hits.sum() / len(target)
    recall, precision = hits / np.maximum(real, 1), hits / np.maximum(claimed, 1)
    f1 = 2 * hits / np.maximum(claimed + real, 1)
    return accuracy, 1 - accuracy, f1.mean(), recall.mean(), precision.mean()


@contextlib.contextmanager
def elsewhere(within: str | None = None) -> Iterator[Path]:
    """A folder of its own, in silence."""
    here = os.getcwd()
    with (
        tempfile.TemporaryDirectory(prefix="nnx-bench-", dir=within) as folder,
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(here)


def by_hand(task: Task) -> Fit:
    """The loop, with a checkpoint that survives a crash: written aside, flushed, renamed."""
    fit, net, loss_fn = Fit(), task.net(), nn.CrossEntropyLoss()
    model = net if task.shared is None else nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=task.lr)
    best = float("inf")
    for _ in range(task.epochs):
        fit.begin.append(task.clock())
        records = []
        net.train()
        for x, y in task.batches:
            optimizer.zero_grad()
            output = model(x)
            loss = loss_fn(output, y)
            loss.backward()
            optimizer.step()
            records.append((loss.item(), *(scores(output.detach(), y) if task.record else ())))
        fit.end.append(task.clock())
        if task.val is not None:
            net.eval()
            with torch.no_grad():
                pairs = [(loss_fn(net(x), y).item() * len(y), len(y)) for x, y in task.val]
            loss = sum(a for a, _ in pairs) / sum(b for _, b in pairs)
            start = task.clock()
            _save(net, optimizer, records, better=loss < best)
            fit.commits.append(task.clock() - start)
            best = min(best, loss)
    fit.net = net
    return fit


def _save(net: nn.Module, optimizer: torch.optim.Optimizer, records: Any, *, better: bool) -> None:
    with open("last.tmp", "wb") as file:
        state = {"net": net.state_dict(), "optim": optimizer.state_dict(), "records": records}
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace("last.tmp", "last.pt")
    if better:
        with contextlib.suppress(FileNotFoundError):
            os.unlink("best.pt")
        os.link("last.pt", "best.pt")
    folder = os.open(".", os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def with_nnx(task: Task) -> Fit:
    from nnx import (
        Callback,
        Losses,
        NNModel,
        NNModelParams,
        NNOptimParams,
        NNSchedulerParams,
        NNTrainParams,
    )

    fit = Fit()

    class Marks(Callback):
        rank_behaviour = "every"

        def on_epoch_begin(self, ctx: Any) -> None:
            now = task.clock()
            if fit.end:
                fit.commits.append(now - fit.end[-1])
            fit.begin.append(now)

        def on_epoch_end(self, ctx: Any) -> None:
            fit.end.append(task.clock())

        def on_train_end(self, ctx: Any) -> None:
            fit.commits.append(task.clock() - fit.end[-1])

    constant = NNSchedulerParams(min_lr=0.0, factor=0.5, patience=10**6, cooldown=0, threshold=0.0)
    loader, distributed = task.batches, None
    if task.shared is not None:
        from nnx.distributed import DDP, train_loader

        distributed, size = DDP(), len(next(iter(task.batches))[0])
        loader = train_loader(task.shared, batch_size=size, shuffle=False)
    optim = NNOptimParams.builder().adam(max_lr=task.lr, weight_decay=0.0).build()
    params = NNTrainParams(
        n_epochs=task.epochs, train_loader=loader, val_loader=task.val, seed=0, optim=optim,
        save_phase_checkpoints=False, overwrite_existing=True, scheduler=constant,
    )  # fmt: skip
    model = NNModel(module=task.net(), params=NNModelParams(loss=Losses.CROSS_ENTROPY))
    model.train(params, callbacks=[Marks()], distributed=distributed)
    fit.net = model.net
    return fit


def with_lightning(task: Task, *, save_last: bool | str = True) -> Fit:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    fit, saves = Fit(), task.val is not None

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss_fn, self.records = task.net(), nn.CrossEntropyLoss(), []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            output = self.net(x)
            loss = self.loss_fn(output, y)
            if task.record:
                self.records.append((loss.item(), *scores(output.detach(), y)))
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log("val_loss", self.loss_fn(self.net(x), y), batch_size=len(y))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=task.lr)

        def on_train_epoch_start(self) -> None:
            fit.begin.append(task.clock())

        def on_train_epoch_end(self) -> None:
            fit.end.append(task.clock())

    class Checkpoint(ModelCheckpoint):  # saves once the validation has ended
        def on_validation_end(self, *arguments: Any) -> None:
            start = task.clock()
            super().on_validation_end(*arguments)
            fit.commits.append(task.clock() - start)

    lean: dict[str, Any] = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "callbacks": [
            Checkpoint(
                dirpath="lightning", monitor="val_loss", save_last=save_last,
                save_on_train_epoch_end=False,
            )
        ],
    } if saves else {"barebones": True}  # fmt: skip
    if task.shared is not None:
        lean |= {"strategy": "ddp", "devices": torch.distributed.get_world_size()}
    trainer = lightning.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": task.epochs, **lean}
    )
    module = Module()
    trainer.fit(module, task.batches, task.val)
    fit.net = module.net
    return fit


def with_hugging_face(task: Task) -> Fit:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    fit, loss_fn, records, saves = Fit(), nn.CrossEntropyLoss(), [], task.val is not None

    class Lean(Trainer):
        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            output = model(inputs["x"])
            loss = loss_fn(output, inputs["y"])
            if task.record and model.training:
                records.append((loss.item(), *scores(output.detach(), inputs["y"])))
            return (loss, {"output": output}) if return_outputs else loss

        def get_train_dataloader(self) -> Any:
            return named(task.batches, self.accelerator)

        def get_eval_dataloader(self, *_: Any) -> Any:
            return named(task.val, self.accelerator)

    class Marks(TrainerCallback):
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            fit.begin.append(task.clock())

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            fit.end.append(task.clock())

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            self.evaluated = task.clock()

        def on_save(self, *_: Any, **__: Any) -> None:
            fit.commits.append(task.clock() - self.evaluated)

    every = "epoch" if saves else "no"
    arguments = TrainingArguments(
        output_dir="hugging-face", num_train_epochs=task.epochs, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_strategy="no", logging_nan_inf_filter=False, max_grad_norm=0.0,
        remove_unused_columns=False, label_names=["y"], prediction_loss_only=True,
        lr_scheduler_type="constant", eval_strategy=every, save_strategy=every,
        load_best_model_at_end=saves, metric_for_best_model="loss" if saves else None,
        greater_is_better=False if saves else None, save_total_limit=1, ddp_find_unused_parameters=False,
    )  # fmt: skip
    net = task.net()
    optimizer = torch.optim.Adam(net.parameters(), lr=task.lr)
    trainer = Lean(
        model=net, args=arguments, optimizers=(optimizer, None), callbacks=[Marks()],
        eval_dataset=[] if saves else None,
    )  # fmt: skip
    trainer.train()
    fit.net = net
    return fit


def named(batches: Any, accelerator: Any) -> Any:
    """Batches as the mappings that the Hugging Face Trainer reads."""
    if not isinstance(batches, DataLoader):
        return [{"x": x, "y": y} for x, y in batches]
    return accelerator.prepare(
        DataLoader(
            batches.dataset, batch_size=batches.batch_size,
            collate_fn=lambda group: dict(zip("xy", default_collate(group))),
        )
    )  # fmt: skip


def contestants() -> dict[str, Callable[[Task], Fit]]:
    """The loop by hand and the trainers that are installed."""
    found: dict[str, Callable[[Task], Fit]] = {"the loop by hand": by_hand}
    if HAS_LIGHTNING:
        found[LIGHTNING] = with_lightning
    if HAS_TRANSFORMERS:
        found[HUGGING_FACE] = with_hugging_face
    return found


def left_out() -> Iterator[str]:
    """One line for what is not installed."""
    names = [name for name, here in ((LIGHTNING, HAS_LIGHTNING),
                                     (HUGGING_FACE, HAS_TRANSFORMERS)) if not here]  # fmt: skip
    if names:
        yield f"not installed, so their rows are left out: {', '.join(names)}"


def check_equal(fits: dict[str, Fit], *, tolerance: float = 0.0) -> None:
    """Hold that all ended with the same weights: what is compared did the same work."""
    (first, reference), *others = fits.items()
    for name, fit in others:
        for a, b in zip(reference.net.parameters(), fit.net.parameters(), strict=True):
            off = (a - b).abs().max().item()
            if off > tolerance:
                raise AssertionError(f"{name} ended {off:.3g} away from {first}")


def smallest(train: Callable[[Task], Fit]) -> None:
    """One epoch of two batches."""
    with elsewhere():
        train(Task(mlp(20, 64, 64, 2), in_batches(rows(64), 32), epochs=1))


def predictors(net: nn.Module, loader: Any) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Calls that return the raw outputs and the classes of ``loader`` as NumPy arrays."""
    import numpy as np
    from nnx import Losses, NNModel, NNModelParams

    model = NNModel(module=net, params=NNModelParams(loss=Losses.CROSS_ENTROPY))

    def with_nnx() -> tuple[Any, Any]:
        return model.predict(loader)[:2]

    def by_hand() -> tuple[Any, Any]:
        net.eval()
        with torch.inference_mode():
            logits = np.concatenate([net(x).numpy() for x, _ in loader])
        return logits, logits.argmax(1)

    found = {"NNx": with_nnx, "the loop by hand": by_hand}
    if HAS_LIGHTNING:
        found[LIGHTNING] = lightning_predictor(net, loader)
    if HAS_TRANSFORMERS:
        found[HUGGING_FACE] = hugging_face_predictor(net, loader)
    return found


def lightning_predictor(net: nn.Module, loader: Any) -> Callable[[], tuple[Any, Any]]:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def predict_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(batch[0])

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip

    def predict() -> tuple[Any, Any]:
        logits = torch.cat(trainer.predict(module, loader)).numpy()
        return logits, logits.argmax(1)

    return predict


def hugging_face_predictor(net: nn.Module, loader: Any) -> Callable[[], tuple[Any, Any]]:
    from transformers import Trainer, TrainingArguments
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()

    class Lean(Trainer):
        def prediction_step(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Any:
            with torch.no_grad():
                return None, model(self._prepare_inputs(inputs)["x"]), None

        def get_test_dataloader(self, *_: Any) -> Any:
            return named(loader, self.accelerator)

    trainer = Lean(
        model=net,
        args=TrainingArguments(
            output_dir="hugging-face", use_cpu=True, report_to=[], disable_tqdm=True,
            remove_unused_columns=False,
        ),
    )  # fmt: skip

    def predict() -> tuple[Any, Any]:
        logits = trainer.predict([]).predictions
        return logits, logits.argmax(1)

    return predict
