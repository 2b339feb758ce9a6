"""Recipes: what they change, what they record, what they refuse."""

from __future__ import annotations

import copy
import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nnx import Activations, FeedFwdNN, Losses, Nets, NNCheckpointTransform, NNModelParams, NNParams
from nnx.models import RuntimeModule, check_topology, state_topology
from nnx.peft import LoRALinear
from nnx.plugins.manager import registry
from nnx.surgery import low_rank_factorize
from nnx.transforms import (
    RecipeError,
    TransformOp,
    TransformRecipe,
    check_optimizer,
    lora,
    low_rank,
)
from torch import nn

PARAMS = NNParams(
    input_dim=6, output_dim=3, hidden_dims=[8, 7], dropout_prob=0.0, activation=Activations.RELU
)


def model(params=PARAMS):
    """What a recipe uses of an NNModel: net, descriptor, record."""
    torch.manual_seed(0)
    net = FeedFwdNN(params)
    return SimpleNamespace(
        net=net,
        params=NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY),
        transforms=(),
        recorded_topology=state_topology(net),
    )


def snapshot(m):
    return (
        m.net,
        [(n, id(x)) for n, x in m.net.named_modules()],
        [(n, id(p), p.requires_grad) for n, p in m.net.named_parameters()],
        m.transforms,
        m.recorded_topology,
        torch.get_rng_state().tolist(),
    )


BOTH = (lora("layers.0", r=2, alpha=4.0), low_rank("layers.1", rank=3))


class TestOperations:
    def test_an_operation_is_data_and_round_trips(self):
        op = lora("layers.0", "layers.1", r=4, alpha=8, dropout=0.1)
        assert op.state() == {
            "id": "lora",
            "version": 1,
            "targets": ["layers.0", "layers.1"],
            "config": {"r": 4, "alpha": 8.0, "dropout": 0.1},
        }
        record = op.checkpoint_transform()
        assert record == NNCheckpointTransform(
            name="lora",
            version=1,
            options={"targets": ["layers.0", "layers.1"], **op.state()["config"]},
        )
        again = TransformOp.from_checkpoint_transform(
            NNCheckpointTransform.from_state(json.loads(json.dumps(record.state())))
        )
        assert again == op
        with pytest.raises(ValueError, match="config cannot hold 'targets'"):
            TransformOp(id="acme.x", targets=("a",), config={"targets": ["b"]})
        assert hash(again) == hash(op)
        assert low_rank("a", rank=2).state()["config"] == {"rank": 2, "method": "svd"}

    def test_an_integer_and_a_float_scale_are_the_same_operation(self):
        assert lora("a", alpha=16) == lora("a", alpha=16.0)

    def test_numpy_numbers_are_recorded_as_plain_ones(self):
        op = lora("a", r=np.int64(4), alpha=np.float32(2.0), dropout=np.float64(0.5))
        assert op == lora("a", r=4, alpha=2.0, dropout=0.5)
        types = {k: type(v) for k, v in op.state()["config"].items()}
        assert types == {"r": int, "alpha": float, "dropout": float}
        assert low_rank("a", rank=np.int32(3)) == low_rank("a", rank=3)

    def test_the_config_is_read_only(self):
        op = lora("a")
        with pytest.raises(TypeError):
            op.config["r"] = 9

    @pytest.mark.parametrize(
        ("build", "message"),
        [
            (lambda: lora(), "must name submodules"),
            (lambda: lora("a", r=0), "r must be an integer"),
            (lambda: low_rank("a", rank=0), "rank must be an integer >= 1"),
            (lambda: low_rank("a", rank=1, method="fisher"), "method must be 'svd'"),
            (lambda: TransformOp(id="", targets=("a",)), "id must be a non-empty string"),
            (lambda: TransformOp(id="x", targets="abc"), "names in a tuple"),
            (lambda: TransformOp(id="x", targets=("a",), version=0), "version must be"),
            (lambda: TransformRecipe(operations=()), "at least one"),
            (lambda: TransformRecipe(operations=("a",)), "must be TransformOps"),
            (
                lambda: TransformRecipe(operations=BOTH, materialization="lazy"),
                "'fresh' or 'in_place'",
            ),
        ],
    )
    def test_what_cannot_be_an_operation_is_refused_at_construction(self, build, message):
        with pytest.raises(ValueError, match=message):
            build()

    def test_a_record_of_another_kind_is_no_operation(self):
        with pytest.raises(ValueError, match="no recipe operation"):
            TransformOp.from_checkpoint_transform(NNCheckpointTransform(name="x", options={"a": 1}))


