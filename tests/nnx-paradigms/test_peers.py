"""Against other implementations: transformers always, the group ``peers`` where it is installed."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import nnx
import numpy as np
import pytest
import torch
from nnx import Losses, MoELinear, NNModel, NNModelParams, NoiseSchedulers, ViTNN
from nnx.diffusion import sample_in_steps, zero_terminal_snr
from nnx.objectives import ObjectiveContext
from nnx.paradigms import MixingObjective, dino_objective, vicreg_objective
from small_models import feed_forward, numbers, self_distilled
from test_augmentation import Told, image_model

SQUARED = NNModelParams(loss=Losses.MEAN_SQUARED_ERROR)


def peer(name):
    """A library of the group; one that is installed for another torch counts as absent."""
    return pytest.importorskip(name, exc_type=(ImportError, RuntimeError))


def test_the_balance_loss_is_that_of_switch_transformers():
    module = pytest.importorskip(
        "transformers.models.switch_transformers.modeling_switch_transformers"
    )
    layer = MoELinear(6, 5, num_experts=4, top_k=1)
    x = numbers(1, 30, 6)
    layer(x)
    shares = layer.router(x).softmax(-1)
    wanted = module.load_balancing_loss_func(shares[None], shares.argmax(-1)[None])
    torch.testing.assert_close(layer.last_aux_loss, wanted)
    z = module.router_z_loss_func(layer.router(x)[None])
    torch.testing.assert_close(layer.last_routing.z / 30, z)


class Shaped(torch.nn.Module):
    """Some prediction of a sample and its time, that is no line."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.7))

    def forward(self, x, t):
        return (x * self.weight + t.view(-1, 1) / 100).sin()


PREDICTIONS = {"noise": "epsilon", "sample": "sample", "velocity": "v_prediction"}


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("method", ["ddim", "dpm++"])
def test_sampling_in_steps_is_that_of_diffusers(method, prediction):
    diffusers = peer("diffusers")
    schedule, model = NoiseSchedulers.LINEAR(T=100), NNModel(module=Shaped(), params=SQUARED)
    common = {
        "num_train_timesteps": 100, "trained_betas": schedule.betas.numpy(),
        "prediction_type": PREDICTIONS[prediction], "timestep_spacing": "trailing",
    }  # fmt: skip
    if method == "ddim":
        theirs = diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=True, **common)
    else:
        theirs = diffusers.DPMSolverMultistepScheduler(
            algorithm_type="dpmsolver++", solver_order=2, final_sigmas_type="zero", **common
        )
    theirs.set_timesteps(20)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for t in theirs.timesteps:
            given = model.net(x, t.expand(5))
            x = theirs.step(given, t, x).prev_sample
    found = sample_in_steps(
        model, schedule, (5, 3), steps=20, method=method, prediction=prediction,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-4)


