"""A GGUF file as a Hugging Face folder: weights in safetensors, config, tokenizer with its chat template.

transformers reads the file; what it made of it is checked against the file itself before anything is kept, because
it skips in silence what it does not know: tensors without a counterpart, and how text is split before merging.
Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from posttrain_core.errors import ConfigError

CONTROL = 3  # tokenizer.ggml.token_type of tokens such as <|im_end|>
END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Names of `tokenizer.ggml.pre` that split text as GPT-2 does, which is what transformers falls back to.
SPLIT_AS_GPT2 = {"gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling"}
# The same after each digit was set apart; transformers drops that, and "\n\n7" gets other tokens than in training.
SPLIT_WITH_DIGITS_ALONE = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
ROUND_TRIP = "It's 12 + 345 =\n\n 357, isn't  it?\n\tdef f(x): return x**2  # naïve 日本 🙂"


@dataclass(frozen=True)
class GgufFile:
    """`tensors` lie in the file as they are stored: mapped, not read."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: tuple[ReaderTensor, ...]

    @property
    def num_parameters(self) -> int:
        return sum(int(tensor.n_elements) for tensor in self.tensors)

    @property
    def end_ids(self) -> list[int]:
        """Ids of the tokens that end a turn."""
        found = (self.metadata.get(f"tokenizer.ggml.{name}") for name in END_IDS)
        return sorted({int(token_id) for token_id in found if token_id is not None})


def import_gguf(source: str, target: Path, dtype: str = "float32") -> GgufFile:
    """Write the folder `target`, whole or not at all. `source`: a file, or an installed package that holds just one.

    Raises ConfigError: no such file, not a GGUF, cut off, of an unsupported kind, not understood rightly by
    transformers, `target` exists or cannot be written.
    """
    if target.exists():
        raise ConfigError(f"{target} exists and is not overwritten; name another folder, or remove it")
    file = read_gguf(find_gguf(source))
    bytes_needed = file.num_parameters * (2 if dtype == "bfloat16" else 4)
    with _whole_or_nothing(target, bytes_needed) as folder:
        tokenizer = _tokenizer(file)
        model = _model(file, getattr(torch, dtype))
        _check_vocabulary(file, tokenizer)
        _check_weights(file, model)
        model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            bos_token_id=tokenizer.bos_token_id, eos_token_id=file.end_ids, pad_token_id=tokenizer.pad_token_id
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return file


def find_gguf(source: str) -> Path:
    """A file of that path, else the one .gguf of the installed package of that name, which is not imported."""
    if Path(source).is_file():
        return Path(source)
    try:
        files = metadata.files(source) or []
    except (metadata.PackageNotFoundError, ValueError) as error:
        raise ConfigError(f"{source} is neither a file nor an installed package") from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise ConfigError(f"package {source} holds {len(found)} .gguf files, not one; name a file instead")
    return found[0]


def read_gguf(path: Path) -> GgufFile:
    """Metadata and tensor table. ConfigError where the file is not a whole GGUF file with a tokenizer."""
    try:
        with path.open("rb") as opened:
            magic = opened.read(4)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if magic != b"GGUF":
        raise ConfigError(f"{path} is not a GGUF file: it does not begin with GGUF")
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # it has no error of its own: a damaged file shows as nearly any type
        raise ConfigError(f"{path} is damaged or cut off ({type(error).__name__}: {error}); fetch it again") from error
    missing = [name for name in ("general.architecture", "tokenizer.ggml.model") if name not in fields]
    if missing or not reader.tensors:
        raise ConfigError(f"{path} is no language model with its tokenizer: it lacks {', '.join(missing) or 'tensors'}")
    return GgufFile(path, fields, tuple(reader.tensors))


