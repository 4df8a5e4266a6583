"""Low-rank adapters on the policy (peft): made from a fixed seed, merged for samplers, written in peft's own format.

`NAME.weight` of an adapted layer becomes `NAME.base_layer.weight`, frozen, beside `NAME.lora_A.default.weight` [r x in]
and `NAME.lora_B.default.weight` [out x r], which alone are trained.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import Linear
from safetensors.torch import save_file
from torch import Tensor

from posttrain_core.config import LoraConfig
from posttrain_core.errors import LearnerFault

PREFIX = "base_model.model."  # peft's, before the names of the policy
SEED = 0


def add_adapters(model: Any, config: LoraConfig) -> Any:
    """The policy with adapters that change nothing yet. LearnerFault when `target_modules` fit no linear layer."""
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        target_modules=list(config.target_modules) or "all-linear",
        task_type=peft.TaskType.CAUSAL_LM,
    )
    try:
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            adapted = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        raise LearnerFault(f"learner.lora.target_modules: {error}") from error
    strangers = [name for name, layer in _adapted(adapted).items() if not isinstance(layer, Linear)]
    if strangers:
        raise LearnerFault(f"learner.lora.target_modules: {strangers[0]} is no linear layer")
    return adapted


def merged(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The policy's own weights with the adapters added in float32, in the dtype of what they are added to."""
    adapters = _adapted(model)
    weights = {}
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        layer = name.partition(".base_layer.")[0]
        if name.endswith(".base_layer.weight"):
            down, up = (state[f"{layer}.lora_{side}.default.weight"].float() for side in "AB")
            change = (up @ down).T if adapters[layer].fan_in_fan_out else up @ down
            tensor = (tensor.float() + adapters[layer].scaling["default"] * change).to(tensor.dtype)
        weights[name.removeprefix(PREFIX).replace(".base_layer.", ".")] = tensor.contiguous()
    return weights


def save_adapter(folder: Path, model: Any, state: Mapping[str, Tensor]) -> None:
    """What `peft.PeftModel.from_pretrained` loads. The same bytes for the same adapter: sorted, and without paths."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name.replace(".default.", "."): tensor for name, tensor in sorted(state.items()) if ".lora_" in name}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = model.peft_config["default"].to_dict() | {"inference_mode": True, "base_model_name_or_path": None}
    text = json.dumps(settings, indent=2, sort_keys=True, default=sorted)  # sets become sorted lists
    (folder / "adapter_config.json").write_text(text + "\n")


def _adapted(model: Any) -> dict[str, Any]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, peft.tuners.lora.LoraLayer)}
