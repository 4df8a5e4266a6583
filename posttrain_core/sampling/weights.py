"""Weights of a policy folder: read, compared with a model's, copied into it in place."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

SHOWN_NAMES = 5


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder's safetensors files, by name. Raises OSError or SafetensorError."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}")
    weights = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            weights.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 (not a mapping)
    return weights


def shapes(weights: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor by name."""
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def mismatches(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> list[str]:
    """What keeps `weights` from being copied into `model`; empty when they fit.

    Names that share one tensor (tied weights) need only one of them.
    """
    held = model.state_dict()
    found_storage = {held[name].data_ptr() for name in weights if name in held}
    problems = [f"{name}: not in the model" for name in sorted(weights) if name not in held]
    for name, tensor in held.items():
        if name not in weights:
            if tensor.data_ptr() not in found_storage:
                problems.append(f"{name}: missing")
        elif weights[name].shape != tensor.shape:
            problems.append(f"{name}: shape {tuple(weights[name].shape)}, the model has {tuple(tensor.shape)}")
    return problems


def copy_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Overwrites the model's weights; `mismatches` must be empty."""
    held = model.state_dict()
    with torch.no_grad():
        for name, tensor in weights.items():
            held[name].copy_(tensor)


def summary(problems: list[str]) -> str:
    """The first few of them, and how many more there are."""
    shown = "; ".join(problems[:SHOWN_NAMES])
    more = len(problems) - SHOWN_NAMES
    return shown + (f"; and {more} more" if more > 0 else "")