@contextmanager
def _whole_or_nothing(target: Path, bytes_needed: int) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its name at the end, or is removed."""
    folder: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        bytes_free = shutil.disk_usage(target.parent).free
        if bytes_free < bytes_needed:
            raise ConfigError(
                f"{target} needs {bytes_needed / 2**20:.0f} MiB, {target.parent} has {bytes_free / 2**20:.0f} MiB free"
            )
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        yield folder
        folder.chmod(0o755)
        folder.rename(target)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {target}: {error}; nothing is left of it") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _tokenizer(file: GgufFile) -> Any:
    tokenizer = _by_transformers(AutoTokenizer, file)
    kind, split = file.metadata["tokenizer.ggml.model"], file.metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":  # the others do not split by a rule of their own
        return tokenizer
    backend = tokenizer.backend_tokenizer
    if split in SPLIT_WITH_DIGITS_ALONE:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif split not in SPLIT_AS_GPT2 and "Split(" not in str(backend.pre_tokenizer):
        raise ConfigError(f"{file.path}: how its tokenizer splits text (tokenizer.ggml.pre {split!r}) is not supported")
    return tokenizer


def _model(file: GgufFile, dtype: torch.dtype) -> Any:
    """With ordinary weights: nothing of the quantization stays."""
    model = _by_transformers(AutoModelForCausalLM, file, dtype=dtype, quantization_config=GgufConfig(dequantize=True))
    model.config.architectures = [type(model).__name__]
    return model


def _by_transformers(auto: Any, file: GgufFile, **options: Any) -> Any:
    try:
        return auto.from_pretrained(file.path.parent, gguf_file=file.path.name, local_files_only=True, **options)
    except Exception as error:  # transformers raises nearly every type
        architecture, kind = (file.metadata[name] for name in ("general.architecture", "tokenizer.ggml.model"))
        raise ConfigError(
            f"transformers cannot read {file.path} (architecture {architecture!r}, tokenizer {kind!r}): {error}"
        ) from error


def _check_vocabulary(file: GgufFile, tokenizer: Any) -> None:
    """ConfigError unless ids, special tokens and texts are those of the file, and its chat template renders."""
    tokens = file.metadata["tokenizer.ggml.tokens"]
    kinds = file.metadata.get("tokenizer.ggml.token_type") or []
    control = [token_id for token_id, kind in enumerate(kinds) if kind == CONTROL]
    wrong = [i for i, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokens)))) if token != tokens[i]]
    wrong += [i for i in control if tokenizer(tokens[i], add_special_tokens=False)["input_ids"] != [i]]
    wrong += [i for i in control if tokenizer.decode([i], skip_special_tokens=True)]
    wrong += [i for i in file.end_ids if i >= len(tokens)]
    if wrong:
        raise ConfigError(f"{file.path}: the tokenizer differs from the file's vocabulary at ids {wrong[:5]}")
    ids = tokenizer(ROUND_TRIP, add_special_tokens=False)["input_ids"]
    if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != ROUND_TRIP:
        raise ConfigError(f"{file.path}: the tokenizer does not give back the text that it encoded")
    if tokenizer.chat_template:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "7"}], add_generation_prompt=True)
        except Exception as error:  # a template may raise anything
            raise ConfigError(f"{file.path}: its chat template does not render: {error}") from error


def _check_weights(file: GgufFile, model: Any) -> None:
    """ConfigError unless every number of the file is in the model, and the embeddings are the file's."""
    held = {parameter.data_ptr(): parameter.numel() for parameter in model.parameters()}  # tied ones count once
    if sum(held.values()) != file.num_parameters:
        names = [tensor.name for tensor in file.tensors if not tensor.name.endswith((".weight", ".bias"))]
        raise ConfigError(
            f"{file.path} holds {file.num_parameters} parameters and the model {sum(held.values())}: transformers "
            f"leaves some out {names[:5] or ''}"
        )
    stored = next((tensor for tensor in file.tensors if tensor.name == "token_embd.weight"), None)
    embeddings = model.get_input_embeddings().weight.detach()
    if stored is None or not torch.equal(
        embeddings, torch.from_numpy(np.array(dequantize(stored.data, stored.tensor_type))).to(embeddings.dtype)
    ):
        raise ConfigError(f"{file.path}: the embeddings that were read are not those of the file")
