"""Checkpoints that do not depend on how the learner was laid out: any number of ranks, any ZeRO stage.

Under ZeRO a rank owns *fragments*: ranges of the flattened parameters, with the float32 master weights and the Adam
moments of these elements. Each rank writes its own into one safetensors file, with the name of the parameter and the
first element's place in it; it reads back whatever overlaps with what it owns then, whoever wrote it. So no process
ever holds more of the optimizer's state than its share, and every layout restores every other one bit for bit.
Frozen parameters are not in a checkpoint.

    position.json            num_steps, num_ranks, zero_stage
    rank00000.safetensors    {"weight/NAME", "exp_avg/NAME", "exp_avg_sq/NAME": float32 [numel]}, header {NAME: start}
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from posttrain_core.errors import LearnerFault

POSITION_FILE = "position.json"
WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")  # torch.optim.AdamW's names


@dataclass(frozen=True)
class Position:
    """`num_steps` of the optimizer; the layout is told to the user, nothing depends on it."""

    num_steps: int
    num_ranks: int
    zero_stage: int

    @property
    def layout(self) -> str:
        return f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)} at ZeRO {self.zero_stage}"


@dataclass(frozen=True)
class Fragment:
    """Elements start to start + numel of a flattened parameter: those of `flat` from `offset`, float32. `flat` is what
    the optimizer knows as a parameter."""

    name: str
    start: int
    numel: int
    flat: Tensor
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        return flat.detach().view(-1).narrow(0, self.offset, self.numel)


def fragments(engine: Any, zero_stage: int, rank: int) -> list[Fragment]:
    """What this rank of a DeepSpeed engine owns."""
    names = {parameter: name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    optimizer = engine.optimizer
    if zero_stage == 3:
        return [_of_stage_3(optimizer, names[parameter], parameter, rank) for parameter in names]
    if hasattr(optimizer, "fp16_groups"):  # bfloat16 without ZeRO: a float32 copy of each parameter
        pairs = zip(optimizer.fp16_groups[0], optimizer.fp32_groups[0], strict=True)
        return [Fragment(names[low], 0, low.numel(), master, 0) for low, master in pairs]
    if zero_stage == 0:
        return [Fragment(name, 0, parameter.numel(), parameter, 0) for parameter, name in names.items()]
    flats = getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_groups_flat_partition
    owned = []
    for parameter, name in names.items():
        if (mapping := parameter._hp_mapping) is not None:
            low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
            owned.append(Fragment(name, low.start, low.numel, flats[mapping.param_group_index], high.start))
    return owned


def _of_stage_3(optimizer: Any, name: str, parameter: Any, rank: int) -> Fragment:
    """Every parameter is cut into equal parts, the last ones padded."""
    group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = min(rank * size, parameter.ds_numel)
    return Fragment(
        name, start, min(size, parameter.ds_numel - start), optimizer.fp32_partitioned_groups_flat[group], offset
    )


def save(folder: Path, owned: list[Fragment], state: Mapping[Tensor, Mapping[str, Tensor]], rank: int) -> None:
    """`state` is the optimizer's, empty before its first step."""
    tensors, starts = {}, {}
    for fragment in owned:
        starts[fragment.name] = str(fragment.start)
        tensors[f"{WEIGHT}/{fragment.name}"] = fragment.of(fragment.flat).cpu()
        for moment in MOMENTS if fragment.flat in state else ():
            tensors[f"{moment}/{fragment.name}"] = fragment.of(state[fragment.flat][moment]).cpu()
    save_file(tensors, folder / f"rank{rank:05d}.safetensors", metadata=starts)


def write_position(folder: Path, position: Position) -> None:
    (folder / POSITION_FILE).write_text(json.dumps(vars(position), sort_keys=True))


def read_position(folder: Path) -> Position:
    try:
        return Position(**json.loads((folder / POSITION_FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise LearnerFault(f"no learner checkpoint in {folder}: {error}") from error


class Parts:
    """The files of a checkpoint, read piece by piece. A context manager; raises LearnerFault for what does not fit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.position = read_position(folder)
        self._stack = ExitStack()
        self._pieces: dict[str, list[tuple[int, Any]]] = {}

    def __enter__(self) -> "Parts":
        try:
            for rank in range(self.position.num_ranks):
                path = self._folder / f"rank{rank:05d}.safetensors"
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                for name, start in (file.metadata() or {}).items():
                    self._pieces.setdefault(name, []).append((int(start), file))
        except (OSError, SafetensorError) as error:
            self._stack.close()
            raise LearnerFault(f"the checkpoint {self._folder} is incomplete: {error}") from error
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def fill(self, target: Tensor, kind: str, name: str, start: int) -> None:
        """Copy elements start to start + len(target) of a parameter's `kind` (weight or a moment) into `target` [n]."""
        filled = 0
        for piece_start, file in self._pieces.get(name, []):
            piece = file.get_slice(f"{kind}/{name}")
            low = max(start, piece_start)
            high = min(start + len(target), piece_start + piece.get_shape()[0])
            if low < high:
                target[low - start : high - start].copy_(piece[low - piece_start : high - piece_start])
                filled += high - low
        if filled != len(target):
            raise LearnerFault(f"the checkpoint {self._folder} does not fit this model: {name} is not whole in it")

    def fill_weights(self, model: nn.Module) -> None:
        """All trainable parameters of a model that is not partitioned yet."""
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        if strangers := sorted(self._pieces.keys() - trained):
            raise LearnerFault(f"the checkpoint {self._folder} does not fit this model, which has no {strangers[0]}")
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.fill(parameter.detach().view(-1), WEIGHT, name, 0)

    def fill_optimizer(self, owned: list[Fragment], state: dict[Tensor, dict[str, Tensor]]) -> None:
        """Master weights, and the moments and step count if there had been a step."""
        for fragment in owned:
            self.fill(fragment.of(fragment.flat), WEIGHT, fragment.name, fragment.start)
        for flat in _distinct(owned) if self.position.num_steps else ():
            step = torch.tensor(float(self.position.num_steps), device=flat.device)
            state[flat] = {"step": step, **{moment: torch.zeros_like(flat) for moment in MOMENTS}}
        for fragment in owned if self.position.num_steps else ():
            for moment in MOMENTS:
                self.fill(fragment.of(state[fragment.flat][moment]), moment, fragment.name, fragment.start)


def _distinct(owned: list[Fragment]) -> Iterator[Tensor]:
    """A rank whose share is padding only owns no fragment: then its state stays fresh, and is never read."""
    yield from {id(fragment.flat): fragment.flat for fragment in owned}.values()
