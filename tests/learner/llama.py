"""A very small Llama with a character tokenizer, and samples for it."""

import json
from pathlib import Path

import numpy as np

from posttrain_core.records import Sample

CHARACTERS = "0123456789+-*()= x"
TEMPLATE = (
    "{% for m in messages %}{{ '<bos>' + m['content'] }}{% endfor %}{% if add_generation_prompt %}{{ '=' }}{% endif %}"
)


def write_llama(folder: Path, hidden: int = 32, layers: int = 2, tied: bool = True) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=3 + len(CHARACTERS),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = ["<pad>", "<bos>", "<eos>", *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(words[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_samples(num_groups: int = 4, group_size: int = 4, seed: int = 0, temperature: float = 1.0) -> list[Sample]:
    """Groups that share a prompt of 3 to 9 tokens, responses of 2 to 6."""
    random = np.random.default_rng(seed)
    samples = []
    for group in range(num_groups):
        prompt = tuple(int(token) for token in random.integers(3, 20, size=random.integers(3, 10)))
        for member in range(group_size):
            response = tuple(int(token) for token in random.integers(3, 20, size=random.integers(2, 7)))
            samples.append(
                Sample(
                    rollout_id=f"g{group}.r{member}",
                    group_id=f"g{group}",
                    domain="test",
                    segment=0,
                    input_ids=prompt + response,
                    loss_mask=(0,) * len(prompt) + (1,) * len(response),
                    sampler_logprobs=(0.0,) * len(prompt) + (-3.0,) * len(response),
                    reward=0.0,
                    advantage=float(random.normal()),
                    temperature=temperature,
                )
            )
    return samples
