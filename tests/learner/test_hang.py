"""Ranks that fall silent."""

import os
import signal
from pathlib import Path

import pytest

from posttrain_core.errors import LearnerFault
from tests.learner.llama import make_samples
from tests.learner.rank_group import Ranks

pytest.importorskip("deepspeed")


def test_a_rank_that_is_stopped_is_named_and_all_are_ended(two: Ranks, policy: Path) -> None:
    two.configure(zero_stage=2)
    two.load(policy)
    pids = two.group.pids
    two.group.stall_seconds = 2.0
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(LearnerFault) as caught:
        two.update(make_samples())
    text = str(caught.value)
    assert "no progress for 2 s (learner.stall_seconds)" in text
    assert text.index("learner rank 1 does not answer: it is stopped") < text.index("learner rank 0 is at")
    assert "deepspeed" in text[text.index("learner rank 0 is at") :]  # it waits for the other one in there
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
