"""Stop strings and repetition: the cut is the one that a plain search over all prefixes finds."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from posttrain_core.config import RepetitionConfig
from posttrain_core.records import FinishReason
from posttrain_core.sampling import SampleRequest
from posttrain_core.sampling.stopping import Ending
from posttrain_core.sampling.tokenizer import PolicyTokenizer

BYTES = [f"<0x{byte:02X}>" for byte in (*"é€😀".encode(), *b"ab ")]
WORDS = ["▁a", "▁b", "a", "b", "ab", "▁", "ba▁a", "."]


def words_and_bytes() -> Tokenizer:
    """As SentencePiece models decode: words that bring their space, single bytes for what is no word, one special."""
    vocabulary = {token: index for index, token in enumerate(["<s>", *BYTES, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


TOKENIZER = words_and_bytes()
NUM_TOKENS = TOKENIZER.get_vocab_size()


def decode(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(ids), skip_special_tokens=True))


def end(
    tokens: Sequence[int],
    stop: tuple[str, ...] = (),
    repetition: RepetitionConfig | None = None,
    limit: int = 10**6,
    end_ids: frozenset[int] = frozenset(),
    decode: Callable[[Sequence[int]], str] = decode,
) -> tuple[int, FinishReason] | None:
    """The number of tokens up to the end, and its reason."""
    request = SampleRequest((1,), 0, limit, 1.0, stop=stop, repetition=repetition)
    ending = Ending(request, end_ids, decode)
    for index, token in enumerate(tokens):
        if reason := ending.add(token):
            return index + 1, reason
    return None


whole_characters = st.lists(
    st.sampled_from([*[[token] for token in range(10, NUM_TOKENS)], [1, 2], [3, 4, 5], [6, 7, 8, 9], [0]]),
    max_size=40,
).map(lambda parts: [token for part in parts for token in part])


@given(tokens=whole_characters, stop=st.lists(st.text("ab é€😀.", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_cut_after_the_first_token_with_which_the_text_holds_one(
    tokens: list[int], stop: list[str]
) -> None:
    holds = (n for n in range(1, len(tokens) + 1) if any(each in decode(tokens[:n]) for each in stop))
    first = next(holds, None)
    assert end(tokens, stop=tuple(stop)) == (None if first is None else (first, FinishReason.STOP_RULE))


@given(tokens=st.lists(st.integers(0, NUM_TOKENS - 1), max_size=60))
def test_bytes_that_are_no_text_hold_no_stop_string_and_cost_no_more_than_others(tokens: list[int]) -> None:
    longest = 0

    def watched(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    assert end(tokens, stop=("nowhere",), decode=watched) is None
    assert longest <= 16


def periodic(tokens: Sequence[int], rule: RepetitionConfig) -> bool:
    last = tokens[-rule.num_tokens :]
    return len(last) == rule.num_tokens and any(
        all(last[i] == last[i - period] for i in range(period, len(last))) for period in range(1, rule.max_period + 1)
    )


@given(
    parts=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 8)), max_size=8),
    max_period=st.integers(1, 5),
    surplus=st.integers(0, 8),
)
def test_repetition_cuts_after_the_first_token_with_which_the_last_ones_are_periodic(
    parts: list[tuple[list[int], int]], max_period: int, surplus: int
) -> None:
    tokens = [token for part, times in parts for token in part * times]
    rule = RepetitionConfig(num_tokens=max(4, 2 * max_period + surplus), max_period=max_period)
    first = next((n for n in range(1, len(tokens) + 1) if periodic(tokens[:n], rule)), None)
    assert end(tokens, repetition=rule) == (None if first is None else (first, FinishReason.REPETITION))


@pytest.mark.parametrize(
    ("limit", "end_ids", "expected"),
    [
        (9, {14}, (4, FinishReason.STOP)),  # the policy's own end comes first
        (9, {1}, (4, FinishReason.STOP_RULE)),
        (4, {1}, (4, FinishReason.STOP_RULE)),  # a rule says more than the limit
        (3, {1}, (3, FinishReason.LENGTH)),
    ],
)
def test_reasons_have_an_order(limit: int, end_ids: set[int], expected: tuple[int, FinishReason]) -> None:
    tokens = [13, 13, 13, 14, 14]
    assert decode(tokens) == "a a a b b"
    rule = RepetitionConfig(num_tokens=5, max_period=2)
    assert end(tokens, ("b",), rule, limit, frozenset(end_ids)) == expected


def test_tokens_of_a_real_policy(tiny_llama: Callable[..., Path]) -> None:
    tokenizer = PolicyTokenizer(tiny_llama(0))
    tokens = [1, *range(5, 40), 3, 3]
    text = tokenizer.decode(tokens)
    found = end(tokens, stop=(text[10:13],), decode=tokenizer.decode)
    assert found is not None
    assert tokenizer.decode(tokens[: found[0]]) == text[:13]
