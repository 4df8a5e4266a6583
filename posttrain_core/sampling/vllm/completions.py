"""One streamed request to a vLLM server's /v1/completions: token ids in, token ids and log-probabilities out.

The server runs with `--logprobs-mode processed_logprobs`. What decides the distribution is said in each request, so
that no default of a server or of a model's generation configuration counts. The completion's end is decided here, from
its tokens (`sampling.stopping`); the server is told to stop at the same places, and its stream is closed at ours.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from posttrain_core.records import FinishReason
from posttrain_core.sampling.protocol import Completion, SampleRequest
from posttrain_core.sampling.stopping import Ending
from posttrain_core.sampling.tokenizer import PolicyTokenizer

STREAM_INTERVAL = (
    8  # tokens in an event after the first: each event costs the server and us about as much as its tokens
)
MAX_SEED = 2**63 - 1
IMPOSSIBLE_LOGPROB = -9999.0  # what vLLM writes for minus infinity
REFUSALS = (400, 413, 422)  # HTTP statuses that speak of the request; others speak of the server
ROUNDING = 1e-3  # how far above 0 a log-probability may come out
MAX_ERROR_CHARACTERS = 500

OnTokens = Callable[[int], None]  # told of the number of tokens that came


class ServerFault(Exception):
    """The server failed or answered nonsense; another one may do."""


class RequestRefused(Exception):
    """The server is well, and the request is not: it would be refused again."""


async def complete(
    http: httpx.AsyncClient, request: SampleRequest, tokenizer: PolicyTokenizer, on_tokens: OnTokens
) -> Completion:
    """The completion of `request`, whose `max_new_tokens` fits the context. Raises ServerFault and RequestRefused.

    Left early, by cancellation too, it closes the stream, which aborts the request on the server.
    """
    body = json.dumps(_body(request, tokenizer.end_ids))
    # A connection for each request: one that is kept may be closed by the server just when it is used again.
    headers = {"Content-Type": "application/json", "Connection": "close"}
    gathered = _Gathered(request, tokenizer)
    try:
        async with http.stream("POST", "/v1/completions", content=body, headers=headers) as response:
            if response.status_code != 200:
                raise _refusal(response.status_code, (await response.aread()).decode(errors="replace"))
            events = _Events()
            async for chunk in response.aiter_bytes():
                for event in events.parse(chunk):
                    before = gathered.num_tokens
                    completion = gathered.add(event)
                    on_tokens(gathered.num_tokens - before)
                    if completion is not None:
                        return completion
    except httpx.RequestError as error:
        raise ServerFault(f"the connection failed ({type(error).__name__}: {error})") from error
    raise ServerFault("a stream ended before its completion did")


def _body(request: SampleRequest, end_ids: frozenset[int]) -> dict[str, Any]:
    return {
        "prompt": request.prompt_ids,
        "max_tokens": request.max_new_tokens,
        "seed": request.seed & MAX_SEED,
        "temperature": request.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "n": 1,
        "ignore_eos": False,
        "stop_token_ids": sorted(end_ids),
        "stop": request.stop,
        "include_stop_str_in_output": True,
        "skip_special_tokens": True,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # instead of text, which is not used
        "stream": True,
        "stream_interval": STREAM_INTERVAL,
    }


def _refusal(status: int, text: str) -> ServerFault | RequestRefused:
    detail = f"HTTP {status}: {' '.join(text.split())[:MAX_ERROR_CHARACTERS]}"
    return RequestRefused(detail) if status in REFUSALS else ServerFault(detail)


class _Events:
    """Server-sent events (WHATWG HTML, 9.2) as vLLM writes them: one line of JSON each."""

    def __init__(self) -> None:
        self._rest = b""

    def parse(self, chunk: bytes) -> Iterator[Any]:
        """Of the events that end in `chunk`, without the last one, [DONE]."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if not data or data == b"[DONE]":
                continue
            try:
                yield json.loads(data)
            except ValueError as error:
                raise ServerFault(f"it answered nonsense: {data[:80]!r}") from error


class _Gathered:
    """The tokens of one completion so far."""

    def __init__(self, request: SampleRequest, tokenizer: PolicyTokenizer) -> None:
        self._vocab_size = tokenizer.vocab_size
        self._max_new_tokens = request.max_new_tokens
        self._ending = Ending(request, tokenizer.end_ids, tokenizer.decode)
        self._ids: list[int] = []
        self._logprobs: list[float] = []

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def add(self, event: Any) -> Completion | None:
        """The completion when it ends with this event."""
        if isinstance(event, dict) and "error" in event:
            raise _event_error(event["error"])
        try:
            (choice,) = event["choices"]
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
            finish, stop_reason = choice["finish_reason"], choice.get("stop_reason")
        except (KeyError, TypeError, ValueError) as error:
            raise ServerFault(f"it answered nonsense: no tokens in {str(event)[:200]}") from error
        if finish not in (None, "stop", "length"):
            raise ServerFault(f"it ended a completion with the reason {finish!r}")
        self._check(ids, logprobs)
        for token, logprob in zip(ids, logprobs, strict=True):
            self._ids.append(token)
            self._logprobs.append(min(float(logprob), 0.0))
            if reason := self._ending.add(token):
                return self._completion(reason)
        if finish == "length":
            raise ServerFault(
                f"it ended a completion after {len(self._ids)} of {self._max_new_tokens} tokens by a limit of its own"
            )
        if finish == "stop":
            if not self._ids:
                raise ServerFault("it answered nonsense: a completion that stopped without a token")
            return self._completion(FinishReason.STOP_RULE if isinstance(stop_reason, str) else FinishReason.STOP)
        return None

    def _completion(self, reason: FinishReason) -> Completion:
        return Completion(tuple(self._ids), tuple(self._logprobs), reason)

    def _check(self, ids: Any, logprobs: Any) -> None:
        if not isinstance(ids, list) or not isinstance(logprobs, list) or len(ids) != len(logprobs):
            raise ServerFault("it answered nonsense: numbers of tokens and of log-probabilities differ")
        for token, logprob in zip(ids, logprobs, strict=True):
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise ServerFault(f"it answered nonsense: token {token!r} of a vocabulary of {self._vocab_size}")
            if type(logprob) not in (int, float) or not IMPOSSIBLE_LOGPROB < logprob <= ROUNDING:
                raise ServerFault(f"it answered nonsense: log-probability {logprob!r}")


def _event_error(error: Any) -> ServerFault | RequestRefused:
    """An error in the middle of a stream, whose HTTP status was 200."""
    status = error.get("code") if isinstance(error, dict) else None
    return _refusal(status if isinstance(status, int) else 500, str(error))
