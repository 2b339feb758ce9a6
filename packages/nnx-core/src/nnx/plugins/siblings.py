"""What NNx's own distributions provide, so that a missing one can be named.

Only names are kept here: core imports no extension.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from nnx._version import __version__
from nnx.errors import NNxError

CORE = "nnx-core"

# Public names by distribution: what `from nnx import NAME` would find.
PUBLIC_NAMES: dict[str, tuple[str, ...]] = {
    "nnx-peft": (
        "AdapterLayer", "DoRALinear", "IA3Linear", "LoRALinear", "PrefixTuner", "PromptTuner",
        "QATLifecycleCallback", "apply_dora_to", "apply_ia3_to", "apply_lora_to", "deepen",
        "drop_layer", "expand_embedding", "load_ia3_weights", "load_lora_weights",
        "load_prefix_weights", "load_prompt_weights", "low_rank_factorize",
        "qat_train_step_factory", "quantize_int8", "save_ia3_weights", "save_lora_weights",
        "save_prefix_weights", "save_prompt_weights", "widen",
    ),
    "nnx-lm": (
        "CustomStage", "GenerativeNNModel", "LogitsChain", "LogitsChainBuilder",
        "LogitsProcessor", "LogitsStage", "LogitsStageCodec", "NNPreferenceDataset",
        "OrderedLogitsPipeline", "RepetitionPenalty", "TemperatureScaling", "TopKFilter",
        "TopPFilter", "TransformerNN", "apply_chain", "dpo_train_step_factory",
        "register_logits_stage_codec", "registered_logits_stage_codecs", "sample_next_token",
        "text_contrastive_train_step_factory", "train_bpe", "unregister_logits_stage_codec",
    ),
    "nnx-graph": ("GraphAttNN", "GraphConvNN", "GraphNNBase", "GraphSageNN", "NNGraphDataset"),
    "nnx-viz": ("LRFinderResult", "VisUtils", "lr_finder"),
    "nnx-hub": (),
    "nnx-paradigms": (
        "DiffusionMLP", "DiffusionObjective", "FeedFwdMoENN", "JEPAObjective", "JEPAPredictor",
        "JEPATrainStep", "MoELinear", "NoiseSchedule", "NoiseSchedulers", "ViTBlock", "ViTNN",
        "born_again_train", "build_target_encoder", "cutmix_train_step_factory",
        "diffusion_objective", "diffusion_train_step_factory", "feature_kd_train_step_factory",
        "jepa_objective", "jepa_train_step_factory", "kd_train_step_factory",
        "mixup_train_step_factory", "moe_train_step_factory", "nt_xent_loss",
        "random_block_mask", "sample", "simclr_train_step_factory", "update_ema",
    ),
    "nnx-eval": ("ExperimentPlan", "FitResult"),
}  # fmt: skip

# Modules by distribution: what `import nnx.X` would find.
MODULES: dict[str, tuple[str, ...]] = {
    "nnx-peft": ("peft", "transforms", "surgery", "prune", "quantize"),
    "nnx-lm": ("lm", "generation", "lm_tasks", "embeddings", "interop"),
    "nnx-graph": ("graph", "graph_tasks", "link_tasks"),
    "nnx-viz": ("viz", "vis_utils", "lr_finder"),
    "nnx-hub": ("hub",),
    "nnx-paradigms": ("paradigms", "diffusion"),
    "nnx-eval": (
        "calibration", "conformal", "abstention", "decisions", "ranking", "comparison", "plans", "search",
        "benchmarking",
    ),
}  # fmt: skip

# Ids that a sibling registers, by their prefix or whole value.
IDS: dict[str, tuple[str, ...]] = {
    "nnx-peft": ("lora", "low_rank", "torchao_qat"),
    "nnx-lm": ("transformer", "lm."),
    "nnx-graph": (
        "graph",
        "graph_att",
        "graph_conv",
        "graph_sage",
        "nnx.graph_classifier",
        "nnx.hetero_node_classifier",
        "nnx.node_classifier",
        "nnx.link_predictor",
        "nnx.link_ap",
        "nnx.link_auroc",
    ),
    "nnx-viz": ("run.html", "run.svg", "report", "watch"),
    "nnx-hub": ("onnx", "pt2", "safetensors", "hub", "hub.", "export"),
    "nnx-paradigms": ("vit", "feed_fwd_moe", "diffusion.", "paradigms.", "upcycle"),
    "nnx-eval": ("ranking.",),
}


# Reserved: these distributions contribute nothing yet, so installing one would not help.
RESERVED: frozenset[str] = frozenset()


def install_line(distribution: str, extra: str | None = None) -> str:
    """The pip command that brings ``distribution`` (with ``extra``) of this NNx.

    It installs from where nnx-core itself came from: a folder of the repository,
    a version-control address or a folder of wheels. Where that is not known, it
    is the command for a clone of the repository.
    """
    wanted = f"[{extra}]" if extra else ""
    return _from_origin(distribution, wanted) or (
        "pip install "
        + ("" if distribution == CORE else f"./packages/{CORE} ")
        + (f'"./packages/{distribution}{wanted}"' if wanted else f"./packages/{distribution}")
        + " (in a clone of NNx's repository)"
    )


def _from_origin(distribution: str, wanted: str) -> str | None:
    """The command by the record that pip kept of where it found nnx-core (PEP 610)."""
    import json
    from pathlib import Path
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    from importlib_metadata import PackageNotFoundError
    from importlib_metadata import distribution as installed_distribution

    try:
        text = installed_distribution(CORE).read_text("direct_url.json")
        record = json.loads(text or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    url, version_control = record.get("url", ""), record.get("vcs_info")
    if version_control:
        revision = version_control.get("requested_revision") or version_control.get("commit_id")
        address = f"{version_control.get('vcs')}+{url}@{revision}"
        return (
            f'pip install "{distribution}{wanted} @ {address}#subdirectory=packages/{distribution}"'
        )
    if not url.startswith("file:"):
        return None
    place = Path(url2pathname(urlsplit(url).path))
    if "dir_info" in record:
        folder = place.parent / distribution
        flag = "-e " if record["dir_info"].get("editable") else ""
        found = (folder / "pyproject.toml").exists()
        return f'pip install {flag}"{folder}{wanted}"' if found else None
    wheels = sorted(place.parent.glob(f"{distribution.replace('-', '_')}-*.whl"))
    return f'pip install "{wheels[-1]}{wanted}"' if wheels else None


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, else ``None``."""
    from importlib_metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def how_to_get(what: str, distribution: str, extra: str | None = None) -> str:
    """A sentence: how to get ``what``, which ``distribution`` provides and is not there."""
    version = installed(distribution)
    if version is not None:
        return (
            f"{what} belongs to {distribution}, which is installed ({version}) but does not "
            "provide it: its plugin is off or failed (`nnx plugins` shows that), or this "
            "version has nothing of the kind"
        )
    if distribution in RESERVED:
        return (
            f"{what} is kept for {distribution}, which is not installed and provides nothing "
            f"yet in version {__version__} of NNx"
        )
    line = install_line(distribution, extra)
    return f"{what} belongs to {distribution}, which is not installed. Install it with: {line}"


