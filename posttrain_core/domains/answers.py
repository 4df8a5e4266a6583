"""Take a policy's answer out of what chat models wrap around it. Pure text work: nothing is parsed or run here."""

import re

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FENCED = re.compile(r"```[A-Za-z0-9_+-]*[ \t]*\n(.*?)```", re.DOTALL)
_WRAPPERS = ("```", "**", "`")
MAX_CHARACTERS = 4096


def bare_answer(text: str) -> str:
    """The last <answer> element if there is one, in it the last fenced block if there is one, without emphasis."""
    answer = text
    for pattern in (_TAGGED, _FENCED):
        found = pattern.findall(answer)
        answer = found[-1] if found else answer
    answer = answer.strip()
    for mark in _WRAPPERS:
        if len(answer) > 2 * len(mark) and answer.startswith(mark) and answer.endswith(mark):
            answer = answer[len(mark) : -len(mark)].strip()
    return answer
