"""What becomes of requests when servers die, hang or answer nonsense; on a fake server that does so when told."""

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from posttrain_core.config import RepetitionConfig
from posttrain_core.errors import SamplerUnavailable
from posttrain_core.records import FinishReason
from posttrain_core.sampling import Completion, SampleRequest
from tests.sampling.vllm.conftest import Make, expected, requests
from tests.sampling.vllm.fake_server import END_ID, FakeServer


def seeds(server: FakeServer) -> Counter[int]:
    return Counter(body["seed"] for body in server.seen)


def test_completions_are_what_the_server_said(make: Make) -> None:
    server = FakeServer()
    completions = make(server).sample(requests(40))
    assert {each.finish_reason for each in completions} == {FinishReason.STOP, FinishReason.LENGTH}
    for request, completion in zip(requests(40), completions, strict=True):
        body = next(body for body in server.seen if body["seed"] == request.seed)
        assert list(completion.response_ids) == [server.say(body, place) for place in range(len(completion.logprobs))]
        assert (completion.response_ids[-1] == END_ID) == (completion.finish_reason is FinishReason.STOP)
        assert len(completion.response_ids) == 12 or completion.finish_reason is FinishReason.STOP


def test_no_default_of_a_server_can_change_the_distribution(make: Make) -> None:
    server = FakeServer()
    make(server).sample(requests(1))
    neutral = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "min_tokens": 0}
    neutral |= {"presence_penalty": 0, "frequency_penalty": 0, "temperature": 1, "n": 1, "ignore_eos": False}
    assert neutral.items() <= server.seen[0].items()
    assert server.seen[0]["stop_token_ids"] == [2, 3]


def test_at_most_so_many_requests_at_once(make: Make) -> None:
    server = FakeServer()
    server.seconds_per_event = 0.001
    make(server, requests_per_server=3).sample(requests(12))
    assert server.most_open == 3


def test_load_is_spread_and_groups_stay_together(make: Make) -> None:
    servers = [FakeServer("a"), FakeServer("b")]
    make(*servers).sample(requests(12))
    prompts = [{tuple(body["prompt"]) for body in server.seen} for server in servers]
    assert [len(server.seen) for server in servers] == [6, 6]
    assert not prompts[0] & prompts[1]


def die_once(server: FakeServer, seed: int) -> None:
    """The first time that the request with `seed` has some tokens."""

    def at_event(body: dict[str, Any]) -> int | None:
        return 2 if body["seed"] == seed and not server.losses and seeds(server)[seed] == 1 else None

    server.die_at_event = at_event


def test_death_of_one_of_two_loses_nothing_and_makes_nothing_twice(make: Make) -> None:
    servers = [FakeServer("a"), FakeServer("b")]
    for server in servers:
        server.seconds_per_event = 0.002
    die_once(servers[0], seed=4)
    die_once(servers[1], seed=99)
    die_once(servers[0], seed=0)
    asked, told = requests(24), Counter[int]()
    finished_before: list[int] = []

    def on_done(index: int, completion: Completion) -> None:
        told[index] += 1
        if not servers[0].losses:
            finished_before.append(index)

    assert make(*servers).sample(asked, on_done) == expected(make, asked)
    assert told == Counter(range(24))
    assert len(servers[0].losses) == 1
    made = seeds(servers[0]) + seeds(servers[1])
    assert all(made[seed] == 1 for seed in finished_before)
    assert max(made.values()) == 2