class TestMaterialize:
    def test_in_place_changes_the_model_and_records_the_operations(self):
        m = model()
        x = torch.randn(4, 6)
        net, exact = m.net, m.net(x)
        recipe = TransformRecipe((lora("layers.0", r=2), low_rank("layers.1", rank=7)))
        assert recipe.materialize(m) is m
        assert m.net is net
        assert isinstance(net.layers[0], LoRALinear)
        assert isinstance(net.layers[1], nn.Sequential)
        assert m.transforms == recipe.checkpoint_transforms()
        torch.testing.assert_close(net(x), exact, atol=1e-5, rtol=1e-5)
        check_topology(m)

    def test_fresh_leaves_the_given_model_alone(self):
        m = model()
        before = snapshot(m)
        fresh = TransformRecipe(BOTH, materialization="fresh").materialize(m)
        assert snapshot(m)[:-1] == before[:-1]
        assert fresh is not m
        assert fresh.net is not m.net
        assert len(fresh.transforms) == 2
        assert not {id(p) for p in fresh.net.parameters()} & {id(p) for p in m.net.parameters()}
        check_topology(fresh)
        check_topology(m)

    def test_the_factors_are_those_of_the_svd(self):
        m = model()
        expected = low_rank_factorize(m.net.layers[1], rank=3)
        TransformRecipe((low_rank("layers.1", rank=3),)).materialize(m)
        for key, value in expected.state_dict().items():
            assert torch.equal(m.net.layers[1].state_dict()[key], value)

    def test_operations_apply_in_order_and_may_build_on_each_other(self):
        m = model()
        TransformRecipe((low_rank("layers.1", rank=3), lora("layers.1.0", r=2))).materialize(m)
        assert isinstance(m.net.layers[1][0], LoRALinear)
        TransformRecipe((lora("layers.0", r=2),)).materialize(m)
        assert [t.name for t in m.transforms] == ["low_rank", "lora", "lora"]
        check_topology(m)

    def test_a_failure_half_way_undoes_everything(self, monkeypatch):
        m = model()
        before = snapshot(m)
        operation = registry("transform").resolve("low_rank")

        def fail(net, options):
            raise RuntimeError("svd did not converge")

        monkeypatch.setattr(operation, "materialize", fail, raising=False)
        with pytest.raises(RuntimeError, match="converge"):
            TransformRecipe(BOTH).materialize(m)
        assert snapshot(m)[:-1] == before[:-1]


class TestReplay:
    def replay(self, net, transforms):
        for t in transforms:
            net = registry("transform").resolve(t.name, t.version)(net, t.options)
        return net

    def test_replay_rebuilds_the_topology_and_takes_the_weights(self, monkeypatch):
        m = model()
        TransformRecipe((*BOTH, lora("layers.1.1", r=1, dropout=0.3))).materialize(m)
        x = torch.randn(4, 6)

        def no_svd(*_, **__):
            raise AssertionError("replay ran an SVD")

        monkeypatch.setattr(torch.linalg, "svd", no_svd)
        fresh = FeedFwdNN(PARAMS)
        state = torch.get_rng_state()
        fresh = self.replay(fresh, m.transforms)
        assert torch.equal(torch.get_rng_state(), state)
        assert state_topology(fresh) == state_topology(m.net)
        assert repr(fresh) == repr(m.net)
        fresh.load_state_dict(m.net.state_dict())
        assert torch.equal(fresh.eval()(x), m.net.eval()(x))
        assert [p.requires_grad for p in fresh.parameters()] == [
            p.requires_grad for p in m.net.parameters()
        ]

    def test_replay_works_on_a_meta_skeleton(self):
        with torch.device("meta"):
            skeleton = FeedFwdNN(PARAMS)
        skeleton = self.replay(skeleton, TransformRecipe(BOTH).checkpoint_transforms())
        assert {p.device.type for p in skeleton.parameters()} == {"meta"}

    def test_a_base_that_does_not_fit_is_refused_unchanged(self):
        net = FeedFwdNN(PARAMS)
        before = repr(net)
        (record,) = TransformRecipe((lora("layers.0", "layers.9"),)).checkpoint_transforms()
        with pytest.raises(ValueError, match=r"'layers\.9': the net has no such submodule"):
            self.replay(net, [record])
        assert repr(net) == before
        assert all(p.requires_grad for p in net.parameters())

    def test_an_unknown_operation_names_what_exists(self):
        with pytest.raises(LookupError, match=r"lora@v7.*registered versions"):
            registry("transform").resolve("lora", 7)


