"""The policy as torch sees it, whoever trains it: loading, and one lean forward pass. Knows no DeepSpeed.

Imports torch and transformers: only the rank processes do so (`worker`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_utils  # noqa: F401  (loaded lazily otherwise: seconds, when somebody waits)
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain_core.errors import LearnerFault
from posttrain_core.learner.collate import Batch
from posttrain_core.learner.losses import log_distribution

# Attention over a row is quadratic in its length: beyond this, repeating a prompt is cheaper than sharing it.
LONGEST_SHARED_ROW = 512


@dataclass(frozen=True)
class Rank:
    number: int
    world_size: int
    device: torch.device


def forward(model: Any, batch: Batch, device: torch.device) -> Tensor:
    """Log-probabilities of all words at the batch's learned tokens (M x V), for any causal LM.

    Logits are made only from the first column that predicts something.
    """
    arguments: dict[str, Tensor] = {"input_ids": torch.from_numpy(batch.input_ids).to(device)}
    if batch.visible is not None:
        arguments["attention_mask"] = torch.from_numpy(batch.visible).unsqueeze(1).to(device)
        arguments["position_ids"] = torch.from_numpy(batch.position_ids).to(device)
    num_columns = batch.input_ids.shape[1] - batch.first_column
    logits = model(**arguments, use_cache=False, logits_to_keep=num_columns).logits
    row, column = (torch.from_numpy(index).to(device) for index in (batch.row, batch.column - batch.first_column))
    temperature = torch.from_numpy(batch.temperature).float().to(device)
    return log_distribution(logits[row, column], temperature)


def reference_forward(
    folder: Path, dtype: str, device: torch.device, alive: Callable[[], None]
) -> Callable[[Batch], Tensor]:
    """The frozen policy in `folder`; every rank holds all of it. `alive` is called at every sign of life."""
    model = load_model(folder, dtype, device).eval().requires_grad_(False)

    def reference(batch: Batch) -> Tensor:
        alive()
        return forward(model, batch, device)

    return reference


def load_model(folder: Path, dtype: str, device: torch.device) -> Any:
    """The causal LM in `folder`, dropout off (a ratio of two passes must not depend on a coin)."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        for name in [name for name in config.to_dict() if name.endswith(("dropout", "pdrop"))]:
            setattr(config, name, 0.0)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise LearnerFault(f"cannot load a causal LM from {folder}: {error}") from error
    return model.to(device)


def longest_shared_row(config: Any) -> int:
    """0 unless a mask over a row's tokens says all about what a token sees: full attention in every layer."""
    layers = getattr(config, "layer_types", None)
    full = layers is None or set(layers) == {"full_attention"}
    attends = getattr(config, "num_attention_heads", None) is not None
    windowed = getattr(config, "sliding_window", None) is not None
    return LONGEST_SHARED_ROW if full and attends and not windowed else 0
