"""One rank of the DeepSpeed learner: a process that obeys its parent over a pair of pipes and dies with it.

    python -m posttrain_core.learner.worker COMMAND_FD REPLY_FD RENDEZVOUS_FILE THREADS

Commands and replies are JSON lines. Standard output and error belong to a log file. A command that fails ends the
process: collectives of the other ranks cannot be continued, so the parent ends the whole group.
"""

import json
import os
import queue
import select
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain_core.config import AlgorithmConfig, DeepSpeedLearnerConfig, SftConfig
from posttrain_core.errors import LearnerFault
from posttrain_core.learner import samples as sample_file
from posttrain_core.learner.presets import resolve

PARENT_CHECK_SECONDS = 1.0


def main(arguments: list[str]) -> None:
    command_fd, reply_fd, rendezvous, threads = int(arguments[0]), int(arguments[1]), arguments[2], int(arguments[3])
    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(command_fd, os.getppid(), commands), daemon=True).start()
    try:
        worker = Worker(Path(rendezvous), threads, reply_fd)
        while True:
            command = json.loads(commands.get())
            worker.reply({"result": getattr(worker, command.pop("call"))(**command)})
    except LearnerFault as fault:
        _send(reply_fd, {"fault": str(fault)})
        os._exit(1)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _listen(command_fd: int, parent: int, commands: "queue.SimpleQueue[bytes]") -> None:
    """Pass commands on; end the process, mid-computation too, when the parent closes the pipe or is gone.

    The parent is looked for as well because a child that it forked may hold the pipe open.
    """
    pending = b""
    while True:
        readable, _, _ = select.select([command_fd], [], [], PARENT_CHECK_SECONDS)
        data = os.read(command_fd, 65536) if readable else b""
        if os.getppid() != parent or (readable and not data):
            os._exit(0)
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            commands.put(line)


def _send(reply_fd: int, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(reply_fd, data) :]


class Worker:
    """The commands, by method name; their arguments and results are JSON."""

    def __init__(self, rendezvous: Path, threads: int, reply_fd: int) -> None:
        # Imported here so that the watch over the parent already runs while the seconds of import pass.
        import torch

        # Otherwise DeepSpeed probes for devices and compilers.
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
        from posttrain_core.learner import engine, model

        self._engines, self._models = engine, model
        self._rank = engine.init_distributed(rendezvous, threads)
        self._reply_fd = reply_fd
        self._engine: Any = None
        self._reference: Any = None

    def reply(self, message: Mapping[str, Any]) -> None:
        _send(self._reply_fd, message)

    def configure(
        self, learner: Mapping[str, Any], algorithm: Mapping[str, Any], dtype: str, max_new_tokens: int
    ) -> None:
        self._config = DeepSpeedLearnerConfig.model_validate(learner)
        self._algorithm = resolve(AlgorithmConfig.model_validate(algorithm))
        self._dtype, self._max_new_tokens = dtype, max_new_tokens

    def load_weights(self, folder: str) -> None:
        self._build(Path(folder))

    def load_checkpoint(self, folder: str, reference: str) -> str:
        self._build(Path(reference), Path(folder))
        note: str = self._engine.note
        return note

    def update(self, samples: str, seed: int) -> Mapping[str, float]:
        from posttrain_core.learner.training import reinforce

        self._seed(seed)
        return reinforce(
            self._engine,
            self._reference,
            sample_file.load(Path(samples)),
            self._algorithm,
            self._config,
            self._max_new_tokens,
            seed,
            self._progress,
        )

    def sft(self, demonstrations: str, tokenizer: str, config: Mapping[str, Any], seed: int) -> Mapping[str, float]:
        from posttrain_core.learner.demonstrations import encode
        from posttrain_core.learner.training import imitate

        if self._engine.num_steps:
            raise LearnerFault("supervised training starts from a policy that load_weights has taken")
        self._seed(seed)
        return imitate(
            self._engine,
            encode(Path(demonstrations), Path(tokenizer)),
            SftConfig.model_validate(config),
            self._config.tokens_per_micro_batch,
            seed,
            self._progress,
        )

    def score(self, prompt_ids: list[int], response_ids: list[int], temperature: float) -> list[float]:
        from posttrain_core.learner.training import score

        return score(self._engine, prompt_ids, response_ids, temperature)

    def save_checkpoint(self, folder: str) -> None:
        self._engine.save_checkpoint(Path(folder))

    def export_weights(self, folder: str, weights_file: str) -> None:
        self._engine.export(Path(folder), weights_file)

    def _build(self, reference: Path, checkpoint: Path | None = None) -> None:
        if self._engine is not None:
            self._engine.close()
        model = self._models.load_model(reference, self._dtype, self._rank.device)
        self._engine = self._engines.Engine(model, self._config, self._dtype, self._rank, lambda: None, checkpoint)
        self._reference = None
        if self._algorithm.kl is not None:
            adapted = self._config.lora is not None
            self._reference = (
                self._engine.base_forward
                if adapted
                else self._models.reference_forward(reference, self._dtype, self._rank.device)
            )

    def _progress(self, done: int, total: int) -> None:
        self.reply({"progress": [done, total]})

    def _seed(self, seed: int) -> None:
        """Every call starts its own random stream, so there is no generator state that a checkpoint must carry."""
        import torch

        torch.manual_seed(seed)


if __name__ == "__main__":
    main(sys.argv[1:])
