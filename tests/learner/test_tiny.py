"""The tiny starting model is an ordinary Hugging Face folder, and its tokenizer loses nothing."""

import string
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain_core.learner.tiny import make_tiny_llama

SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "context_length": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(path, seed=3, **SMALL)
    return path


def test_text_survives_the_tokenizer_character_by_character(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = string.printable[:95] + "\n  two  spaces , and a comma .\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_an_unknown_character_is_the_unknown_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("é", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_the_chat_template_opens_the_assistants_turn_and_ends_it(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": "1+1"}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": "2"}], tokenize=False)
    assert prompt == "<|bos|><|user|>1+1<|assistant|>"
    assert whole == prompt + "2" + tokenizer.eos_token
    assert len(tokenizer.encode(prompt, add_special_tokens=False)) == 6


def test_special_tokens_are_left_out_of_decoded_answers(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("x+1<|eos|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "x+1"


def test_the_seed_decides_the_weights_and_nothing_else_does(folder: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    make_tiny_llama(tmp_path / "same", seed=3, **SMALL)
    make_tiny_llama(tmp_path / "other", seed=4, **SMALL)
    assert torch.equal(torch.get_rng_state(), state)
    weights = [(path / "model.safetensors").read_bytes() for path in (folder, tmp_path / "same", tmp_path / "other")]
    assert weights[0] == weights[1] != weights[2]


def test_the_model_loads_and_answers_with_a_distribution_over_its_tokens(folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    logits = model(torch.tensor([tokenizer.encode("1+1", add_special_tokens=False)])).logits
    assert logits.shape == (1, 3, len(tokenizer))
    assert model.config.max_position_embeddings == 64
