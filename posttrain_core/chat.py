"""Messages as a policy's tokenizer renders them: one rendering for the sampler and for the warm start."""

import json
from collections.abc import Sequence
from typing import Any

from posttrain_core.records import Message


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids through the chat template of a Hugging Face tokenizer, ready for the assistant's turn.

    A tokenizer without a template gets one "role: content" line per message and "assistant:" last.
    """
    if not tokenizer.chat_template:
        lines = "".join(f"{message.role}: {message.content}\n" for message in messages)
        return list(tokenizer(lines + "assistant:")["input_ids"])
    chat = [_chat_message(message) for message in messages]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False))


def _chat_message(message: Message) -> dict[str, Any]:
    """As chat templates want it: tool calls only where there are any, and as a list."""
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        chat["tool_calls"] = json.loads(message.tool_calls)
    if message.tool_call_id:
        chat["tool_call_id"] = message.tool_call_id
    return chat
