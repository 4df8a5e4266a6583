"""One of several processes that want the same thing at the same moment. Each race returns what came of each round."""

import os
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

from posttrain_core.errors import RunConflict
from posttrain_core.lease import Lease
from posttrain_core.registry import Target, history, set_alias
from posttrain_core.store import ObjectStore, open_store

Outcome = tuple[bool, int]  # whether this process won; who has won as far as it can see
WAIT_SECONDS = 120.0
LEASE_SECONDS = 4.0

_barrier: Any = None


def initialize(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def meet() -> None:
    _barrier.wait(WAIT_SECONDS)


def run(arguments: tuple[str, str, str, int, int]) -> list[Outcome]:
    """`arguments`: the race, the server's and the store's URL, which process this is, how many rounds."""
    race, endpoint, url, who, num_rounds = arguments
    os.environ["AWS_ENDPOINT_URL_S3"] = endpoint
    return RACES[race](open_store(url), who, num_rounds)


def payload(who: int, number: int, size: int) -> bytes:
    return f"{who:04d} {number:08d} ".encode() + bytes([who]) * size


def race_for_key(size: int) -> Callable[[ObjectStore, int, int], list[Outcome]]:
    def race(store: ObjectStore, who: int, num_rounds: int) -> list[Outcome]:
        outcomes = []
        for number in range(num_rounds):
            key, mine = f"key/{number}", payload(who, number, size)
            meet()
            won = store.put_if_absent(key, mine)
            found = store.get(key)  # a loser adopts it
            winner = int(found[:4])
            assert found == payload(winner, number, size), "two writers' bytes were mixed"
            outcomes.append((won, winner))
            meet()
            if won:
                store.delete(key)  # the server keeps everything in memory
        return outcomes

    return race


def race_for_lease(store: ObjectStore, who: int, num_rounds: int) -> list[Outcome]:
    outcomes = []
    for _ in range(num_rounds):
        lease = Lease(store, "race", LEASE_SECONDS)
        meet()
        held = _holds(lease.__enter__)
        meet()
        outcomes.append((held and _holds(lease.check), who))
        meet()
        if held:
            lease.__exit__(None, None, None)
    return outcomes


def _holds(call: Callable[[], object]) -> bool:
    try:
        call()
    except RunConflict:
        return False
    return True


def race_for_alias(store: ObjectStore, who: int, num_rounds: int) -> list[Outcome]:
    """The last to move it has won."""
    outcomes = []
    for number in range(num_rounds):
        meet()
        set_alias(store, "model", "best", Target(str(who), number, ""))
        meet()
        last = history(store, "model")[-1].target
        assert last.version == number
        outcomes.append((last.run == str(who), int(last.run)))
        meet()
    return outcomes


RACES: dict[str, Callable[[ObjectStore, int, int], list[Outcome]]] = {
    "4 KiB": race_for_key(4 << 10),
    "6 MiB": race_for_key(6 << 20),
    "lease": race_for_lease,
    "alias": race_for_alias,
}