FAULTS: dict[str, dict[str, Any]] = {
    "hangs": {"hang_at_event": 1},
    "hangs before the first token": {"hang_at_event": 0},
    "HTTP 500": {"status": 500},
    "HTTP 401": {"status": 401},
    "HTTP 429": {"status": 429},
    "connection dropped": {"drop_at_event": 1},
    "stream ends early": {"raw": b"data: [DONE]\n\n"},
    "no JSON": {"raw": b"data: {]\n\n"},
    "no choice": {"raw": b'data: {"choices": []}\n\n'},
    "error within the stream": {"raw": b'data: {"error": {"message": "engine is dead", "code": 500}}\n\n'},
    "aborted": {"edit": lambda choice: choice.update(finish_reason="abort")},
    "failed": {"edit": lambda choice: choice.update(finish_reason="error")},
    "cut by a limit of its own": {"edit": lambda choice: choice.update(finish_reason="length")},
    "stops without tokens": {
        "edit": lambda choice: choice.update(finish_reason="stop", token_ids=[], logprobs={"token_logprobs": []})
    },
    "token of no vocabulary": {"edit": lambda choice: choice["token_ids"].__setitem__(0, 47)},
    "negative token": {"edit": lambda choice: choice["token_ids"].__setitem__(0, -1)},
    "too few log-probabilities": {"edit": lambda choice: choice["logprobs"]["token_logprobs"].pop()},
    "log-probability above 0": {"edit": lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(0, 0.5)},
    "log-probability NaN": {"edit": lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(0, float("nan"))},
    "log-probability of the impossible": {
        "edit": lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(0, -9999.0)
    },
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("alone", [True, False])
def test_faulty_server_is_lost_proved_again_and_every_request_answered_once(
    make: Make, fault: str, alone: bool
) -> None:
    bad = FakeServer("bad")
    for name, value in FAULTS[fault].items():
        setattr(bad, name, value)
    servers = [bad] if alone else [bad, FakeServer("good")]
    asked, told = requests(9), Counter[int]()
    sampler = make(*servers, stall_seconds=0.3)
    assert sampler.sample(asked, lambda index, _: told.update([index])) == expected(make, asked)
    assert told == Counter(range(9))
    assert len(bad.losses) == 1
    if alone:
        assert bad.brought == [0, 0]


def test_slow_servers_are_not_hung(make: Make) -> None:
    server = FakeServer()
    server.seconds_per_event = 0.05
    server.say = lambda body, position: 9
    asked = requests(2, max_new_tokens=30)
    assert len(make(server, stall_seconds=0.2).sample(asked)[0].response_ids) == 30
    assert not server.losses


@pytest.mark.parametrize("status", [400, 413, 422])
def test_refused_request_is_our_fault_and_named(make: Make, status: int) -> None:
    server = FakeServer("the server")
    server.status = status
    with pytest.raises(SamplerUnavailable, match=r"the server refused the request with seed 0, 2 prompt.*made-up ref"):
        make(server).sample(requests(1))
    assert not server.losses


@pytest.mark.parametrize("num_servers", [1, 2])
def test_request_that_kills_servers_is_found_run_alone_and_named(make: Make, num_servers: int) -> None:
    servers = [FakeServer(f"server {number}") for number in range(num_servers)]
    for server in servers:
        server.die_at_event = lambda body: 1 if body["seed"] == 7 else None
    done = Counter[int]()
    with pytest.raises(SamplerUnavailable, match=r"4 vLLM servers in a row.*seed 7, 2 prompt tokens.*alone"):
        make(*servers).sample(requests(12), lambda index, _: done.update([index]))
    assert 7 not in done
    assert set(done.values()) <= {1}
    assert sum(len(server.losses) for server in servers) == 4
    assert any(together == {7} for server in servers for together in server.together)


def test_innocent_requests_survive_being_suspected_and_notes_say_so(make: Make) -> None:
    server, notes = FakeServer("it"), list[str]()
    server.seconds_per_event = 0.001
    server.die_at_event = lambda body: 1 if body["seed"] == 7 and len(server.losses) < 3 else None
    asked = requests(12)
    assert make(server, note=notes.append).sample(asked) == expected(make, asked)
    assert len(server.losses) == 3
    lost, back, alone = "it was lost: ", "it is back, with policy version 0", " requests were on 3 vLLM servers that"
    told = [lost, back, lost, back, lost, alone, back]
    assert [part in note for note, part in zip(notes, told, strict=True)] == [True] * 7


def test_callers_share_the_servers(make: Make) -> None:
    server = FakeServer()
    server.seconds_per_event = 0.002
    sampler = make(server)
    batches = [requests(12)[start : start + 3] for start in range(0, 12, 3)]
    alone = [expected(make, batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(sampler.sample, batches)) == alone
    assert server.most_open > 3


def test_exception_of_the_caller_takes_its_requests_back(make: Make, folder: Path) -> None:
    server = FakeServer()
    server.say = lambda body, position: 9
    server.seconds_per_event = 0.02
    sampler = make(server)

    def interrupt(index: int, completion: Completion) -> None:
        raise KeyboardInterrupt

    asked = [*requests(1, max_new_tokens=1), *requests(5, max_new_tokens=3000)]
    with pytest.raises(KeyboardInterrupt):
        sampler.sample(asked, interrupt)
    sampler.load_policy(1, folder)  # waits until they are closed
    assert server.losses == []
    assert len(sampler.sample(requests(3, max_new_tokens=2))) == 3


def test_stop_strings_and_repetition_end_the_stream(make: Make) -> None:
    server = FakeServer()
    server.seconds_per_event = 0.001
    letters = {"a": 4, "b": 5, "c": 6}
    server.say = lambda body, position: letters["abcab"[position]] if position < 5 else letters["bc"[position % 2]]
    rule = RepetitionConfig(num_tokens=8, max_period=3)
    asked = [
        SampleRequest((5,), 0, 4000, 1.0, stop=("zz", "cab")),
        SampleRequest((5,), 1, 4000, 1.0, repetition=rule),
        SampleRequest((5,), 2, 30, 1.0, stop=("cb",), repetition=rule),
    ]
    sampler = make(server)
    stopped, repeated, both = sampler.sample(asked)
    assert (sampler.decode(stopped.response_ids), stopped.finish_reason) == ("abcab", FinishReason.STOP_RULE)
    assert repeated.finish_reason is FinishReason.REPETITION
    assert len(repeated.response_ids) == len(repeated.logprobs) <= 13
    assert (sampler.decode(both.response_ids)[-2:], both.finish_reason) == ("cb", FinishReason.STOP_RULE)
    assert [body["stop"] for body in sorted(server.seen, key=lambda body: body["seed"])] == [["zz", "cab"], [], ["cb"]]


def test_refused_prompts_are_told_and_never_sent(make: Make) -> None:
    server, told = FakeServer(context_length=20), dict[int, Completion]()
    good, long = requests(1)[0], SampleRequest((5,) * 20, 1, 4, 1.0)
    make(server).sample([long, good], told.__setitem__)
    assert told[0] == Completion((), (), FinishReason.REFUSED)
    assert told[1].response_ids
    assert [body["seed"] for body in server.seen] == [0]


def test_closed_sampler_ends_calls_and_refuses_new_ones(make: Make) -> None:
    server = FakeServer()
    server.say = lambda body, position: 9
    server.seconds_per_event = 0.02
    sampler = make(server)
    first = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asked = [*requests(1, max_new_tokens=1), *requests(2, max_new_tokens=3000)]
        sampling = pool.submit(sampler.sample, asked, lambda *_: first.set())
        first.wait(10)
        sampler.close()
        sampler.close()
        with pytest.raises(SamplerUnavailable, match="closed"):
            sampling.result(10)
    with pytest.raises(SamplerUnavailable, match="closed"):
        sampler.sample(requests(1))


def test_call_while_the_sampler_closes_is_refused(make: Make, folder: Path) -> None:
    server, closing, go_on = FakeServer(), threading.Event(), threading.Event()
    close = server.close

    async def slow_close() -> None:
        closing.set()
        await asyncio.to_thread(go_on.wait, 10)
        await close()

    server.close = slow_close  # type: ignore[method-assign]
    sampler = make(server)
    with ThreadPoolExecutor(2) as pool:
        closed = pool.submit(sampler.close)
        closing.wait(10)
        calls = [lambda: sampler.sample(requests(1)), lambda: sampler.load_policy(1, folder), sampler.release]
        try:
            for call in calls:
                with pytest.raises(SamplerUnavailable, match="closed"):
                    pool.submit(call).result(10)
        finally:
            go_on.set()
        closed.result(10)
