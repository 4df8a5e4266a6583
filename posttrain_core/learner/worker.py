"""One rank of the DeepSpeed learner: a process that obeys its parent over a connection and ends with it.

    python -m posttrain_core.learner.worker fd:NUMBER|tcp:ADDRESS:PORT FOLDER THREADS

FOLDER is shared by parent and ranks, THREADS of 0 are this rank's share of the cores; RANK, LOCAL_RANK, WORLD_SIZE and
LOCAL_SIZE are in the environment. Standard output and error belong to a log file. A command that fails ends the
process: collectives of the other ranks cannot be continued, so the parent ends the whole group.
"""

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from posttrain_core.config import AlgorithmConfig, DeepSpeedLearnerConfig, SftConfig
from posttrain_core.errors import LearnerFault, PolicyMismatch
from posttrain_core.learner import samples as sample_file
from posttrain_core.learner.connection import connect, receive, send
from posttrain_core.learner.launch import log_name
from posttrain_core.learner.presets import resolve

PARENT_CHECK_SECONDS = 1.0
SIGN_SECONDS = 1.0  # between two signs of life
NUM_FRAMES = 12  # of the stack that is reported


def main(arguments: list[str]) -> None:
    origin, folder = arguments[0], Path(arguments[1])
    threads = int(arguments[2]) or max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_SIZE"]))
    kind, _, where = origin.partition(":")
    if kind == "fd":
        line = Connection(int(where))
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are on this machine, and its name need not resolve
    else:
        address, _, port = where.rpartition(":")
        line = connect((address, int(port)), folder, int(os.environ["RANK"]))
        _log_to(folder.parent / log_name(int(os.environ["RANK"])))
    os.environ |= _environment(threads)
    parent = Parent(line)
    try:
        worker = Worker(folder / "rendezvous" if kind == "fd" else None, threads, parent)
        while True:
            command = parent.commands.get()
            parent.send({"result": getattr(worker, command.pop("call"))(**command)})
    except (LearnerFault, PolicyMismatch) as fault:
        parent.send({"fault": type(fault).__name__, "text": str(fault)})
        threading.Event().wait()  # until the parent ends all ranks: one that is not so far would only crash
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _log_to(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def _environment(threads: int) -> dict[str, str]:
    """Read by libraries when they are imported."""
    return {
        "OMP_NUM_THREADS": str(threads),
        # Threads that spin while they wait slow a shared machine down several times.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic matrix products on GPUs
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


class Parent:
    """The line to the parent, watched by a thread: it passes commands on, says where the main thread is when asked,
    and ends the process, mid-computation too, when the parent closes the line or is gone.

    The parent process is looked for as well because a child that it forked may hold the line open.
    """

    def __init__(self, line: Connection) -> None:
        self._line, self._process = line, os.getppid()
        self._lock = threading.Lock()
        self._last_sign = 0.0
        self.commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            send(self._line, message)

    def alive(self) -> None:
        """A sign of life, now and then."""
        if time.monotonic() - self._last_sign >= SIGN_SECONDS:
            self._last_sign = time.monotonic()
            self.send({"alive": True})

    def _listen(self) -> None:
        try:
            while True:
                readable = self._line.poll(PARENT_CHECK_SECONDS)
                if os.getppid() != self._process:
                    break
                if readable:
                    self._obey(receive(self._line))
        finally:
            os._exit(0)

    def _obey(self, message: dict[str, Any]) -> None:
        if message["call"] != "where":
            self.commands.put(message)
            return
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        self.send({"where": "".join(traceback.format_stack(frame)[-NUM_FRAMES:])})


class Worker:
    """The commands, by method name; their arguments and results are JSON."""

    def __init__(self, rendezvous: Path | None, threads: int, parent: Parent) -> None:
        # Imported here so that the watch over the parent already runs while the seconds of import pass.
        import torch

        parent.alive()
        # Otherwise DeepSpeed probes for devices and compilers.
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
        from posttrain_core.learner import engine, model

        parent.alive()
        self._engines, self._models = engine, model
        self._rank = engine.init_distributed(rendezvous, threads)
        self._parent = parent
        self._engine: Any = None
        self._reference: Any = None

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
            sample_file.load(Path(samples)),
            self._algorithm,
            self._config,
            self._max_new_tokens,
            seed,
            self._progress,
        )

    def reference_logprobs(self, samples: str, results: str) -> None:
        """Written to `results`, as `np.save` does, in the shape of the samples' tokens."""
        from posttrain_core.learner.training import logprobs

        values = logprobs(self._engine, self._reference_forward(), sample_file.load(Path(samples)), self._config)
        if self._rank.number == 0:
            np.save(results, values)

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
        self._engine = self._engines.Engine(
            model, self._config, self._dtype, self._rank, self._parent.alive, checkpoint
        )
        self._reference, self._reference_folder = None, reference

    def _reference_forward(self) -> Any:
        """Loaded when it is first asked for: updates from stored samples never do."""
        if self._config.lora is not None:
            return self._engine.base_forward
        if self._reference is None:
            self._reference = self._models.reference_forward(
                self._reference_folder, self._dtype, self._rank.device, self._parent.alive
            )
        return self._reference

    def _progress(self, done: int, total: int) -> None:
        self._parent.send({"progress": [done, total]})

    def _seed(self, seed: int) -> None:
        """Every call starts its own random stream, so there is no generator state that a checkpoint must carry."""
        import torch

        torch.manual_seed(seed)


if __name__ == "__main__":
    main(sys.argv[1:])
