"""Eight processes race on a real S3 server for a key, a lease and an alias: one wins, the others see who did.

Of an alias the last mover wins, and no move is lost.

With faults on the way many an answer is unknown and has to be settled by reading. `make soak` runs 200 rounds of each.
"""

import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.pool import Pool
from multiprocessing.synchronize import Barrier
from urllib.parse import urlparse

import pytest

from posttrain_core.registry import history
from posttrain_core.store import open_store
from tests.crash import racer
from tests.crash.proxy import FaultyProxy, Schedule

NUM_PROCESSES = 8
ROUNDS = {"4 KiB": 40, "6 MiB": 4, "lease": 4, "alias": 5}
if os.environ.get("POSTTRAIN_SOAK"):
    ROUNDS = dict.fromkeys(ROUNDS, 200)
RATE = 0.15


@pytest.fixture(scope="module")
def barrier() -> Barrier:
    return multiprocessing.get_context("spawn").Barrier(NUM_PROCESSES)


@pytest.fixture(scope="module")
def processes(barrier: Barrier, rados_environment: dict[str, str]) -> Iterator[Pool]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in rados_environment.items():
            patch.setenv(name, value)
        context = multiprocessing.get_context("spawn")
        with context.Pool(NUM_PROCESSES, racer.initialize, (barrier,)) as pool:
            yield pool


@pytest.fixture(params=["direct", "harmed"])
def endpoint(request: pytest.FixtureRequest, rados_environment: dict[str, str]) -> Iterator[str]:
    """The server, and a proxy before it that does harm."""
    server = rados_environment["AWS_ENDPOINT_URL_S3"]
    if request.param == "direct":
        yield server
        return
    port = urlparse(server).port
    assert port
    with FaultyProxy(port) as proxy:
        proxy.schedule = Schedule(0, RATE)
        yield proxy.url
        assert proxy.done


@pytest.mark.parametrize("race", ROUNDS)
def test_one_wins_each_round(race: str, endpoint: str, rados_url: str, processes: Pool, barrier: Barrier) -> None:
    barrier.reset()
    arguments = [(race, endpoint, rados_url, who, ROUNDS[race]) for who in range(NUM_PROCESSES)]
    outcomes = processes.map(racer.run, arguments, chunksize=1)
    for number, turn in enumerate(zip(*outcomes, strict=True)):
        winners = [who for who, (won, _) in enumerate(turn) if won]
        assert len(winners) == 1, f"round {number}: {turn}"
        if race != "lease":
            assert {seen for _, seen in turn} == set(winners), f"round {number}: {turn}"
    if race == "alias":
        moves = [(move.target.version, int(move.target.run)) for move in history(open_store(rados_url), "model")]
        assert sorted(moves) == [(number, who) for number in range(ROUNDS[race]) for who in range(NUM_PROCESSES)]
