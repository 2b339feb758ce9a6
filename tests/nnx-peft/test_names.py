"""What nnx-peft publishes is found where the names promise it."""

from __future__ import annotations

import inspect
import subprocess
import sys

import nnx
import pytest
from nnx import _peft_plugin
from nnx.plugins import siblings

ROOMS = {
    "nnx.peft": "AdapterLayer DoRALinear IA3Linear LoRALinear PrefixTuner PromptTuner apply_dora_to "
    "apply_ia3_to apply_lora_to load_ia3_weights load_lora_weights load_prefix_weights "
    "load_prompt_weights save_ia3_weights save_lora_weights save_prefix_weights save_prompt_weights",
    "nnx.transforms": "RecipeError TransformOp TransformRecipe check_optimizer lora low_rank",
    "nnx.prune": "magnitude_prune semi_structured_24",
    "nnx.surgery": "deepen drop_layer expand_embedding low_rank_factorize widen",
    "nnx.quantize": "QATLifecycleCallback qat_train_step_factory quantize_int8",
}


@pytest.mark.parametrize(
    ("room", "name"), [(r, n) for r, names in ROOMS.items() for n in names.split()]
)
def test_every_room_holds_its_names(room, name):
    __import__(room)
    assert callable(getattr(sys.modules[room], name))


def test_the_flat_names_are_those_that_core_expects_of_us():
    published = _peft_plugin.nnx_public_names()
    assert set(published) == set(siblings.PUBLIC_NAMES["nnx-peft"])
    for name in published:
        assert getattr(nnx, name).__module__.startswith("nnx.")


def test_importing_a_room_first_by_its_file_hides_no_function():
    script = (
        "import nnx.surgery.widen, nnx.surgery.deepen, nnx.surgery.drop_layer\n"
        "from nnx.surgery import widen, deepen, drop_layer\n"
        "from nnx.surgery.widen import widen as same\n"
        "assert callable(widen) and callable(deepen) and callable(drop_layer) and same is widen\n"
        "from nnx import widen as flat\nassert flat is widen"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_plugin_and_the_rooms_are_light():
    script = "import sys, nnx, nnx.peft, nnx.transforms, nnx.prune, nnx.quantize\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_defaults_are_the_documented_ones():
    def defaults(function):
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}

    low_rank = {"r": 8, "alpha": 16.0, "dropout": 0.0}
    for name in ("LoRALinear", "DoRALinear", "apply_lora_to", "apply_dora_to"):
        assert low_rank.items() <= defaults(getattr(nnx, name)).items(), name
    assert defaults(nnx.PrefixTuner) == {"n_prefix": 10, "n_layers": None}
    assert defaults(nnx.PromptTuner) == {"n_prompt_tokens": 20}
    assert defaults(nnx.widen) == {"rng_seed": 0}
    assert defaults(nnx.low_rank_factorize) == {"method": "svd"}
    assert defaults(nnx.expand_embedding) == {"init": "zeros"}
    assert defaults(nnx.QATLifecycleCallback) == {"qat_config": "8da4w", "groupsize": 32}
    assert defaults(nnx.qat_train_step_factory) == {"base_step": None, "qat_config": "8da4w"}
