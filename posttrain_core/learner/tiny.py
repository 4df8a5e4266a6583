"""A tiny starting policy: Llama architecture, random weights, one token per character.

`python -m posttrain_core.learner.tiny FOLDER` writes an ordinary Hugging Face folder. Whatever loads it goes through
AutoModelForCausalLM and AutoTokenizer, as for any other model.
"""

import argparse
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Printable ASCII and the newline, one token each; decoding gives back exactly what was encoded."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        unk_token="<|unk|>",
        additional_special_tokens=list(SPECIAL_TOKENS[4:]),
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_tiny_llama(
    folder: Path,
    seed: int,
    hidden_size: int = 192,
    num_layers: int = 4,
    num_heads: int = 6,
    context_length: int = 256,
) -> None:
    """Write model and tokenizer to `folder`; the weights are a function of `seed` and the sizes alone."""
    tokenizer = character_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=context_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    disable_progress_bar()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random Llama model in Hugging Face layout.")
    parser.add_argument("folder", type=Path)
    for name, value in (("seed", 0), ("hidden-size", 192), ("num-layers", 4), ("num-heads", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    make_tiny_llama(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