def module(name: str) -> ModuleType:
    """The module ``nnx.NAME``, of core or of an installed sibling.

    ``AttributeError`` when there is none, so that ``hasattr`` is False; it says how
    to get what a sibling would bring.
    """
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"nnx.{name}")
        except MissingPart as error:
            raise AttributeError(str(error)) from None
        except ModuleNotFoundError as error:
            if error.name != f"nnx.{name}":
                raise
    raise AttributeError(f"module 'nnx' has no attribute {name!r}")


class MissingPart(ImportError, NNxError):
    """Something that a sibling provides, and that is not there."""


def missing_part(name: str) -> MissingPart | None:
    """The error for ``name`` of ``nnx`` when a sibling would bring it."""
    for table in (PUBLIC_NAMES, MODULES):
        for distribution, names in table.items():
            if name in names:
                return MissingPart(how_to_get(repr(name), distribution))
    return None


class Finder:
    """The last finder: says of what no other one found how to get it.

    ``import nnx.X`` and ``from nnx import X`` come here. The latter asks for a
    module when ``nnx`` has no such attribute.
    """

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        parent, _, name = fullname.rpartition(".")
        error = missing_part(name) if parent == "nnx" else None
        if error is not None:
            raise error


def hint_for_id(id: str) -> str | None:
    """How to get a registered id that a sibling would provide, or ``None``."""
    for distribution, prefixes in IDS.items():
        if any(id == p or (p.endswith(".") and id.startswith(p)) for p in prefixes):
            return how_to_get(repr(id), distribution)
    return None
