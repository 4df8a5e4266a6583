"""A run, a fork of it, gc and fsck on an S3 server."""

from posttrain_core.care.delete import delete_run
from posttrain_core.care.fsck import check_run
from posttrain_core.care.gc import Kind, find_garbage, remove_garbage
from posttrain_core.store import open_store
from tests.care.stores import digests, forked, train
from tests.crash.test_kills import scripted


def test_fork_gc_and_fsck(s3_url: str) -> None:
    config = scripted(
        s3_url, iterations=2, checkpoint={"every": 1, "keep_last": 2}, eval={"every": 9, "num_problems": 2}
    )
    train(config)
    fork, made = forked(config, 1, "f")
    assert made.checkpoint == 0
    train(fork)
    assert digests(s3_url, "f") == digests(s3_url, "r")
    store = open_store(s3_url)
    assert find_garbage(store, 0) == []
    delete_run(store, "r")
    done = remove_garbage(store, 0)
    assert {item.kind for item in done.garbage} == {Kind.GONE}
    assert done.left == {}
    assert check_run(store, "f").findings == []
    assert not [info.key for info in store.list("runs/r/manifests/")]
