"""`Engine`: one rank's share of the policy, its optimizer and its reference, on DeepSpeed ZeRO.

Imports torch and deepspeed: only the rank processes do so (`worker`).
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from posttrain_core.config import DeepSpeedLearnerConfig
from posttrain_core.errors import LearnerFault
from posttrain_core.learner.collate import Batch
from posttrain_core.learner.model import Rank, forward, longest_shared_row

TAG = "state"
POSITION_FILE = "position.json"


class Engine:
    """`num_steps` counts the optimizer's steps since its state was fresh."""

    def __init__(self, model: Any, config: DeepSpeedLearnerConfig, dtype: str, rank: Rank) -> None:
        self.rank, self._config, self._dtype = rank, config, dtype
        self.num_steps = 0
        self.longest_shared_row = longest_shared_row(model.config)
        model.train()
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._grad_norm: Tensor | None = None
        if _clips_itself(config, dtype):
            optimizer.register_step_pre_hook(self._clip)
        self._engine: Any = deepspeed.initialize(
            model=model, optimizer=optimizer, config=_deepspeed_config(config, dtype), dist_init_required=False
        )[0]

    def forward(self, batch: Batch) -> Tensor:
        return forward(self._engine, batch, self.rank.device)

    def backward(self, loss: Tensor) -> None:
        """`loss` is this rank's part of a sum over ranks; DeepSpeed averages, hence the factor."""
        self._engine.backward(loss * self.rank.world_size)

    def step(self, learning_rate: float, weight_decay: float) -> float:
        """Apply the accumulated gradients; returns their norm before clipping."""
        for group in self._engine.optimizer.param_groups:
            group["lr"], group["weight_decay"] = learning_rate, weight_decay
        self._engine.step()
        self.num_steps += 1
        norm = self._engine.get_global_grad_norm() if self._grad_norm is None else self._grad_norm
        return float(norm)

    def save_checkpoint(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag=TAG)
        if self.rank.number == 0:
            position = {"num_steps": self.num_steps, **self._shape()}
            (folder / POSITION_FILE).write_text(json.dumps(position, sort_keys=True))
        dist.barrier()

    def load_checkpoint(self, folder: Path) -> None:
        """Raises LearnerFault when there is no checkpoint, or one of another shape."""
        position = read_position(folder)
        for name, value in self._shape().items():
            if position[name] != value:
                raise LearnerFault(
                    f"the checkpoint {folder} was written with {name} {position[name]}, this learner has {value}: "
                    f"set learner.{name} back, or fork the run from a published policy"
                )
        if self._engine.load_checkpoint(str(folder), tag=TAG)[0] is None:
            raise LearnerFault(f"DeepSpeed finds no state in the checkpoint {folder}")
        self.num_steps = position["num_steps"]

    def state_dict(self) -> dict[str, Tensor]:
        """All weights on the CPU, tied ones once; under ZeRO 3 only rank 0 gets them (all ranks must call)."""
        module = self._engine.module
        if self._config.zero_stage == 3:
            gathered = self._engine._zero3_consolidated_16bit_state_dict()
        else:
            gathered = module.state_dict()
        tied = set(module.all_tied_weights_keys)
        return {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in sorted((gathered or {}).items())
            if name not in tied
        }

    def export(self, path: Path) -> None:
        state = self.state_dict()
        if self.rank.number == 0:
            save_file(state, path, metadata={"format": "pt"})
        dist.barrier()

    def close(self) -> None:
        self._engine.destroy()

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self._config.max_grad_norm)

    def _shape(self) -> dict[str, int]:
        return {"num_ranks": self.rank.world_size, "zero_stage": self._config.zero_stage}


def read_position(folder: Path) -> Mapping[str, Any]:
    try:
        position: Mapping[str, Any] = json.loads((folder / POSITION_FILE).read_text())
    except (OSError, ValueError) as error:
        raise LearnerFault(f"no learner checkpoint in {folder}: {error}") from error
    return position


def init_distributed(rendezvous: Path, threads: int) -> Rank:
    """Join the group of ranks through a file that only this group knows; deterministic algorithms from here on."""
    number, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # A debugging aid that would fill ZeRO's buckets at every step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", number) if on_gpu else torch.device("cpu")
    if on_gpu:
        if world_size > torch.cuda.device_count():
            raise LearnerFault(f"learner.num_ranks is {world_size}, this machine has {torch.cuda.device_count()} GPUs")
        torch.cuda.set_device(device)
    store = dist.FileStore(str(rendezvous), world_size)  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=number, world_size=world_size)
    # Otherwise DeepSpeed compiles this extension with the local C++ compiler, for a minute, where there is one.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    return Rank(number, world_size, device)


def _clips_itself(config: DeepSpeedLearnerConfig, dtype: str) -> bool:
    """Without ZeRO and with float32, DeepSpeed clips gradients but does not tell their norm."""
    return config.zero_stage == 0 and dtype == "float32"


def _deepspeed_config(config: DeepSpeedLearnerConfig, dtype: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # `Engine.step` is the boundary, however many micro-batches there were
        "gradient_clipping": 0.0 if _clips_itself(config, dtype) else config.max_grad_norm,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": 50_000_000,  # the default holds gigabytes per rank
            "allgather_bucket_size": 50_000_000,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "steps_per_print": 1_000_000_000,
    }
