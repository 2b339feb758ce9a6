"""Contrast, experts and sampling beside the plain forms of the same sums.

Run as a script with "blocks" or "formula" it computes one NT-Xent with its gradient, and
prints how far its memory rose.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measure import Row, interleaved, peak_mebibytes

BATCH, WIDTH = 4096, 128


def _views() -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
    return [view.requires_grad_() for view in made]


def _formula(first: Any, second: Any, temperature: float) -> Any:
    """NT-Xent as it is usually written."""
    import torch
    import torch.nn.functional as F

    rows = F.normalize(torch.cat((first, second)), dim=1)
    similar = rows @ rows.t() / temperature
    similar.fill_diagonal_(float("-inf"))
    return F.cross_entropy(similar, torch.arange(len(rows)).roll(len(first)))


def _contrast(loss: Callable[..., Any]) -> Callable[[], None]:
    first, second = _views()

    def step() -> None:
        loss(first, second, temperature=0.5).backward()
        first.grad = second.grad = None

    return step


def bench_nt_xent() -> Iterator[Row]:
    """The loss and its gradient at a batch of 4,096, in time and in memory."""
    from nnx import nt_xent_loss

    a, b, spread = interleaved(_contrast(nt_xent_loss), _contrast(_formula), repeats=7)
    yield Row(
        "NT-Xent and its gradient, batch 4,096", 1e3 * a, 1e3 * b, "ms", "the formula in torch",
        "<= 1.1x", a <= 1.1 * b, spread,
    )  # fmt: skip
    blocks, formula = (
        float(subprocess.check_output([sys.executable, __file__, kind], text=True))
        for kind in ("blocks", "formula")
    )
    yield Row(
        "NT-Xent and its gradient, batch 4,096: memory", blocks, formula, "MiB",
        "the formula in torch", "<= 128 MiB", blocks <= 128,
    )  # fmt: skip


def bench_experts() -> Iterator[Row]:
    """A training step of a mixture of 16 experts, 2 for each row, beside all of them on all rows."""
    import torch
    from nnx import MoELinear

    torch.manual_seed(0)
    layer = MoELinear(256, 256, num_experts=16, top_k=2)
    x = torch.randn(2048, 256)

    def dense() -> Any:
        scores = layer.router(x)
        top, chosen = scores.topk(2, dim=-1)
        weights = torch.zeros_like(scores).scatter(1, chosen, top.softmax(-1))
        return sum(weights[:, e, None] * expert(x) for e, expert in enumerate(layer.experts))

    def stepping(forward: Callable[[], Any]) -> Callable[[], None]:
        def step() -> None:
            forward().square().mean().backward()
            layer.zero_grad(set_to_none=True)

        return step

    a, b, spread = interleaved(stepping(lambda: layer(x)), stepping(dense), repeats=11)
    yield Row(
        "step of 16 experts, top 2, 2,048 rows of 256", 1e3 * a, 1e3 * b, "ms",
        "a dense loop over the experts", "<= 0.5x", a <= 0.5 * b, spread,
    )  # fmt: skip


def bench_sampling() -> Iterator[Row | str]:
    """DDIM of 50 steps with a small U-Net beside the loop over diffusers' scheduler."""
    import torch
    from nnx import Losses, NNModel, NNModelParams, NoiseSchedulers
    from nnx.diffusion import UNet, sample_in_steps

    try:
        from diffusers import DDIMScheduler
    except ImportError:
        yield "paradigms.sampling needs diffusers, of the group `peers`"
        return
    torch.manual_seed(0)
    net = UNet(width=16)
    model = NNModel(module=net, params=NNModelParams(loss=Losses.MEAN_SQUARED_ERROR))
    schedule = NoiseSchedulers.LINEAR(T=1000)
    theirs = DDIMScheduler(
        trained_betas=schedule.betas.numpy(), clip_sample=False, timestep_spacing="trailing"
    )
    shape = (16, 1, 8, 8)

    def ours() -> Any:
        generator = torch.Generator().manual_seed(0)
        return sample_in_steps(model, schedule, shape, steps=50, generator=generator)

    @torch.no_grad()
    def loop() -> Any:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        theirs.set_timesteps(50)
        for t in theirs.timesteps:
            x = theirs.step(net(x, t.expand(16)), t, x).prev_sample
        return x

    torch.testing.assert_close(ours(), loop(), rtol=1e-3, atol=1e-3)
    a, b, spread = interleaved(ours, loop, repeats=9)
    yield Row(
        "DDIM of 50 steps, a small U-Net, 16 images", 1e3 * a, 1e3 * b, "ms",
        "the loop over diffusers' scheduler", "<= 1.0x", a <= b, spread,
    )  # fmt: skip


if __name__ == "__main__":
    from nnx import nt_xent_loss

    step = _contrast(nt_xent_loss if sys.argv[1] == "blocks" else _formula)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of making the views
    before = peak_mebibytes()
    step()
    print(max(0.0, peak_mebibytes() - before))
