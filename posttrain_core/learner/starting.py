"""The folder of the starting model: given, made (numpy learner), or fetched from a hub."""

import json
from pathlib import Path

from posttrain_core.config import RunConfig
from posttrain_core.errors import ConfigError
from posttrain_core.learner.numpy_learner import init_policy


def starting_policy(config: RunConfig, scratch: Path) -> Path:
    """ConfigError when `model.path` is neither a model folder nor a hub id that can be fetched."""
    if config.sampler.type == "scripted":
        init_policy(scratch / "policy", len(config.sampler.responses))
        return scratch / "policy"
    folder = Path(config.model.path).expanduser()
    if folder.is_dir():
        _check_context(folder, config.plan.max_new_tokens)
        return folder
    return _from_hub(config.model.path)


def _check_context(folder: Path, max_new_tokens: int) -> None:
    """ConfigError where the folder holds no readable config.json, or no prompt would fit beside a response."""
    try:
        context = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"model.path: {folder} holds no readable config.json ({error}); it must be a Hugging Face model folder"
        ) from error
    if isinstance(context, int) and max_new_tokens >= context:
        raise ConfigError(
            f"plan.max_new_tokens is {max_new_tokens}: the model in {folder} holds {context} tokens, prompt included"
        )


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        cause = str(error).splitlines()[0]
        raise ConfigError(
            f"model.path: {name!r} is no local folder, and as a hub id it cannot be fetched: {cause}. "
            "Give the folder of a Hugging Face model, or connect to the hub"
        ) from error