def test_ddpm_and_the_rescaled_schedule_are_those_of_diffusers():
    diffusers = peer("diffusers")
    from diffusers.schedulers.scheduling_ddim import rescale_zero_terminal_snr

    schedule, model = NoiseSchedulers.LINEAR(T=30), NNModel(module=Shaped(), params=SQUARED)
    theirs = diffusers.DDPMScheduler(
        num_train_timesteps=30, trained_betas=schedule.betas.numpy(), clip_sample=False,
        variance_type="fixed_small",
    )  # fmt: skip
    theirs.set_timesteps(30)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 3, generator=generator)
    with torch.no_grad():
        for t in theirs.timesteps:
            x = theirs.step(model.net(x, t.expand(5)), t, x, generator=generator).prev_sample
    found = nnx.sample(model, schedule, (5, 3), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-4)
    rescaled = rescale_zero_terminal_snr(schedule.betas)
    torch.testing.assert_close(zero_terminal_snr(schedule).betas, rescaled, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixing_is_timm_s_given_its_numbers(smoothing, monkeypatch):
    mixup = peer("timm.data.mixup")
    from timm.loss import SoftTargetCrossEntropy

    model, x, y = image_model(), numbers(4, 6, 3, 8, 8), torch.arange(6) % 3
    for cuts, lam in ((False, 0.7), (True, 0.6), (True, 0.05)):
        theirs = mixup.Mixup(
            1.0, 1.0, prob=1.0, mode="batch", label_smoothing=smoothing, num_classes=3
        )
        centre = iter((3, 6))
        monkeypatch.setattr(theirs, "_params_per_batch", lambda lam=lam, cuts=cuts: (lam, cuts))
        monkeypatch.setattr(np.random, "randint", lambda *a, size=None, c=centre: next(c))
        mixed, target = theirs(x.clone(), y)
        wanted = SoftTargetCrossEntropy()(model.net(mixed), target)
        objective = MixingObjective(mixup_alpha=1.0, cutmix_alpha=1.0, label_smoothing=smoothing)
        told = Told(lam, list(range(5, -1, -1)), centres=[3, 6], choice=0.0 if cuts else 1.0)
        monkeypatch.setattr(objective, "_draws", lambda generator, told=told: told)
        found = objective(ObjectiveContext(model, (x, y), 0, 0)).loss()
        assert found == pytest.approx(float(wanted.detach()), rel=1e-5)


@pytest.mark.parametrize("kind", ["MixUp", "CutMix"])
def test_mixing_is_torchvision_s_given_its_numbers(kind):
    transforms = peer("torchvision.transforms.v2")
    model, x, y = image_model(), numbers(4, 6, 3, 8, 8), torch.arange(6) % 3
    # Boxes of an odd side are a pixel smaller there.
    for lam, centre in itertools.product((0.0, 0.3, 0.75, 0.9375, 1.0), ((0, 0), (4, 7), (6, 2))):
        theirs = getattr(transforms, kind)(num_classes=3)
        theirs._dist = SimpleNamespace(sample=lambda shape, lam=lam: torch.tensor(lam))
        size = iter((centre[1], centre[0]))  # columns first
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randint", lambda *a, s=size, **k: torch.tensor([next(s)]))
            mixed, target = theirs(x, y)
        wanted = torch.nn.functional.cross_entropy(model.net(mixed), target)
        objective = MixingObjective(**{f"{kind.lower()}_alpha": 1.0})
        told = Told(lam, [5, 0, 1, 2, 3, 4], centres=list(centre))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(objective, "_draws", lambda generator, told=told: told)
            found = objective(ObjectiveContext(model, (x, y), 0, 0)).loss()
        assert found == pytest.approx(float(wanted.detach()), rel=1e-5)


def test_nt_xent_is_that_of_other_libraries():
    z1, z2 = numbers(1, 9, 5), numbers(2, 9, 5)
    wanted = nnx.nt_xent_loss(z1, z2, temperature=0.3)
    losses = peer("pytorch_metric_learning.losses")
    found = losses.NTXentLoss(temperature=0.3)(torch.cat((z1, z2)), torch.arange(9).repeat(2))
    torch.testing.assert_close(found, wanted)
    lightly = peer("lightly.loss")
    torch.testing.assert_close(lightly.NTXentLoss(temperature=0.3)(z1, z2), wanted)


def test_vicreg_and_dino_are_lightly_s():
    lightly = peer("lightly.loss")
    model = feed_forward(out=8, dropout=0.0)
    views = (numbers(1, 9, 6), numbers(2, 9, 6))
    (term,) = vicreg_objective()(ObjectiveContext(model, views, 0, 0)).terms
    z1, z2 = (model.net(view) for view in views)
    wanted = lightly.VICRegLoss(lambda_param=25, mu_param=25, nu_param=1)(z1, z2)
    assert term.value == pytest.approx(float(wanted.detach()), rel=1e-4)
    model, _ = self_distilled("dino")
    objective = dino_objective(nnx.build_target_encoder(model.net), student_temperature=0.1)
    (term,) = objective(ObjectiveContext(model, (*views, numbers(3, 9, 6)), 0, 0)).terms
    dino = lightly.DINOLoss(output_dim=8, warmup_teacher_temp_epochs=0, teacher_temp=0.04)
    students = [model.net(view) for view in (*views, numbers(3, 9, 6))]
    wanted = dino([s.detach() for s in students[:2]], students, epoch=1)
    assert term.value == pytest.approx(float(wanted.detach()), rel=1e-4)


def test_the_encoder_is_timm_s_with_the_same_weights():
    layers = peer("timm.layers")
    from timm.models.vision_transformer import VisionTransformer

    ours = ViTNN(image_size=16, patch_size=4, d_model=16, n_layers=2, n_heads=2)
    width = ours.blocks[0].ffn.w1.out_features
    theirs = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, mlp_ratio=width / 16,
        qkv_bias=False, proj_bias=True, norm_layer=layers.RmsNorm, mlp_layer=layers.SwiGLU,
        num_classes=0, global_pool="", act_layer=torch.nn.SiLU,
    )  # fmt: skip
    state = {name: torch.zeros_like(v) if "bias" in name else v.clone()
             for name, v in theirs.state_dict().items()}  # fmt: skip
    own = ours.state_dict()
    names = {"attn.qkv": "attn.w_qkv", "attn.proj": "attn.w_o", "mlp.fc1_g": "ffn.w1",
             "mlp.fc1_x": "ffn.w3", "mlp.fc2": "ffn.w2", "norm1": "norm1", "norm2": "norm2"}  # fmt: skip
    for block in range(2):
        for name, mine in names.items():
            state[f"blocks.{block}.{name}.weight"] = own[f"blocks.{block}.{mine}.weight"]
    state["cls_token"], state["pos_embed"] = own["cls_token"], own["pos_embed"]
    state["norm.weight"] = own["norm_out.weight"]
    for kind in ("weight", "bias"):
        state[f"patch_embed.proj.{kind}"] = own[f"patch_embed.{kind}"]
    theirs.load_state_dict(state)
    images = numbers(1, 2, 3, 16, 16)
    torch.testing.assert_close(ours.eval()(images), theirs.eval().forward_features(images))
