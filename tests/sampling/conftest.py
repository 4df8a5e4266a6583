"""A tiny random Llama with a character tokenizer, made on the spot."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

SPECIAL = ["<pad>", "<bos>", "<eos>", "<end>"]
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-*:= \n"
CHAT_TEMPLATE = (
    "<bos>{% for message in messages %}{{ message['role'] + ':' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def char_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<end>"]})
    fast.chat_template = chat_template
    return fast


def save_tiny_llama(
    folder: Path, seed: int, *, hidden_size: int = 32, tied: bool = True, chat_template: str | None = CHAT_TEMPLATE
) -> Path:
    """A policy folder: 2 layers, grouped-query attention, context of 256, ends at <eos> or <end>."""
    set_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SPECIAL) + len(CHARACTERS),
            hidden_size=hidden_size,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.3,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=tied,
        )
    )
    model.save_pretrained(folder)
    char_tokenizer(chat_template).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "pad_token_id": 0}))
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that makes a policy folder from a seed (and what else `save_tiny_llama` takes)."""
    return lambda seed, **options: save_tiny_llama(tmp_path_factory.mktemp("policy"), seed, **options)
