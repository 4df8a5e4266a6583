"""Which waiting request goes to which server: the rule, without any input or output.

Of the servers with room, the one with the fewest outstanding tokens takes the next request. In this order it takes

    1. when it has nothing to do, a suspect (see `dispatch`), which then has the server to itself;
    2. the oldest request of a group that it has begun (its prompt's keys and values are cached there);
    3. the oldest request of a group that no server has begun;
    4. the newest request of a group that another server has begun: the one with the most requests waiting.

A group is the waiting requests with one prompt. So no room is left empty while requests wait; and because a server
finishes the groups it has begun before it begins another, fewer groups are split than there are servers, when all have
come at once and servers stay well.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from posttrain_core.sampling.protocol import Completion, SampleRequest

Prompt = tuple[int, ...]


@dataclass(eq=False)
class Job:
    """A request on its way."""

    request: SampleRequest
    answer: Callable[[Completion | Exception], None]  # called once
    losses: list[str] = field(default_factory=list)  # of the servers that were lost while they worked on it
    suspect: bool = False  # of being what the servers died of
    left: int = 0  # tokens that it costs its server still: the prompt, until it is computed, and new ones at most


@dataclass(eq=False)
class Lane:
    """What a server is doing. `capacity` is the number of requests it may be given; 0 while nothing may be sampled."""

    capacity: int = 0
    jobs: set[Job] = field(default_factory=set)
    outstanding: int = 0  # tokens of all jobs

    @property
    def room(self) -> int:
        if len(self.jobs) == 1 and next(iter(self.jobs)).suspect:
            return 0
        return self.capacity - len(self.jobs)

    def give(self, job: Job) -> None:
        self.jobs.add(job)
        job.left = len(job.request.prompt_ids) + job.request.max_new_tokens
        self.outstanding += job.left

    def advance(self, job: Job, num_tokens: int) -> None:
        """Tokens came; with the first of them the prompt is computed."""
        if num_tokens and job.left > job.request.max_new_tokens:
            num_tokens += len(job.request.prompt_ids)
        job.left -= num_tokens
        self.outstanding -= num_tokens

    def drop(self, job: Job) -> None:
        self.jobs.discard(job)
        self.outstanding -= job.left
        job.left = 0


AnyLane = TypeVar("AnyLane", bound=Lane)


def lightest(lanes: Sequence[AnyLane]) -> AnyLane | None:
    """The server that takes the next request."""
    return min((lane for lane in lanes if lane.room > 0), key=lambda lane: lane.outstanding, default=None)


class Waiting:
    """Requests that no server works on."""

    def __init__(self) -> None:
        self._suspects: deque[Job] = deque()
        self._fresh: dict[Prompt, deque[Job]] = {}
        self._begun: dict[Lane, dict[Prompt, deque[Job]]] = {}

    def put(self, job: Job) -> None:
        if job.suspect:
            self._suspects.append(job)
            return
        prompt = job.request.prompt_ids
        groups = next((groups for groups in self._begun.values() if prompt in groups), self._fresh)
        groups.setdefault(prompt, deque()).append(job)

    def take(self, lane: Lane) -> Job | None:
        """For the lightest server. None: there is nothing for any of them."""
        if self._suspects and not lane.jobs:
            return self._suspects.popleft()
        own = self._begun.setdefault(lane, {})
        if not own and self._fresh:
            prompt = next(iter(self._fresh))
            own[prompt] = self._fresh.pop(prompt)
        if own:
            prompt = next(iter(own))
            return _popped(own, prompt, own[prompt].popleft)
        others = [(groups, prompt) for groups in self._begun.values() for prompt in groups]
        if not others:
            return None
        groups, prompt = max(others, key=lambda place: len(place[0][place[1]]))
        return _popped(groups, prompt, groups[prompt].pop)

    def forget(self, lane: Lane) -> None:
        """The server is lost, and with it what it had cached."""
        for prompt, jobs in self._begun.pop(lane, {}).items():
            self._fresh.setdefault(prompt, deque()).extend(jobs)

    def remove(self, unwanted: set[Job]) -> None:
        self._suspects = deque(job for job in self._suspects if job not in unwanted)
        for groups in (self._fresh, *self._begun.values()):
            for prompt, jobs in list(groups.items()):
                kept = deque(job for job in jobs if job not in unwanted)
                groups[prompt] = kept
                if not kept:
                    del groups[prompt]

    def all(self) -> set[Job]:
        groups = (self._fresh, *self._begun.values())
        return {*self._suspects, *(job for places in groups for jobs in places.values() for job in jobs)}


def _popped(groups: dict[Prompt, deque[Job]], prompt: Prompt, pop: Callable[[], Job]) -> Job:
    job = pop()
    if not groups[prompt]:
        del groups[prompt]
    return job
