"""Which policy version servers hold, on fake ones: loaded, proved, missed, given up for a while (`release`)."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from posttrain_core.errors import SamplerUnavailable
from posttrain_core.sampling import Completion, SampleRequest
from posttrain_core.sampling.vllm.completions import ServerFault
from posttrain_core.sampling.vllm.dispatch import Dispatcher
from tests.sampling.vllm.conftest import Make, expected, requests
from tests.sampling.vllm.fake_server import FakeServer


def dispatcher_of(*servers: FakeServer, note: Any = None) -> Dispatcher:
    async def complete(server: Any, request: SampleRequest, on_tokens: Any) -> Completion:
        raise ServerFault("it fails always")

    return Dispatcher(
        servers,
        complete,
        requests_per_server=8,
        stall_seconds=9,
        note=note,
        first_pause_seconds=0.001,
        grace_seconds=0.05,
    )


def test_servers_that_never_come_back_are_given_up_with_their_reasons(folder: Path) -> None:
    servers = [FakeServer("first"), FakeServer("second")]

    async def run() -> None:
        dispatcher = dispatcher_of(*servers)
        await dispatcher.load(0, folder, ())
        for server in servers:
            server.refuse_to_start = -1
        with pytest.raises(SamplerUnavailable, match="first does not start; second does not start"):
            await dispatcher.sample(requests(4), lambda index, completion: None)
        with pytest.raises(SamplerUnavailable, match="first does not start"):
            await dispatcher.sample(requests(4), lambda index, completion: None)
        for server in servers:
            server.refuse_to_start = 3
        await dispatcher.load(0, folder, ())  # tries them again
        assert any(server.held for server in servers)
        await dispatcher.close()

    asyncio.run(run())


def test_server_that_missed_a_version_is_not_sampled_from_until_it_has_it(make: Make, folder: Path) -> None:
    late, good = FakeServer("late"), FakeServer("good")
    sampler = make(late, good)
    late.refuse_to_start = -1
    sampler.load_policy(1, folder)
    assert good.held == (1, folder)
    asked, of_1 = requests(12), expected(make, requests(12), version=1)
    assert of_1 != expected(make, asked)
    assert sampler.sample(asked) == of_1
    assert not late.seen
    late.refuse_to_start, good.refuse_to_start = 0, -1  # when it proves: the late one is needed
    sampler.load_policy(1, folder)
    assert sampler.sample(asked) == of_1
    assert len(late.seen) == 12
    assert late.brought == [0, 1]


@pytest.mark.parametrize("alone", [True, False])
def test_server_that_was_restarted_while_idle_is_not_sampled_from_until_it_has_the_version(
    make: Make, folder: Path, alone: bool
) -> None:
    restarted, notes, asked = FakeServer("it"), list[str](), requests(12)
    sampler = make(*([restarted] if alone else [restarted, FakeServer("good")]), note=notes.append)
    restarted.restart()
    sampler.load_policy(0, folder)
    assert sampler.sample(asked) == expected(make, asked)
    assert None not in {body["version"] for body in restarted.seen}
    assert notes[0] == "it reports that it holds nothing"
    if alone:
        assert restarted.brought == [0, 0]


def test_hung_server_does_not_hold_up_a_version(folder: Path) -> None:
    hung, good, notes = FakeServer("hung"), FakeServer("good"), list[str]()

    async def run() -> None:
        dispatcher = dispatcher_of(hung, good, note=notes.append)
        hung.hangs_when_brought = True
        await dispatcher.load(1, folder, ())
        await dispatcher.load(2, folder, ())
        assert (hung.held, good.held) == (None, (2, folder))
        await dispatcher.load(2, folder, ())
        hung.hangs_when_brought = False
        async with asyncio.timeout(10):
            while "hung is back, with policy version 2" not in notes:
                await asyncio.sleep(0.001)
        assert hung.held == (2, folder)
        assert hung.brought[-1] == 2
        await dispatcher.close()

    asyncio.run(run())
    assert notes == ["hung is slow to hold policy version 1: it is left out", "hung is back, with policy version 2"]


def test_no_server_holds_the_version(make: Make, folder: Path) -> None:
    servers = [FakeServer("first"), FakeServer("second")]
    sampler = make(*servers)
    for server in servers:
        server.refuse_to_start = 1
    with pytest.raises(SamplerUnavailable, match=r"version 1: first does not start; second does not start"):
        sampler.load_policy(1, folder)
    with pytest.raises(SamplerUnavailable, match="load_policy"):
        sampler.sample(requests(1))
    sampler.load_policy(1, folder)
    assert len(sampler.sample(requests(12))) == 12


def test_held_version_is_proved_and_not_loaded_again(make: Make, folder: Path) -> None:
    server = FakeServer()
    sampler = make(server)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: sampler.load_policy(0, folder), range(8)))
        list(pool.map(lambda _: sampler.load_policy(1, folder), range(8)))
    assert server.brought == [0, 1]
    assert 0 < server.proved <= 15


def test_busy_server_is_not_disturbed_by_a_load_of_what_it_holds(make: Make, folder: Path) -> None:
    server = FakeServer()
    server.seconds_per_event = 0.01
    sampler = make(server)
    first = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        sampling = pool.submit(sampler.sample, requests(6, max_new_tokens=30), lambda *_: first.set())
        first.wait(10)
        sampler.load_policy(0, folder)
        assert len(sampling.result()) == 6
    assert (server.proved, server.losses) == (0, [])


def test_version_changes_when_nothing_is_under_way(make: Make, folder: Path) -> None:
    server = FakeServer()
    server.seconds_per_event = 0.01
    sampler = make(server)
    first = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        sampling = pool.submit(sampler.sample, requests(6, max_new_tokens=1), lambda *_: first.set())
        first.wait(10)
        sampler.load_policy(1, folder)  # which the fake server refuses while a request is open
        assert len(sampling.result()) == 6
    assert server.brought == [0, 1]


def test_released_servers_are_brought_up_by_the_next_load(make: Make, folder: Path) -> None:
    server, other = FakeServer(), FakeServer()
    server.sleeps = True
    sampler = make(server, other)
    sampler.release()
    assert (server.held, other.held) == (None, (0, folder))
    sampler.load_policy(0, folder)
    assert (server.brought, other.brought) == ([0, 0], [0])
    assert len(sampler.sample(requests(3))) == 3


def test_server_that_does_not_go_to_sleep_is_lost_and_comes_back(make: Make, folder: Path) -> None:
    server, notes = FakeServer("it"), list[str]()
    server.sleeps = True

    async def release() -> None:
        server.lost("as it cannot sleep")
        raise SamplerUnavailable("it does not go to sleep")

    server.release = release  # type: ignore[method-assign]
    sampler = make(server, note=notes.append)
    sampler.release()
    sampler.load_policy(0, folder)
    assert len(sampler.sample(requests(3))) == 3
    assert notes == ["it does not go to sleep", "it is back, with policy version 0"]


def test_release_does_not_wait_for_the_revival_of_a_server_that_does_not_sleep(folder: Path) -> None:
    hung, good = FakeServer("hung"), FakeServer("good")

    async def run() -> None:
        dispatcher = dispatcher_of(hung, good)
        hung.hangs_when_brought = True
        await dispatcher.load(0, folder, ())
        async with asyncio.timeout(10):
            await dispatcher.release()
            hung.hangs_when_brought = False
            while hung.held is None:
                await asyncio.sleep(0.001)
        assert (hung.held, good.held) == ((0, folder), (0, folder))
        await dispatcher.close()

    asyncio.run(run())


def test_context_is_the_smaller_one_of_policy_and_servers(make: Make) -> None:
    assert make(FakeServer(context_length=4096)).context_length == 256
    assert make(FakeServer(context_length=4096), FakeServer(context_length=100)).context_length == 100


def test_server_that_comes_back_with_a_smaller_context_is_refused(make: Make, folder: Path) -> None:
    shrunk, good, notes = FakeServer("shrunk"), FakeServer("good"), list[str]()
    sampler = make(shrunk, good, note=notes.append)
    shrunk.its_context_length = 100
    sampler.load_policy(1, folder)
    assert sampler.context_length == 256
    assert len(sampler.sample(requests(12))) == 12
    assert not shrunk.seen
    assert notes == [
        "shrunk has a context of 100 tokens, and requests may have 4096, which the first load found: start it with "
        "--max-model-len 4096"
    ]
