"""Parameter-efficient fine-tuning: small trainable parts on a frozen model.

Every adapter is exact when it is inserted (the adapted model computes what the
base computed), takes dtype, device and mode from the layer it adapts, and
leaves the base's tensors alone while it trains.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "adapters": ["AdapterLayer"],
        "dora": ["DoRALinear", "apply_dora_to"],
        "huggingface": ["load_peft_adapter", "save_peft_adapter"],
        "ia3": ["IA3Linear", "apply_ia3_to", "load_ia3_weights", "save_ia3_weights"],
        "lora": ["LoRALinear", "apply_lora_to", "load_lora_weights", "save_lora_weights"],
        "lora_conv": ["LoRAConv2d"],
        "lora_embedding": ["LoRAEmbedding"],
        "lora_plus": ["lora_plus_groups", "lora_plus_specs"],
        "merging": ["merge_adapters", "unmerge_adapters"],
        "named": [
            "adapter_names",
            "add_adapter",
            "combine_adapters",
            "delete_adapter",
            "disabled_adapters",
            "set_adapter",
        ],
        "prefix": ["PrefixTuner", "load_prefix_weights", "save_prefix_weights"],
        "prompt": ["PromptTuner", "load_prompt_weights", "save_prompt_weights"],
    },
)
