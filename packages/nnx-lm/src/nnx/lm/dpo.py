"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290).

The loss of a pair is ``-log sigmoid(beta * margin)``; the margin is how much more
than the reference the policy prefers the chosen response. Log-probabilities are
sums over the response's tokens. The policy is scored without dropout: noise there
would be noise in the margin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from nnx.objectives import LossTerm, Objective, ObjectiveContext, ObjectiveResult
from nnx.precision import inference_precision
from nnx.records import NNEvaluationDataPoint
from nnx.utils import validation as check
from nnx.utils.modes import eval_mode

if TYPE_CHECKING:
    from nnx.engine.contexts import TrainStepContext, TrainStepFn
    from nnx.models import Model


def sequence_log_probs(net: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The summed log-probability (B,) of the tokens of ``ids`` (B, T) that ``mask`` marks.

    The first token of a row has nothing before it and cannot be marked.
    """
    targets = ids[:, 1:]
    # A mask that is still on the CPU is counted there, without waiting for the device.
    rows, columns = (part.to(ids.device) for part in mask[:, 1:].nonzero(as_tuple=True))
    if hasattr(net, "hidden") and hasattr(net, "lm_head"):
        logits = net.lm_head(net.hidden(ids[:, :-1])[rows, columns])
    else:
        logits = net(ids[:, :-1])[rows, columns]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scores = -F.cross_entropy(wide, targets[rows, columns], reduction="none")
    return scores.new_zeros(len(ids)).index_add(0, rows, scores)


def dpo_loss(
    policy: tuple[torch.Tensor, torch.Tensor],
    reference: tuple[torch.Tensor, torch.Tensor],
    beta: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses (B,) and margins (B,) of (chosen, rejected) log-probabilities."""
    margin = (policy[0] - reference[0]) - (policy[1] - reference[1])
    return -F.logsigmoid(beta * margin), margin


def dpo_train_step_factory(
    ref_model: Model, *, beta: float = 0.1, pad_token_id: int | None = None
) -> TrainStepFn:
    """A ``train_step_fn`` over ``(prompt_ids, chosen_ids, rejected_ids)`` batches.

    ``ref_model`` is frozen here and put into eval mode. ``beta`` > 0 is how closely
    the policy keeps to it. ``pad_token_id``, the id that responses were padded with,
    leaves those positions out; without it padding is scored. A record's ``error`` is
    how much more probable the policy finds the rejected responses.

    It keeps two models in memory; :class:`DPOObjective` with stored log-probabilities
    needs one, and takes reduced precision and accumulation.
    """
    beta = check.real("dpo_train_step_factory", "beta", beta, above=0)
    if pad_token_id is not None:
        pad_token_id = check.integer("dpo_train_step_factory", "pad_token_id", pad_token_id)
    ref_model.net.requires_grad_(False)
    ref_model.net.eval()

    def step(ctx: TrainStepContext) -> NNEvaluationDataPoint:
        from nnx.engine.finalize import finalize_step

        _check_apart(ctx.model, ref_model)
        prompt, *responses = _triple(ctx.batch, ctx.model.device)
        ctx.optimizer.zero_grad(set_to_none=True)
        ctx.model.net.train()
        pairs = [_marked(prompt, response, pad_token_id) for response in responses]
        with eval_mode(ctx.model.net):
            policy = [sequence_log_probs(ctx.model.net, *pair) for pair in pairs]
        with torch.no_grad():
            reference = [_on(ref_model, pair, prompt.device) for pair in pairs]
        losses, _ = dpo_loss((policy[0], policy[1]), (reference[0], reference[1]), beta)
        loss = finalize_step(ctx, losses.mean())
        error = float((policy[1] - policy[0]).detach().mean())
        return NNEvaluationDataPoint(loss=loss, error=error)

    return step


class DPOObjective(Objective):
    """DPO over the batches of ``NNPreferenceDataset.with_reference``, as one term, ``"dpo"``.

    The reference's log-probabilities come with the batch, so no second model is in
    memory. The record has ``reward_accuracy`` (the share of pairs whose chosen
    response gained more) and ``reward_margin`` (beta times the mean margin).
    """

    def __init__(self, *, beta: float = 0.1, nonfinite: str = "fail") -> None:
        super().__init__(nonfinite=nonfinite)
        self.beta = check.real("DPOObjective", "beta", beta, above=0)

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        losses, margin = self._score(ctx.model, ctx.batch)
        rewards = torch.stack(((margin > 0).double().mean(), margin.double().mean())).tolist()
        metrics = {"reward_accuracy": rewards[0], "reward_margin": self.beta * rewards[1]}
        record = NNEvaluationDataPoint(kind="dpo", count=len(losses), metrics=metrics, status="ok")
        return ObjectiveResult((LossTerm("dpo", losses.sum(), len(losses)),), record)

    def eval_step(self) -> Any:
        """An ``eval_step_fn``: loss and rewards over all pairs of the validation loader."""
        return self._evaluate

    def _evaluate(self, ctx: Any) -> NNEvaluationDataPoint:
        found = [self._score(ctx.model, batch) for batch in ctx.val_loader]
        if not found:
            raise ValueError("the validation loader yielded no batches")
        losses, margin = (torch.cat(parts).double() for parts in zip(*found))
        return NNEvaluationDataPoint(
            loss=losses.mean().item(),
            kind="dpo",
            count=len(losses),
            status="ok",
            metrics={
                "reward_accuracy": float((margin > 0).double().mean()),
                "reward_margin": self.beta * float(margin.mean()),
            },
        )

    def _score(self, model: Model, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kinds = ("chosen", "rejected")
        needed = [f"{k}_{part}" for k in kinds for part in ("ids", "mask")]
        needed += [f"reference_{k}" for k in kinds]
        if not isinstance(batch, Mapping) or not set(needed) <= set(batch):
            raise ValueError(
                "DPOObjective reads the batches of NNPreferenceDataset.with_reference(...): "
                f"mappings of {', '.join(needed)}; dpo_train_step_factory reads plain triples"
            )
        moved = {
            name: batch[name].to(model.device, non_blocking=True)
            for name in needed
            if not name.endswith("_mask")
        }
        with eval_mode(model.net):
            policy = [
                sequence_log_probs(model.net, moved[f"{k}_ids"], batch[f"{k}_mask"]) for k in kinds
            ]
        reference = [moved[f"reference_{k}"].to(policy[0].dtype) for k in kinds]
        losses, margin = dpo_loss((policy[0], policy[1]), (reference[0], reference[1]), self.beta)
        return losses, margin.detach()


def dpo(config: Mapping[str, Any]) -> DPOObjective:
    """The factory of the objective ``"lm.dpo"``; ``config`` may hold ``beta`` and ``nonfinite``."""
    return DPOObjective(**config)


def _triple(batch: Any, device: torch.device) -> list[torch.Tensor]:
    parts = list(batch) if isinstance(batch, (tuple, list)) else []
    if len(parts) != 3 or not all(isinstance(p, torch.Tensor) and p.dim() == 2 for p in parts):
        raise ValueError(
            "DPO reads batches (prompt_ids, chosen_ids, rejected_ids), each (B, tokens), as "
            "NNPreferenceDataset gives them"
        )
    return [part.to(device, non_blocking=True) for part in parts]


def _marked(
    prompt: torch.Tensor, response: torch.Tensor, pad: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    scored = torch.ones_like(response) if pad is None else response != pad
    return (
        torch.cat((prompt, response), dim=1),
        torch.cat((torch.zeros_like(prompt, dtype=torch.bool), scored.bool()), dim=1),
    )


def _on(model: Model, pair: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    precision = inference_precision(model.params, model.device)
    with eval_mode(model.net), precision.autocast():
        scores = sequence_log_probs(model.net, *(t.to(model.device) for t in pair))
    return scores.to(device)


def _check_apart(policy: Model, reference: Model) -> None:
    held = {id(parameter) for parameter in reference.net.parameters()}
    if any(id(parameter) in held for parameter in policy.net.parameters()):
        raise ValueError(
            "dpo_train_step_factory: the trained model shares parameters with its reference, "
            "which is frozen. Give a copy of the model as the reference"
        )
    sizes = [getattr(m.net_params, "vocab_size", None) for m in (policy, reference)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise ValueError(
            f"dpo_train_step_factory: the model has a vocabulary of {sizes[0]} and its reference "
            f"one of {sizes[1]}; both must read the same token ids"
        )
