"""The policy's own words: its tokenizer, what ends its turn, and how much it can hold; from a Hugging Face folder."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from posttrain_core.chat import prompt_ids
from posttrain_core.records import Message


class PolicyTokenizer:
    """All versions of a run share one. Safe to use from several threads.

    end_ids         every token that ends a turn, from the generation configuration and the tokenizer
    pad_id          what fills up shorter prompts
    context_length  prompt and response tokens; of models without a limit (ALiBi) the tokenizer's
    vocab_size      token ids that the model can emit are below it
    """

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._decode = _decoder(self._tokenizer)
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        self.end_ids = _end_ids(folder, config) | ({self._tokenizer.eos_token_id} - {None})
        padding = self._tokenizer.pad_token_id
        self.pad_id: int = padding if padding is not None else min(self.end_ids, default=0)
        text_config = config.get_text_config()
        self.vocab_size = int(text_config.vocab_size)
        limit = getattr(text_config, "max_position_embeddings", None) or self._tokenizer.model_max_length
        if limit > 2**30:
            raise ValueError("neither config.json nor the tokenizer names a context length; set model_max_length")
        self.context_length = int(limit)

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Through the chat template with its generation prompt.

        A tokenizer without template gets one "role: content" line per message and the line "assistant:" last.
        """
        with self._lock:
            return tuple(prompt_ids(self._tokenizer, messages))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        with self._lock:
            return self._decode(list(token_ids))


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """The tokenizer's `decode`; where that adds nothing to the one of the tokenizers package, which is six times as
    fast on a few tokens, that one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.clean_up_tokenization_spaces:
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
    return lambda ids: str(backend.decode(ids, skip_special_tokens=True))


def _end_ids(folder: Path, config: Any) -> frozenset[int]:
    """As a model loaded from `folder` has them: of generation_config.json where there is one, else of config.json."""
    if (folder / "generation_config.json").is_file():
        configured = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    else:
        configured = GenerationConfig.from_model_config(config).eos_token_id
    ids = configured if isinstance(configured, list | tuple) else [configured]
    return frozenset(ids) - {None}
