"""Rank processes that tests share: they are configured anew for each layout instead of started anew."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain_core.config import AlgorithmConfig, DeepSpeedLearnerConfig
from posttrain_core.learner import samples as sample_file
from posttrain_core.learner.ranks import RankGroup
from posttrain_core.records import Sample


class Ranks:
    """A `RankGroup` with the learner's commands as methods; started when first used, and anew after a fault."""

    def __init__(self, num_ranks: int, scratch: Path) -> None:
        self.num_ranks, self._scratch = num_ranks, scratch
        self._group: RankGroup | None = None

    @property
    def group(self) -> RankGroup:
        if self._group is None:
            config = DeepSpeedLearnerConfig(num_ranks=self.num_ranks, threads_per_rank=1)
            self._group = RankGroup(config, self._scratch)
        return self._group

    def call(self, name: str, **arguments: Any) -> Any:
        try:
            return self.group.call({"call": name, **arguments})
        except BaseException:
            self._group = None
            raise

    def stop(self) -> None:
        if self._group is not None:
            self._group.stop()

    def configure(self, algorithm: AlgorithmConfig | None = None, dtype: str = "float32", **settings: Any) -> None:
        config = DeepSpeedLearnerConfig.model_validate(
            {"num_ranks": self.num_ranks, "threads_per_rank": 1, "learning_rate": 1e-2, **settings}
        )
        algorithm = algorithm or AlgorithmConfig()
        self.call(
            "configure",
            learner=config.model_dump(),
            algorithm=algorithm.model_dump(),
            dtype=dtype,
            max_new_tokens=8,
        )

    def load(self, policy: Path) -> None:
        self.call("load_weights", folder=str(policy))

    def resume(self, checkpoint: Path, policy: Path) -> Any:
        return self.call("load_checkpoint", folder=str(checkpoint), reference=str(policy))

    def update(self, samples: Sequence[Sample], seed: int = 0) -> Mapping[str, float]:
        path = self._scratch / "samples.npz"
        sample_file.save(sample_file.from_records(samples), path)
        metrics: Mapping[str, float] = self.call("update", samples=str(path), seed=seed)
        return metrics

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with their log-probabilities under the reference policy."""
        arrays = sample_file.from_records(samples)
        files = {"samples": str(self._scratch / "samples.npz"), "results": str(self._scratch / "logprobs.npy")}
        sample_file.save(arrays, Path(files["samples"]))
        self.call("reference_logprobs", **files)
        values = np.load(files["results"])
        rows = [tuple(values[arrays.span(number)].tolist()) for number in range(len(arrays))]
        return [replace(sample, reference_logprobs=row) for sample, row in zip(samples, rows, strict=True)]

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        self.call("save_checkpoint", folder=str(folder))
        return folder

    def export(self, folder: Path) -> Mapping[str, Any]:
        """The exported weights by name."""
        from safetensors.torch import load_file

        folder.mkdir(parents=True, exist_ok=True)
        self.call("export_weights", folder=str(folder), weights_file="model.safetensors")
        return dict(load_file(folder / "model.safetensors"))


@contextmanager
def started(num_ranks: int, scratch: Path) -> Iterator[Ranks]:
    ranks = Ranks(num_ranks, scratch)
    yield ranks
    ranks.stop()


def whole_state(checkpoint: Path) -> dict[str, Any]:
    """Every parameter's master weights and moments [n], put together from the files of all ranks."""
    import torch
    from safetensors import safe_open

    pieces: dict[str, list[tuple[int, Any]]] = {}
    for path in sorted(checkpoint.glob("rank*.safetensors")):
        with safe_open(path, framework="pt") as file:
            starts = file.metadata() or {}
            for key in file.keys():  # noqa: SIM118 (not a mapping)
                pieces.setdefault(key, []).append((int(starts[key.partition("/")[2]]), file.get_tensor(key)))
    return {
        key: torch.cat([piece for _, piece in sorted(parts, key=lambda part: part[0])]) for key, parts in pieces.items()
    }
