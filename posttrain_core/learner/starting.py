"""The folder of the starting model: given, made (numpy learner), or fetched from a hub."""

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
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path: {folder} holds no config.json; it must be a Hugging Face model folder")
        return folder
    return _from_hub(config.model.path)


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
