"""Pages and charts without a browser: who is let in, what a list holds, what a chart says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from posttrain_core.inspect.timeline import Interval
from posttrain_core.store import ObjectStore, open_store
from posttrain_core.view.app import create_app
from posttrain_core.view.summaries import schedule
from tests.view.conftest import served


@pytest.fixture(scope="module")
def client(finished: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=finished, trust_env=False) as found:
        yield found


@pytest.fixture
def guarded(hostile_store: ObjectStore) -> Iterator[httpx.Client]:
    with served(create_app(hostile_store, token="let-me-in")) as address:
        with httpx.Client(base_url=address, trust_env=False) as found:
            yield found


# --- who is let in ---


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1.example.com", "localhost.example.com:80", "", "[::2]:1"])
def test_a_name_that_resolves_to_this_machine_is_refused(client: httpx.Client, host: str) -> None:
    assert client.get("/", headers={"Host": host}).status_code == 400


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8700", "127.0.0.1:1", "[::1]:8700"])
def test_loopback_names_are_served(client: httpx.Client, host: str) -> None:
    assert client.get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_is_written(client: httpx.Client, method: str) -> None:
    for path in ("/", "/runs/r", "/runs/r/state.json", "/static/view.js"):
        assert client.request(method, path).status_code == 405


@pytest.mark.parametrize("path", ["/", "/runs/r", "/runs/none", "/static/view.js", "/plotly.min.js", "/nothing"])
def test_every_answer_says_what_a_page_may_do(client: httpx.Client, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; ")
    assert "unsafe-eval" not in policy
    assert headers["x-content-type-options"] == "nosniff"


def test_a_token_is_demanded_and_then_kept_in_a_cookie(guarded: httpx.Client) -> None:
    for path in ("/", "/runs/h", "/static/view.js", "/?token=wrong", "/?token="):
        assert guarded.get(path).status_code == 401
    welcome = guarded.get("/runs/h/rollouts?token=let-me-in&order=lowest")
    assert (welcome.status_code, welcome.headers["location"]) == (303, "/runs/h/rollouts?order=lowest")
    cookie = welcome.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert guarded.get("/runs/h/rollouts").status_code == 200
    elsewhere = f"{guarded.base_url}//example.com/?token=let-me-in"
    assert guarded.get(elsewhere).headers["location"] == "/example.com/"


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/runs/..%2f.."])
def test_no_other_file_is_served(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code in (400, 404)


# --- what is found ---


def rollouts(client: httpx.Client, **query: Any) -> list[str]:
    """Ids on the first page of a list."""
    answer = client.get("/runs/r/rollouts", params=query)
    assert answer.status_code == 200
    return [part.partition("</a>")[0].partition(">")[2] for part in answer.text.split('class="lead"><a ')[1:]]


def test_the_list_begins_with_the_last_iteration(client: httpx.Client) -> None:
    found = rollouts(client)
    assert len(found) == 24
    assert {each[:6] for each in found} == {"i00003"}


@pytest.mark.parametrize(
    ("query", "where"),
    [
        ({"purpose": "eval", "iteration": "2"}, "purpose = 'eval' and iteration = 2"),
        ({"domain": "logic", "low": "0.5"}, "domain = 'logic' and reward >= 0.5"),
        ({"high": "0", "purpose": "eval"}, "reward <= 0 and purpose = 'eval'"),
        ({"text": "YES", "iteration": "3", "purpose": "train"}, "text = 'Yes' and iteration = 3 and purpose = 'train'"),
        ({"outcome": "truncated"}, "outcome = 'truncated'"),
    ],
)
def test_filters(client: httpx.Client, finished_run: Path, query: dict[str, str], where: str) -> None:
    from posttrain_core.inspect import Run

    wanted = Run(str(finished_run), "r").sql(f"select rollout_id from rollouts where {where}")["rollout_id"].to_pylist()
    found = rollouts(client, order="planned", **query)
    assert len(found) == min(50, len(wanted))
    assert set(found) <= set(wanted)


def test_pages_follow_each_other(client: httpx.Client) -> None:
    first, second, third = (rollouts(client, purpose="train", start=start) for start in (0, 50, 100))
    assert [len(first), len(second), len(third)] == [50, 46, 0]
    assert [*first, *second] == sorted({*first, *second})


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        ("/runs/none", 404, "no run &#39;none&#39;"),
        ("/runs/r/rollouts/i99999.p0000.r00", 400, "has no rollout"),
        ("/runs/r/rollouts?iteration=x", 400, "iteration &#39;x&#39;: it is a number"),
        ("/runs/r/rollouts?outcome=x", 400, "it is one of scored"),
        ("/runs/r/charts/none.json", 404, "no such chart"),
        ("/runs/r/charts/problems.json?purpose=x", 400, "it is one of train"),
    ],
)
def test_what_is_not_there_is_said(client: httpx.Client, path: str, code: int, words: str) -> None:
    answer = client.get(path)
    assert answer.status_code == code
    assert words in answer.text


def chart(client: httpx.Client, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get(f"/runs/r/charts/{name}").raise_for_status().json()["figures"]
    return found


def test_curves_have_the_rewards_of_each_domain(client: httpx.Client, finished_run: Path) -> None:
    from posttrain_core.inspect import Run

    query = (
        "select iteration, avg(reward) as mean from rollouts where domain = 'logic' and purpose = 'train' group by 1"
    )
    wanted = {row["iteration"]: row["mean"] for row in Run(str(finished_run), "r").sql(query).to_pylist()}
    (figure,) = chart(client, "rewards.json")
    lines = {line["name"]: line for line in figure["data"]}
    assert dict(zip(lines["logic"]["x"], lines["logic"]["y"], strict=True)) == pytest.approx(wanted)
    assert len(lines["logic, 95 % interval"]["x"]) == 2 * len(wanted)
    (held_out,) = chart(client, "held_out.json")
    assert {"all domains", "logic", "program"} <= {line["name"] for line in held_out["data"]}


def test_cells_of_the_heat_map_lead_to_their_rollouts(client: httpx.Client) -> None:
    (figure,) = chart(client, "problems.json?purpose=train")
    assert figure["links"] is not None
    links = [link for row in figure["links"] for link in row]
    values = [value for row in figure["data"][0]["z"] for value in row]
    assert len(links) == len(values) > 0
    link = links[next(place for place, value in enumerate(values) if value is not None)]
    assert 'class="lead"' in client.get(link).text


def test_a_run_that_goes_on_has_another_version(tmp_path: Path) -> None:
    from posttrain_core.layout import Scope
    from tests.view.conftest import _commit_rows, _hostile_rows, write_hostile_run

    store = open_store(str(tmp_path))
    write_hostile_run(store)
    with served(create_app(store)) as address, httpx.Client(base_url=address, trust_env=False) as client:
        before = client.get("/runs/h/state.json").json()
        assert client.get("/runs/h/state.json").json() == before
        steps = client.get("/runs/h/charts/rewards.json").json()["figures"][0]["data"][-1]["x"]
        for stage in ("plan", "generate", "execute", "verify"):
            _commit_rows(store, Scope(1), stage, _hostile_rows()[stage])
        assert client.get("/runs/h/state.json").json() != before
        assert client.get("/runs/h/charts/rewards.json").json()["figures"][0]["data"][-1]["x"] == [*steps, 1]


# --- time ---


def interval(stage: str, process: str, started: float, ended: float) -> Interval:
    return Interval(0, "train", stage, 0, "host", process, started, ended, {})


def test_idle_time_is_told_from_stops() -> None:
    found = schedule(
        [
            interval("plan", "a", 100.0, 101.0),
            interval("generate", "a", 103.0, 105.0),  # after two idle seconds
            interval("execute", "a", 104.0, 106.0),
            interval("update", "b", 500.0, 501.0),  # another process, much later
        ]
    )
    assert [(bar.start, bar.seconds) for bar in found.bars] == [(0, 1), (3, 2), (4, 2), (6, 1)]
    assert [(bar.start, bar.seconds) for bar in found.idle] == [(1, 2)]
    assert found.stops == [(6, 394)]
    assert found.seconds == 7
    assert found.shares() == {"plan": 1, "generate": 2, "execute": 2, "update": 1, "idle": 2}
    assert schedule([]).seconds == 0
