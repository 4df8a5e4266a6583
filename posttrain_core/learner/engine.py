"""`Engine`: one rank's share of the policy, its optimizer and its reference, on DeepSpeed ZeRO.

Imports torch and deepspeed: only the rank processes do so (`worker`).
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from posttrain_core.config import DeepSpeedLearnerConfig
from posttrain_core.errors import LearnerFault
from posttrain_core.learner import checkpoints
from posttrain_core.learner.checkpoints import Parts, Position
from posttrain_core.learner.collate import Batch
from posttrain_core.learner.model import Rank, forward, longest_shared_row


class Engine:
    """`num_steps` counts the optimizer's steps since its state was fresh. `alive` is called at every sign of life.

    `checkpoint`, when given, is what `save_checkpoint` wrote under any layout; `model` then gives what is frozen.
    `note` says so when the layout was another one.
    """

    def __init__(
        self,
        model: Any,
        config: DeepSpeedLearnerConfig,
        dtype: str,
        rank: Rank,
        alive: Callable[[], None],
        checkpoint: Path | None = None,
    ) -> None:
        self.rank, self._config, self._dtype, self._alive = rank, config, dtype, alive
        self.longest_shared_row = longest_shared_row(model.config)
        self._lora: Any = None
        if config.lora is not None:
            from posttrain_core.learner import lora  # peft takes seconds to import

            self._lora = lora
            model = lora.add_adapters(model, config.lora)
        model.train()
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.num_steps, self.note = 0, ""
        if checkpoint is None:
            self._initialize(model)
            return
        with Parts(checkpoint) as parts:
            parts.fill_weights(model)
            self._initialize(model)
            parts.fill_optimizer(self._fragments(), self._engine.basic_optimizer.state)
            self.num_steps = parts.position.num_steps
            self.note = _moved(parts.position, self._position())

    def _initialize(self, model: Any) -> None:
        config = self._config
        optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._grad_norm: Tensor | None = None
        if _clips_itself(config, self._dtype):
            optimizer.register_step_pre_hook(self._clip)
        settings = _deepspeed_config(config, self._dtype, self.rank)
        self._engine: Any = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )[0]

    def forward(self, batch: Batch) -> Tensor:
        self._alive()
        return forward(self._engine, batch, self.rank.device)

    def base_forward(self, batch: Batch) -> Tensor:
        """The policy without its adapters."""
        with self._engine.module.disable_adapter():
            return self.forward(batch)

    def backward(self, loss: Tensor) -> None:
        """`loss` is this rank's part of a sum over ranks; DeepSpeed averages, hence the factor."""
        self._engine.backward(loss * self.rank.world_size)
        self._alive()

    def step(self, learning_rate: float, weight_decay: float) -> float:
        """Apply the accumulated gradients; returns their norm before clipping."""
        for group in self._engine.optimizer.param_groups:
            group["lr"], group["weight_decay"] = learning_rate, weight_decay
        self._engine.step()
        self.num_steps += 1
        norm = self._engine.get_global_grad_norm() if self._grad_norm is None else self._grad_norm
        return float(norm)

    def save_checkpoint(self, folder: Path) -> None:
        owned = self._fragments()
        if self._config.zero_stage == 0:  # every rank has everything
            owned = owned[self.rank.number :: self.rank.world_size]
        checkpoints.save(folder, owned, self._engine.basic_optimizer.state, self.rank.number)
        if self.rank.number == 0:
            checkpoints.write_position(folder, self._position())
        dist.barrier()

    def export(self, folder: Path, weights_file: str) -> None:
        """The policy's weights into `weights_file`; where there are adapters, merged, and by themselves below."""
        state = self._state_dict()
        if self.rank.number == 0:
            if self._lora is not None:
                self._lora.save_adapter(folder / "adapter", self._engine.module, state)
                state = self._lora.merged(self._engine.module, state)
            save_file(dict(sorted(state.items())), folder / weights_file, metadata={"format": "pt"})
        dist.barrier()

    def close(self) -> None:
        self._engine.destroy()

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self._config.max_grad_norm)

    def _position(self) -> Position:
        return Position(self.num_steps, self.rank.world_size, self._config.zero_stage)

    def _fragments(self) -> list[checkpoints.Fragment]:
        return checkpoints.fragments(self._engine, self._config.zero_stage, self.rank.number)

    def _state_dict(self) -> dict[str, Tensor]:
        """All weights on the CPU, tied ones once. Only rank 0 gets them; all ranks must call."""
        module = self._engine.module
        if self._config.zero_stage == 3:
            gathered = self._engine._zero3_consolidated_16bit_state_dict()
        else:
            gathered = module.state_dict() if self.rank.number == 0 else {}
        prefix = self._lora.PREFIX if self._lora is not None else ""
        tied = {prefix + name for name in module.all_tied_weights_keys}
        return {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in (gathered or {}).items()
            if name not in tied
        }


def init_distributed(rendezvous: Path | None, threads: int) -> Rank:
    """Join the group of ranks; deterministic algorithms from here on.

    Ranks meet through a file that only this group knows, or (None) where the launcher says, in the environment.
    """
    number, world_size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # A debugging aid that would fill ZeRO's buckets at every step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        if local >= torch.cuda.device_count():
            raise LearnerFault(
                f"rank {number} is to use GPU {local}, its machine has {torch.cuda.device_count()}: "
                "learner.num_ranks, or the slots of learner.hostfile, are more than there are GPUs"
            )
        torch.cuda.set_device(device)
    backend = "nccl" if on_gpu else "gloo"
    if rendezvous is None:
        dist.init_process_group(backend, init_method="env://")
    else:
        store = dist.FileStore(str(rendezvous), world_size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=number, world_size=world_size)
    # Otherwise DeepSpeed compiles this extension with the local C++ compiler, for a minute, where there is one.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    return Rank(number, world_size, device)


def _moved(written: Position, read: Position) -> str:
    if written.layout == read.layout:
        return ""
    return (
        f"the learner's checkpoint was written by {written.layout} and goes on with {read.layout}: "
        "the same weights and optimizer state, results that differ by rounding from here on"
    )


def _clips_itself(config: DeepSpeedLearnerConfig, dtype: str) -> bool:
    """Without ZeRO and with float32, DeepSpeed clips gradients but does not tell their norm."""
    return config.zero_stage == 0 and dtype == "float32"


def _deepspeed_config(config: DeepSpeedLearnerConfig, dtype: str, rank: Rank) -> dict[str, Any]:
    offload = {"device": "cpu", "pin_memory": rank.device.type == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # `Engine.step` is the boundary, however many micro-batches there were
        "gradient_clipping": 0.0 if _clips_itself(config, dtype) else config.max_grad_norm,
        "bf16": {"enabled": dtype == "bfloat16"},
        # Sums of many micro-batches' gradients; without ZeRO, DeepSpeed cannot keep them apart from the weights' type.
        "data_types": {"grad_accum_dtype": "fp32" if config.zero_stage else None},
        "zero_force_ds_cpu_optimizer": False,  # its own CPU optimizer is compiled at run time
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": 50_000_000,  # the default holds gigabytes per rank
            "allgather_bucket_size": 50_000_000,
            "stage3_gather_16bit_weights_on_model_save": True,
            **({"offload_optimizer": offload} if config.offload_optimizer else {}),
            **({"offload_param": offload} if config.offload_parameters else {}),
        },
        "steps_per_print": 1_000_000_000,
    }