class TestRefusals:
    @pytest.mark.parametrize(
        ("operations", "message"),
        [
            ((lora("layers.9"),), "operation 0: 'layers.9': the net has no such submodule"),
            ((lora("layers"),), "'layers': it is a ModuleList, not a Linear"),
            ((lora("layers.*"),), "no such submodule"),
            ((lora("layers.0", "layers.0"),), "operation 0: 'layers.0': it is named twice"),
            ((lora("layers.0", modules_to_save=["haed"]),), "modules_to_save: 'haed' matches no"),
            (
                (lora("layers.0", modules_to_save=["layers"]),),
                "which is adapted or holds an adapted",
            ),
            ((lora("layers.0"), lora("layers.0")), "operation 1: 'layers.0': it is a LoRALinear"),
            ((lora("layers.0"), lora("layers.0.base")), "it is the base of a wrapper already"),
            ((low_rank("layers.0", rank=7),), "rank must be an integer >= 1 and <= 6"),
            (
                (TransformOp(id="nnx.dora", targets=("a",)),),
                "no transform is registered as nnx.dora",
            ),
            ((TransformOp(id="lora", targets=("a",), version=3),), "registered versions"),
            (
                (TransformOp(id="lora", targets=("layers.0",), config={"r": 2}),),
                "its config must hold",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused_and_nothing_changes(self, operations, message):
        m = model()
        before = snapshot(m)
        for act in (TransformRecipe(operations).validate, TransformRecipe(operations).materialize):
            with pytest.raises(RecipeError, match=message):
                act(m)
        assert snapshot(m) == before

    def test_every_problem_is_named_at_once(self):
        m = model()
        with pytest.raises(RecipeError) as error:
            TransformRecipe((lora("layers.7", "layers.8"),)).validate(m)
        assert [p.target for p in error.value.problems] == ["layers.7", "layers.8"]
        assert {p.operation for p in error.value.problems} == {0}
        assert isinstance(error.value, ValueError)
        again = pickle.loads(pickle.dumps(error.value))
        assert str(again) == str(error.value)

    def test_validating_changes_nothing_and_draws_nothing(self):
        m = model()
        before = snapshot(m)
        TransformRecipe(BOTH).validate(m)
        assert snapshot(m) == before

    def test_unrecorded_surgery_is_refused(self):
        m = model()
        m.net.layers[0] = LoRALinear(m.net.layers[0])
        with pytest.raises(RecipeError, match="without a record"):
            TransformRecipe((lora("layers.1"),)).materialize(m)

    def test_a_runtime_only_module_is_refused(self):
        m = model()
        m.params = NNModelParams(net=RuntimeModule.of(m.net))
        with pytest.raises(RecipeError, match="runtime-only module"):
            TransformRecipe(BOTH).materialize(m)

    def test_aliases_and_layers_their_parent_reads_are_refused(self):
        net = nn.Module()
        net.a = net.b = nn.Linear(2, 2)
        net.attention = nn.MultiheadAttention(4, 1)
        problems = registry("transform").resolve("lora").problems
        config = {"r": 2, "alpha": 1.0, "dropout": 0.0}
        found = dict(problems(net, {"targets": ["a", "attention.out_proj"], **config}))
        assert "registered as 'a', 'b'" in found["a"]
        assert "read directly" in found["attention.out_proj"]

    def test_one_layer_named_by_two_paths_is_refused(self):
        block = nn.Sequential(nn.Linear(2, 2))
        net = nn.ModuleDict({"x": block, "y": block})
        config = {"r": 2, "alpha": 1.0, "dropout": 0.0}
        found = (
            registry("transform")
            .resolve("lora")
            .problems(net, {"targets": ["x.0", "y.0"], **config})
        )
        assert found == [("y.0", "it is the same layer as 'x.0', named twice")]


class TestOptimizers:
    def test_an_optimizer_built_before_an_in_place_change_is_refused(self):
        m = model()
        optimizer = torch.optim.SGD(m.net.parameters(), lr=0.1)
        before = snapshot(m)
        with pytest.raises(RecipeError, match=r"optimizer 0 \(SGD\) was built over this net"):
            TransformRecipe(BOTH).materialize(m, optimizers=[optimizer])
        assert snapshot(m) == before
        TransformRecipe(BOTH, materialization="fresh").materialize(m, optimizers=[optimizer])

    def test_an_optimizer_of_another_net_does_not_matter(self):
        other = torch.optim.SGD(model().net.parameters(), lr=0.1)
        m = model()
        TransformRecipe(BOTH).materialize(m, optimizers=[other])
        assert m.transforms

    def test_check_optimizer_compares_with_the_present_parameters(self):
        m = model()
        stale = torch.optim.SGD(m.net.parameters(), lr=0.1)
        check_optimizer(m, stale)
        TransformRecipe(BOTH).materialize(m)
        with pytest.raises(RecipeError) as error:
            check_optimizer(m, stale)
        assert "holds 2 tensors that the net does not have" in str(error.value)
        assert "layers.0.lora_A" in str(error.value)
        check_optimizer(
            m, torch.optim.SGD([p for p in m.net.parameters() if p.requires_grad], lr=0.1)
        )
        check_optimizer(m, torch.optim.SGD(m.net.parameters(), lr=0.1))

    def test_a_part_of_the_parameters_or_more_than_them_is_fine(self):
        m = model()
        own = nn.Parameter(torch.zeros(2))
        head = torch.optim.SGD(m.net.layers[2].parameters(), lr=0.1)
        TransformRecipe(BOTH).materialize(m)
        check_optimizer(m, head)
        check_optimizer(m, torch.optim.SGD([m.net.layers[0].lora_A], lr=0.1))
        check_optimizer(m, torch.optim.SGD([own, *m.net.parameters()], lr=0.1))
        check_optimizer(m, torch.optim.SGD([own], lr=0.1))

    def test_one_over_the_frozen_base_alone_is_stale(self):
        m = model()
        base = torch.optim.SGD(m.net.layers[0].parameters(), lr=0.1)
        TransformRecipe((lora("layers.0", r=2),)).materialize(m)
        with pytest.raises(
            RecipeError, match=r"2 tensors that the recipe froze, and none .*lora_A"
        ):
            check_optimizer(m, base)

    def test_one_of_the_model_that_a_fresh_one_was_made_from_is_stale_there(self):
        m = model()
        optimizer = torch.optim.SGD(m.net.parameters(), lr=0.1)
        fresh = TransformRecipe(BOTH, "fresh").materialize(m)
        check_optimizer(m, optimizer)
        with pytest.raises(RecipeError, match="holds 6 tensors that the net does not have"):
            check_optimizer(fresh, optimizer)


class TestFresh:
    RECIPE = TransformRecipe((lora("layers.0", r=2),), "fresh")

    def test_it_builds_the_base_from_the_descriptor_and_gives_it_the_weights(self):
        m = model()
        m.net.note = "mine"
        m.net.layers[1].requires_grad_(False)
        m.net.layers[0].eval()
        x = torch.randn(4, 6)
        state = torch.get_rng_state()
        fresh = self.RECIPE.materialize(m)
        assert not hasattr(fresh.net, "note")
        assert torch.equal(fresh.net(x), m.net(x))
        assert not any(p.requires_grad for p in fresh.net.layers[1].parameters())
        assert [m.training for m in fresh.net.layers] == [False, True, True]
        with torch.random.fork_rng():
            torch.set_rng_state(state)
            expected = LoRALinear(nn.Linear(6, 8).requires_grad_(False), r=2)
        assert expected.lora_A.shape == fresh.net.layers[0].lora_A.shape

    def test_dtype_and_an_earlier_recipe_are_kept(self):
        m = model()
        TransformRecipe((low_rank("layers.1", rank=3),)).materialize(m)
        m.net.to(torch.bfloat16)
        fresh = self.RECIPE.materialize(m)
        assert [t.name for t in fresh.transforms] == ["low_rank", "lora"]
        assert {p.dtype for p in fresh.net.parameters()} == {torch.bfloat16}
        x = torch.randn(4, 6, dtype=torch.bfloat16)
        assert torch.equal(fresh.net(x), m.net(x))

    def test_a_net_with_more_than_its_descriptor_builds_is_refused(self):
        m = model()
        m.net.probe = nn.Linear(2, 2)
        with pytest.raises(RecipeError, match="probe.weight is only in the checkpoint.*in_place"):
            self.RECIPE.materialize(m)


class TestFreezing:
    def test_a_recipe_freezes_the_base_and_names_what_travels(self):
        op = lora("layers.0", r=2, freeze_base=True, modules_to_save=["layers.2"])
        assert op.checkpoint_transform().state()["options"] == {
            "targets": ["layers.0"], "r": 2, "alpha": 16.0, "dropout": 0.0,
            "freeze_base": True, "modules_to_save": ["layers.2"],
        }  # fmt: skip
        m = model()
        TransformRecipe((op,)).materialize(m)
        expected = {"layers.0.lora_A", "layers.0.lora_B", "layers.2.weight", "layers.2.bias"}
        training = lambda net: {n for n, p in net.named_parameters() if p.requires_grad}  # noqa: E731
        assert training(m.net) == expected
        replayed = registry("transform").resolve("lora")(
            FeedFwdNN(PARAMS), op.checkpoint_transform().options
        )
        assert training(replayed) == expected

    def test_without_them_the_record_is_what_it_was(self):
        assert set(lora("a").config) == {"r", "alpha", "dropout"}
        with pytest.raises(TypeError, match="names in a list, not the string 'head'"):
            lora("a", modules_to_save="head")


def test_a_wrapper_changed_after_it_was_recorded_is_refused():
    m = model()
    TransformRecipe((lora("layers.0", r=2, alpha=4.0, dropout=0.1),)).materialize(m)
    layer = m.net.layers[0]
    for name, value in (("alpha", 8.0), ("rslora", True)):
        before = getattr(layer, name)
        setattr(layer, name, value)
        with pytest.raises(
            ValueError, match=f"'layers.0': its {name} is {value}, and {before} was"
        ):
            check_topology(m)
        setattr(layer, name, before)
    layer.lora_dropout.p = 0.5
    with pytest.raises(ValueError, match=r"its dropout is 0\.5, and 0\.1 was recorded"):
        check_topology(m)


def test_a_submodule_that_the_base_does_not_build_is_refused():
    m = model()
    m.net.probe = nn.Linear(2, 2)
    before = snapshot(m)
    with pytest.raises(RecipeError) as error:
        TransformRecipe((lora("layers.0"), lora("probe"))).materialize(m)
    [problem] = error.value.problems
    assert (problem.operation, problem.target) == (1, "probe")
    assert "'probe' was attached to the net, whose base does not build it" in problem.message
    assert snapshot(m) == before


def test_deepcopied_models_keep_their_record():
    m = model()
    TransformRecipe(BOTH).materialize(m)
    twin = copy.deepcopy(m)
    check_topology(twin)
    assert twin.transforms == m.transforms
