"""Builders: configuration by named variants, so that an invalid mix cannot be spelled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from nnx.enums import Optims, Schedulers
from nnx.params.base import field_names
from nnx.params.builder import Builder
from nnx.params.monitor import MonitorSpec
from nnx.params.optim import AnyOptimParams, NNOptimParams, NNParamGroupSpec
from nnx.params.registered import MetricSpec
from nnx.params.scheduler import NNSchedulerParams
from nnx.params.training import NNTrainerParams
from nnx.params.transformer import NNTransformerParams, check_heads
from nnx.utils import validation as check


class NNOptimParamsBuilder(Builder[NNOptimParams]):
    """One method per optimizer, and three modifiers that survive a change of optimizer."""

    _builds = NNOptimParams
    _needs: ClassVar[Mapping[str, str]] = {
        "name": "one of .adam(...), .adam_amsgrad(...), .adamw(...), .sgd(...), .sgd_nesterov(...)"
    }
    _VARIANT = ("name", "max_lr", "momentum", "weight_decay", "eps")

    def adam(
        self,
        *,
        max_lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float | None = None,
    ) -> NNOptimParamsBuilder:
        """``torch.optim.Adam``: the decay is an L2 term of the gradient."""
        return self._adam(Optims.ADAM, max_lr, betas, weight_decay, eps)

    def adam_amsgrad(
        self,
        *,
        max_lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float | None = None,
    ) -> NNOptimParamsBuilder:
        """``torch.optim.Adam`` with ``amsgrad=True``."""
        return self._adam(Optims.ADAM_AMSGRAD, max_lr, betas, weight_decay, eps)

    def adamw(
        self,
        *,
        max_lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        eps: float | None = None,
    ) -> NNOptimParamsBuilder:
        """``torch.optim.AdamW``: the decay scales the weights, apart from the gradient."""
        return self._adam(Optims.ADAMW, max_lr, betas, weight_decay, eps)

    def sgd(
        self, *, max_lr: float, momentum: float = 0.9, weight_decay: float = 0.0
    ) -> NNOptimParamsBuilder:
        """``torch.optim.SGD``."""
        return self._sgd(Optims.SGD, max_lr, momentum, weight_decay)

    def sgd_nesterov(
        self, *, max_lr: float, momentum: float = 0.9, weight_decay: float = 0.0
    ) -> NNOptimParamsBuilder:
        """``torch.optim.SGD`` with ``nesterov=True``."""
        return self._sgd(Optims.SGD_NESTEROV, max_lr, momentum, weight_decay)

    def grad_clip(self, norm: float) -> NNOptimParamsBuilder:
        """Clip the global L2 norm of the gradients to ``norm`` before each step."""
        return self._set(grad_clip_norm=norm)

    def accumulate_grad(self, batches: int) -> NNOptimParamsBuilder:
        """Step once in ``batches`` microbatches."""
        return self._set(accumulate_grad_batches=batches)

    def param_groups(self, groups: list[NNParamGroupSpec]) -> NNOptimParamsBuilder:
        """Override rates and decays by parameter name; the first match wins."""
        return self._set(param_groups=groups)

    def _adam(
        self, name: Optims, max_lr: Any, betas: Any, weight_decay: Any, eps: Any
    ) -> NNOptimParamsBuilder:
        chosen = {} if eps is None else {"eps": eps}
        return self._replace(
            self._VARIANT,
            name=name,
            max_lr=max_lr,
            momentum=betas,
            weight_decay=weight_decay,
            **chosen,
        )

    def _sgd(
        self, name: Optims, max_lr: Any, momentum: Any, weight_decay: Any
    ) -> NNOptimParamsBuilder:
        return self._replace(
            self._VARIANT, name=name, max_lr=max_lr, momentum=momentum, weight_decay=weight_decay
        )


class NNSchedulerParamsBuilder(Builder[NNSchedulerParams]):
    """One method per schedule; the clock survives a change of schedule."""

    _builds = NNSchedulerParams
    _needs: ClassVar[Mapping[str, str]] = {
        "min_lr": "one of .reduce_on_plateau(...), .step(...), .cosine_annealing(...), "
        ".one_cycle(...), .linear_warmup_decay(...)"
    }
    _VARIANT = tuple(n for n in field_names(NNSchedulerParams) if n != "clock")

    def reduce_on_plateau(
        self, *, min_lr: float, factor: float, patience: int, cooldown: int, threshold: float
    ) -> NNSchedulerParamsBuilder:
        """Cut the rate by ``factor`` when the watched number stops improving.

        ``kind`` stays ``None``, which is how this schedule is stored.
        """
        return self._schedule(None, min_lr, factor, patience, cooldown, threshold)

    def step(
        self,
        *,
        step_size: int,
        min_lr: float,
        factor: float,
        patience: int,
        cooldown: int,
        threshold: float,
    ) -> NNSchedulerParamsBuilder:
        """Multiply the rate by ``factor`` every ``step_size`` steps."""
        plateau = (min_lr, factor, patience, cooldown, threshold)
        return self._schedule(Schedulers.STEP, *plateau, step_size=step_size)

    def cosine_annealing(
        self,
        *,
        T_max: int,
        min_lr: float,
        factor: float,
        patience: int,
        cooldown: int,
        threshold: float,
    ) -> NNSchedulerParamsBuilder:
        """Anneal to ``min_lr`` along half a cosine of ``T_max`` steps."""
        plateau = (min_lr, factor, patience, cooldown, threshold)
        return self._schedule(Schedulers.COSINE_ANNEALING, *plateau, T_max=T_max)

    def one_cycle(
        self,
        *,
        max_lr: float,
        total_steps: int,
        min_lr: float,
        factor: float,
        patience: int,
        cooldown: int,
        threshold: float,
    ) -> NNSchedulerParamsBuilder:
        """Rise to ``max_lr`` and fall again within ``total_steps`` steps."""
        plateau = (min_lr, factor, patience, cooldown, threshold)
        return self._schedule(
            Schedulers.ONE_CYCLE, *plateau, max_lr=max_lr, total_steps=total_steps
        )

    def linear_warmup_decay(
        self,
        *,
        warmup_steps: int,
        total_steps: int,
        min_lr: float,
        factor: float,
        patience: int,
        cooldown: int,
        threshold: float,
    ) -> NNSchedulerParamsBuilder:
        """Rise linearly over ``warmup_steps``, then fall linearly to 0 at ``total_steps``."""
        plateau = (min_lr, factor, patience, cooldown, threshold)
        return self._schedule(
            Schedulers.LINEAR_WARMUP_DECAY,
            *plateau,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
        )

    def clock(self, clock: str) -> NNSchedulerParamsBuilder:
        """What one step counts: "epoch" or "optimizer_update"."""
        return self._set(clock=clock)

    def _schedule(
        self,
        kind: Schedulers | None,
        min_lr: Any,
        factor: Any,
        patience: Any,
        cooldown: Any,
        threshold: Any,
        **own: Any,
    ) -> NNSchedulerParamsBuilder:
        named = {} if kind is None else {"kind": kind}
        return self._replace(
            self._VARIANT,
            min_lr=min_lr,
            factor=factor,
            patience=patience,
            cooldown=cooldown,
            threshold=threshold,
            **named,
            **own,
        )


class NNTransformerParamsBuilder(Builder[NNTransformerParams]):
    """Asks only for what a transformer reads; the inherited fields get their quiet values."""

    _builds = NNTransformerParams
    _needs: ClassVar[Mapping[str, str]] = {
        "vocab_size": ".vocab(size=...)",
        "n_layers": ".layers(n=..., heads=..., d_model=...)",
        "max_seq_len": ".context(max_seq_len=...)",
    }

    def __init__(self) -> None:
        super().__init__()
        self._fields["dropout_prob"] = 0.0

    def vocab(self, size: int) -> NNTransformerParamsBuilder:
        """The vocabulary's size, which is also the input and output width."""
        return self._set(vocab_size=size, input_dim=size, output_dim=size)

    def layers(self, *, n: int, heads: int, d_model: int) -> NNTransformerParamsBuilder:
        """Depth, attention heads and width; the width is checked against the heads here."""
        owner = self._builds.__name__
        depth = check.count(owner, "n_layers", n)
        width, heads = check_heads(owner, d_model, heads, even=True)
        return self._set(n_layers=depth, n_heads=heads, d_model=width)

    def ffn(self, *, mult: int) -> NNTransformerParamsBuilder:
        """How many times wider than the model its feed-forward layers are."""
        return self._set(ffn_mult=mult)

    def ffn_dim(self, width: int) -> NNTransformerParamsBuilder:
        """The width of its feed-forward layers, where no multiple says it."""
        return self._set(ffn_dim=width)

    def kv_heads(self, n: int) -> NNTransformerParamsBuilder:
        """Key and value heads that groups of query heads share."""
        return self._set(n_kv_heads=n)

    def norm_eps(self, eps: float) -> NNTransformerParamsBuilder:
        """What every norm adds to the mean square."""
        return self._set(norm_eps=eps)

    def context(
        self, *, max_seq_len: int, rope_base: float | None = None
    ) -> NNTransformerParamsBuilder:
        """The longest sequence and the rotary base, together (an omitted base is reset)."""
        chosen = {} if rope_base is None else {"rope_base": rope_base}
        return self._replace(("rope_base",), max_seq_len=max_seq_len, **chosen)

    def dropout(self, *, attn: float = 0.0, resid: float = 0.0) -> NNTransformerParamsBuilder:
        """Attention and residual dropout, together (an omitted rate is reset)."""
        return self._set(attn_dropout=attn, resid_dropout=resid)

    def tied_embeddings(self, value: bool) -> NNTransformerParamsBuilder:
        """Whether the output layer shares the input embedding's weights."""
        return self._set(tie_embeddings=value)


