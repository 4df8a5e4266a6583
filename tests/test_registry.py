"""Aliases: names that move, one object per model."""

import json
import threading
from pathlib import Path

import pytest

from posttrain_core import layout
from posttrain_core.errors import ObjectCorrupt, StoreError
from posttrain_core.registry import Target, history, reached, set_alias
from posttrain_core.store import ObjectStore
from posttrain_core.store.local import LocalStore
from posttrain_core.store.memory import MemoryStore

ONE, TWO = Target("r", 1, "d1"), Target("other", 2, "d2")


def aliases(store: ObjectStore, model: str) -> dict[str, Target]:
    found = json.loads(store.get(layout.registry(model)))["aliases"]
    return {alias: Target(**target) for alias, target in found.items()}


def test_an_alias_points_where_it_was_set_and_its_history_is_kept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert history(store, "math") == []
    set_alias(store, "math", "best", ONE)
    set_alias(store, "math", "best", TWO)
    set_alias(store, "math", "safe", ONE)
    assert aliases(store, "math") == {"best": TWO, "safe": ONE}
    assert history(store, "other") == []
    assert [(move.alias, move.target) for move in history(store, "math")] == [
        ("best", ONE),
        ("best", TWO),
        ("safe", ONE),
    ]


def test_moves_of_threads_are_all_made() -> None:
    store = MemoryStore()

    def move(who: int) -> None:
        for number in range(20):
            set_alias(store, "math", f"alias{who % 2}", Target(f"r{who}", number, "d"))

    threads = [threading.Thread(target=move, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    moves = [(move.target.run, move.target.version) for move in history(store, "math")]
    assert sorted(moves) == [(f"r{who}", number) for who in range(4) for number in range(20)]


class LosingStore(MemoryStore):
    """The answer of the first write is lost, and another process moves the alias before it is looked for."""

    def put_if_match(self, key: str, data: bytes, etag: str | None) -> str | None:
        new = super().put_if_match(key, data, etag)
        if b"mine" in data and b"theirs" not in data:
            set_alias(self, "math", "best", Target("theirs", 0, ""))
            return None
        return new


def test_a_move_whose_answer_was_lost_is_not_repeated() -> None:
    store = LosingStore()
    set_alias(store, "math", "best", Target("mine", 0, ""))
    assert [move.target.run for move in history(store, "math")] == ["mine", "theirs"]
    assert aliases(store, "math")["best"].run == "theirs"


def test_a_record_that_cannot_be_read_is_left_alone() -> None:
    store = MemoryStore()
    store.put(layout.registry("math"), b"[]")
    with pytest.raises(ObjectCorrupt, match=r"registry/math\.json"):
        set_alias(store, "math", "best", ONE)
    with pytest.raises(ObjectCorrupt, match=r"registry/math\.json"):
        reached(store)
    assert store.get(layout.registry("math")) == b"[]"
    with pytest.raises(StoreError, match="not a store key"):
        history(store, "../runs")
