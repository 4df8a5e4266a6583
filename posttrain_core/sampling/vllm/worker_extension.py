"""Runs inside vLLM's workers: swaps the weights in place and says which are held.

    --worker-extension-cls worker_extension.WeightSwap      with this file's folder on PYTHONPATH

It imports nothing of posttrain. An exception in a call from outside would end vLLM's engine: problems are returned.
"""

import hashlib
from pathlib import Path
from typing import Any

SHOWN_PROBLEMS = 5
READ_BYTES = 1 << 22

Shapes = dict[str, tuple[int, ...]]


def weights_digest(folder: Path) -> str:
    """SHA-256 over the bytes of the folder's safetensors files, in order of their names."""
    digest = hashlib.sha256()
    for path in weight_files(folder):
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Raises FileNotFoundError where there are none."""
    if files := sorted(folder.glob("*.safetensors")):
        return files
    raise FileNotFoundError(f"no *.safetensors in {folder}")


class WeightSwap:
    """Mixed into vLLM's worker class; called through /collective_rpc, whose arguments are strings."""

    def posttrain_held(self) -> dict[str, str]:
        """Version and digest of the weights that were swapped in last; empty when there are none or a swap failed."""
        held: dict[str, str] = getattr(self, "_posttrain_held_weights", {})
        return held

    def posttrain_swap(self, version: str, folder: str) -> dict[str, str]:
        """Load the weights in `folder`. Returns what is held then.

        Or {"refused": why}, with the model untouched, or {"broken": why}, with a model that must not be used again.
        """
        try:
            problems = self._posttrain_problems(Path(folder))
        except Exception as error:
            return {"refused": f"the weights in {folder} cannot be read: {error}"}
        if problems:
            shown = "; ".join(problems[:SHOWN_PROBLEMS]) + ("; ..." if len(problems) > SHOWN_PROBLEMS else "")
            return {"refused": f"the weights in {folder} do not fit the model that is held: {shown}"}
        self._posttrain_held_weights: dict[str, str] = {}
        try:
            digest = weights_digest(Path(folder))
            self._posttrain_load(folder)
        except Exception as error:
            return {"broken": f"loading {folder} failed half way ({type(error).__name__}: {error})"}
        self._posttrain_held_weights = {"version": version, "digest": digest}
        return self._posttrain_held_weights

    def _posttrain_problems(self, folder: Path) -> list[str]:
        worker: Any = self
        if not hasattr(self, "_posttrain_shapes"):
            self._posttrain_shapes: Shapes = _shapes(Path(worker.model_config.model))
        tied = bool(getattr(worker.model_config.hf_config, "tie_word_embeddings", False))
        return _differences(_loaded(_shapes(folder), tied), _loaded(self._posttrain_shapes, tied))

    def _posttrain_load(self, folder: str) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        worker: Any = self
        worker.reload_weights(weights_path=folder)
        # On CPU matrix products read a packed copy. The output layer of a model with tied embeddings has no weights of
        # its own in the file, so its copy is not made anew by the reload. Elsewhere this does nothing.
        for module in worker.get_model().modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(module)


def _shapes(folder: Path) -> Shapes:
    """Shape of each tensor by name, from the headers; opening a file checks that it is as long as its header says."""
    from safetensors import safe_open

    shapes: Shapes = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
    return shapes


def _loaded(shapes: Shapes, tied: bool) -> Shapes:
    """Without what vLLM leaves in the file: old checkpoints hold rotary frequencies, some a tied output layer."""
    return {
        name: shape
        for name, shape in shapes.items()
        if not name.endswith("rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
    }


def _differences(found: Shapes, held: Shapes) -> list[str]:
    missing = [f"{name} is missing" for name in sorted(held.keys() - found.keys())]
    unknown = [f"{name} is not in the model" for name in sorted(found.keys() - held.keys())]
    reshaped = [
        f"{name} has shape {list(found[name])}, the model {list(held[name])}"
        for name in sorted(found.keys() & held.keys())
        if found[name] != held[name]
    ]
    return missing + unknown + reshaped
