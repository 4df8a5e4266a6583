"""`DeepSpeedLearner`: the learner protocol served by DeepSpeed ZeRO ranks in processes of their own, kept warm."""

import json
import math
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from posttrain_core.config import AlgorithmConfig, DeepSpeedLearnerConfig, SftConfig
from posttrain_core.errors import LearnerFault
from posttrain_core.learner import demonstrations as demonstration_file
from posttrain_core.learner import samples as sample_file
from posttrain_core.learner.presets import resolve
from posttrain_core.learner.protocol import Demonstration
from posttrain_core.learner.ranks import Progress, RankGroup
from posttrain_core.records import Sample

WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".gguf")
WEIGHTS_FILE = "model.safetensors"


class DeepSpeedLearner:
    """`scratch` is a folder of this learner's own: logs of the ranks and what is handed to them.

    `start` may be called early, so that the ranks' seconds of import overlap with other work. After a LearnerFault
    the ranks are gone; the next load_weights or load_checkpoint starts new ones. `on_progress` is told after each
    optimizer step how many are done and how many there will be. Calls from several threads are served one by one.
    """

    def __init__(
        self,
        config: DeepSpeedLearnerConfig,
        algorithm: AlgorithmConfig,
        dtype: str,
        max_new_tokens: int,
        scratch: Path,
        on_progress: Progress | None = None,
    ) -> None:
        resolve(algorithm)
        self._config, self._scratch, self._on_progress = config, scratch, on_progress
        self._dtype, self._asks_for_reference = dtype, algorithm.kl is not None
        self._settings = {
            "learner": config.model_dump(),
            "algorithm": algorithm.model_dump(),
            "dtype": dtype,
            "max_new_tokens": max_new_tokens,
        }
        self._files, self._supervised = scratch / "policy-files", scratch / "supervised"
        self._ranks: RankGroup | None = None
        self._loaded = False
        self._lock = threading.RLock()

    def start(self) -> None:
        """Start the rank processes without waiting for them."""
        with self._lock, _writing(self._scratch):
            if self._ranks is None:
                self._ranks = RankGroup(self._config, self._scratch)

    @property
    def pids(self) -> list[int]:
        """The rank processes, none before the start."""
        return self._ranks.pids if self._ranks else []

    def load_weights(self, folder: Path) -> None:
        with self._lock:
            self._load(folder, {"call": "load_weights", "folder": str(folder)})

    def load_checkpoint(self, folder: Path, reference: Path) -> str:
        with self._lock:
            command = {"call": "load_checkpoint", "folder": str(folder), "reference": str(reference)}
            note: str = self._load(reference, command)
        return note

    def update(self, samples: Sequence[Sample], seed: int) -> Mapping[str, float]:
        if not samples:
            raise LearnerFault("update got no samples: the iteration has nothing to learn from")
        arrays = sample_file.from_records(samples)
        with self._lock, self._handover() as folder:
            sample_file.save(arrays, folder / "samples.npz")
            return self._trained({"call": "update", "samples": str(folder / "samples.npz"), "seed": seed})

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        if not self._asks_for_reference:
            return [()] * len(samples)
        arrays = sample_file.from_records(samples)
        with self._lock, self._handover() as folder:
            sample_file.save(arrays, folder / "samples.npz")
            files = {"samples": str(folder / "samples.npz"), "results": str(folder / "logprobs.npy")}
            self._call({"call": "reference_logprobs", **files})
            values = np.load(folder / "logprobs.npy")
        return [tuple(values[arrays.span(number)].tolist()) for number in range(len(arrays))]

    def sft(self, demonstrations: Sequence[Demonstration], config: SftConfig, seed: int) -> Mapping[str, float]:
        """Afterwards the trained policy is held as if load_weights had taken it: fresh optimizer, new reference."""
        if not demonstrations:
            raise LearnerFault("sft got no demonstrations")
        with self._lock, self._handover() as folder:
            demonstration_file.save(demonstrations, folder / "demonstrations.json")
            metrics = self._trained(
                {
                    "call": "sft",
                    "demonstrations": str(folder / "demonstrations.json"),
                    "tokenizer": str(self._files),
                    "config": config.model_dump(),
                    "seed": seed,
                }
            )
            self.export_policy(self._supervised)  # kept: it is the reference policy from here on
            self.load_weights(self._supervised)
            return metrics

    def score(self, prompt_ids: Sequence[int], response_ids: Sequence[int], temperature: float) -> list[float]:
        command = {"prompt_ids": list(prompt_ids), "response_ids": list(response_ids), "temperature": temperature}
        with self._lock:
            values: list[float] = self._call({"call": "score", **command})
        return values

    def save_checkpoint(self, folder: Path) -> None:
        with self._lock, _writing(folder):
            self._call({"call": "save_checkpoint", "folder": str(folder)})

    def export_policy(self, folder: Path) -> None:
        with self._lock, _writing(folder):
            self._call({"call": "export_weights", "folder": str(folder), "weights_file": WEIGHTS_FILE})
            shutil.copytree(self._files, folder, dirs_exist_ok=True)

    def close(self) -> None:
        with self._lock:
            if self._ranks is not None:
                self._ranks.stop()
            self._ranks, self._loaded = None, False
            shutil.rmtree(self._files, ignore_errors=True)
            shutil.rmtree(self._supervised, ignore_errors=True)

    def _load(self, policy: Path, command: Mapping[str, Any]) -> Any:
        with _writing(self._scratch):
            _copy_files(policy, self._files, self._dtype)
        self.start()
        if not self._loaded:
            self._command({"call": "configure", **self._settings})
        result = self._command(command)
        self._loaded = True
        return result

    def _trained(self, command: Mapping[str, Any]) -> Mapping[str, float]:
        metrics: Mapping[str, float] = self._call(command)
        wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
        if wrong:
            self._loaded = False
            raise LearnerFault(f"the update gave {wrong[0]} {metrics[wrong[0]]}: lower learner.learning_rate")
        return metrics

    def _call(self, command: Mapping[str, Any]) -> Any:
        if not self._loaded:
            raise LearnerFault("the learner holds no policy: call load_weights or load_checkpoint first")
        return self._command(command)

    def _command(self, command: Mapping[str, Any]) -> Any:
        assert self._ranks is not None
        try:
            return self._ranks.call(command, self._on_progress)
        except BaseException:
            self._ranks, self._loaded = None, False
            raise

    @contextmanager
    def _handover(self) -> Iterator[Path]:
        """A folder for what the ranks are to read, gone afterwards."""
        with _writing(self._scratch), TemporaryDirectory(dir=self._scratch, prefix="handover-") as folder:
            yield Path(folder)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """`folder` exists inside the block, and what the system refuses there (a full disk) is a LearnerFault."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise LearnerFault(f"the learner cannot write in {folder}: {error}") from error


def _copy_files(policy: Path, target: Path, dtype: str) -> None:
    """Everything of the policy folder but its weights: config, tokenizer, chat template."""
    try:
        config = json.loads((policy / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise LearnerFault(f"{policy} is not a Hugging Face policy folder: {error}") from error
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in sorted(policy.iterdir()):
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, target / path.name)
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