class NNTrainerParamsBuilder(Builder[NNTrainerParams]):
    """Names optimizers and their schedules one by one."""

    _builds = NNTrainerParams
    _needs: ClassVar[Mapping[str, str]] = {
        "n_epochs": ".n_epochs(N)",
        "optims": ".optimizer(name, params)",
    }

    def build(self) -> NNTrainerParams:
        """The params value; every scheduler must belong to an optimizer."""
        optims = self._fields.get("optims", {})
        for name in self._fields.get("schedulers", {}):
            if name not in optims:
                known = ", ".join(map(repr, optims)) or "none"
                raise ValueError(
                    f".scheduler({name!r}, ...) has no optimizer of that name"
                    f"{check.close(name, optims)} (optimizers: {known}); "
                    f"call .optimizer({name!r}, ...) before .build()"
                )
        return super().build()

    def n_epochs(self, n: int) -> NNTrainerParamsBuilder:
        return self._set(n_epochs=n)

    def optimizer(self, name: str, params: AnyOptimParams) -> NNTrainerParamsBuilder:
        """Add or replace the optimizer ``name``."""
        return self._set(optims={**self._fields.get("optims", {}), name: params})

    def scheduler(self, name: str, params: NNSchedulerParams) -> NNTrainerParamsBuilder:
        """Add or replace the schedule of the optimizer ``name``."""
        return self._set(schedulers={**self._fields.get("schedulers", {}), name: params})

    def train_loader(self, loader: Iterable[Any]) -> NNTrainerParamsBuilder:
        return self._set(train_loader=loader)

    def val_loader(self, loader: Iterable[Any]) -> NNTrainerParamsBuilder:
        return self._set(val_loader=loader)

    def seed(self, value: int) -> NNTrainerParamsBuilder:
        return self._set(seed=value)

    def data_id(self, value: str) -> NNTrainerParamsBuilder:
        return self._set(data_id=value)

    def save_phase_checkpoints(self, value: bool) -> NNTrainerParamsBuilder:
        return self._set(save_phase_checkpoints=value)

    def auto_step_schedulers(self, value: bool) -> NNTrainerParamsBuilder:
        """``False`` leaves the stepping of the schedules to the step function."""
        return self._set(auto_step_schedulers=value)

    def overwrite_existing(self, value: bool) -> NNTrainerParamsBuilder:
        return self._set(overwrite_existing=value)

    def checkpoint_every(self, updates: int) -> NNTrainerParamsBuilder:
        """Write a resume point inside the epoch after so many committed updates."""
        return self._set(checkpoint_every=updates)

    def extra_metrics(self, metrics: Mapping[str, Callable[..., Any]]) -> NNTrainerParamsBuilder:
        """Callables ``(y_true, y_pred)`` by name."""
        return self._set(extra_metrics=metrics)

    def metrics(self, *specs: MetricSpec) -> NNTrainerParamsBuilder:
        """Declare the metrics, replacing those declared before."""
        return self._set(metrics=specs)

    def monitor(self, spec: MonitorSpec) -> NNTrainerParamsBuilder:
        return self._set(monitor=spec)

    def resume_from(
        self, run_id: str, checkpoint: str = "last", mode: str = "auto"
    ) -> NNTrainerParamsBuilder:
        """Continue ``run_id`` from its ``checkpoint``; an earlier lineage is replaced."""
        return self._replace(
            ("parent_run_id",),
            resume_from_run_id=run_id,
            resume_from_checkpoint=checkpoint,
            resume_mode=mode,
        )
