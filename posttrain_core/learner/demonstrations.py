"""Demonstrations as token ids: the prompt through the policy's chat template, the response closed by its end token."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posttrain_core.chat import prompt_ids
from posttrain_core.learner.protocol import Demonstration
from posttrain_core.learner.samples import SampleArrays, from_demonstrations
from posttrain_core.records import Message


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
        [prompt_ids(tokenizer, _messages(demonstration["prompt"])) for demonstration in demonstrations],
        [ids + end for ids in tokenizer(responses, add_special_tokens=False)["input_ids"]],
    )


def _messages(records: list[dict[str, Any]]) -> list[Message]:
    return [Message(**record | {"images": tuple(record["images"])}) for record in records]
