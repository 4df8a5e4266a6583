"""Demonstrations as token ids: the prompt through the policy's chat template, the response closed by its end token."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posttrain_core.learner.protocol import Demonstration
from posttrain_core.learner.samples import SampleArrays, from_demonstrations


def save(demonstrations: Sequence[Demonstration], path: Path) -> None:
    path.write_text(json.dumps([asdict(demonstration) for demonstration in demonstrations]))


def encode(path: Path, tokenizer_folder: Path) -> SampleArrays:
    """The demonstrations that `save` wrote, as samples to imitate. Imports transformers."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    demonstrations = json.loads(path.read_text())
    responses = [demonstration["response"] for demonstration in demonstrations]
    end = [tokenizer.eos_token_id]
    return from_demonstrations(
        [_prompt(tokenizer, demonstration["prompt"]) for demonstration in demonstrations],
        [ids + end for ids in tokenizer(responses, add_special_tokens=False)["input_ids"]],
    )


def _prompt(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """As the sampler encodes it: without a chat template, a "role: content" line each and "assistant:" last."""
    if not tokenizer.chat_template:
        lines = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return list(tokenizer(lines + "assistant:")["input_ids"])
    text = tokenizer.apply_chat_template(
        [_chat_message(message) for message in messages], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _chat_message(message: dict[str, Any]) -> dict[str, Any]:
    """As chat templates want it: tool calls only where there are any, and as a list."""
    chat: dict[str, Any] = {"role": message["role"], "content": message["content"]}
    if message["tool_calls"]:
        chat["tool_calls"] = json.loads(message["tool_calls"])
    if message["tool_call_id"]:
        chat["tool_call_id"] = message["tool_call_id"]
    return chat
