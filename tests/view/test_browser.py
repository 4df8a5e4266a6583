"""The pages in a real browser: nothing that a model wrote runs, everything of it is seen, keys lead everywhere."""

from typing import Any

import pytest

from posttrain_core.inspect.text import visible
from tests.view.browser import Page
from tests.view.conftest import HOSTILE, TOKENS

PAGES = ("/", "/runs/{run}", "/runs/{run}/rollouts", "/runs/{run}/rollouts/{rollout}")
SHOWN = visible(HOSTILE, keep="\n\t")  # what every page should show of it


@pytest.fixture(autouse=True)
def _forget(page: Page) -> None:
    page.size(1280)
    page.complaints.clear()
    page.requests.clear()


def texts(page: Page, selector: str) -> list[str]:
    found: list[str] = page.run(f"[...document.querySelectorAll({selector!r})].map(each => each.textContent)")
    return found


@pytest.mark.parametrize("path", PAGES)
def test_nothing_hostile_runs_or_leaves_the_machine(page: Page, hostile: str, path: str) -> None:
    page.open(hostile + path.format(run="h", rollout="i00000.p0000.r00"))
    assert page.run("window.ran ?? null") is None
    assert page.complaints == []
    assert page.requests
    assert all(url.startswith((f"{hostile}/", "data:")) for url in page.requests)
    assert page.run("[...document.scripts].every(each => each.src && !each.textContent)")


def test_a_rollout_is_shown_as_it_was_written(page: Page, hostile: str) -> None:
    page.open(f"{hostile}/runs/h/rollouts/i00000.p0000.r00")
    turns = texts(page, ".turn > .text")
    assert turns == [SHOWN, SHOWN, SHOWN]  # the turn with the tool call says nothing else
    assert texts(page, ".call .text") == [SHOWN]
    assert texts(page, ".output") == [SHOWN, SHOWN]
    assert SHOWN in texts(page, "[aria-labelledby=verdict] .text")
    assert SHOWN in texts(page, "[aria-labelledby=execution] .text")
    assert texts(page, ".tokens .token") == [visible(token) for token in TOKENS]
    assert texts(page, ".flag")[0] == SHOWN
    assert "\\u202e" in texts(page, ".esc")
    assert page.run("document.querySelector('.turn .text .esc').title") == "U+001B control character"
    assert page.run("document.querySelectorAll('.turn img').length") == 1  # the other one is elsewhere
    assert page.run("document.querySelector('.turn img').naturalWidth") == 1


def test_no_hidden_character_is_anywhere_on_a_page(page: Page, hostile: str) -> None:
    for path in PAGES:
        page.open(hostile + path.format(run="h", rollout="i00000.p0000.r00"))
        whole = page.run("document.documentElement.outerHTML")
        assert not [char for char in whole if visible(char, keep="\n\t") != char]


def test_tokens_say_their_log_probability_to_pointers_and_keys(page: Page, hostile: str) -> None:
    page.open(f"{hostile}/runs/h/rollouts/i00000.p0000.r00")
    said = "document.getElementById('readout').textContent"
    page.run("document.querySelector('.tokens .token').focus()")
    assert page.run(said) == "token 0, id 0: log-probability -0.1000, chance 90.5 %, learned from"
    page.press("ArrowRight")
    assert page.run(said) == "token 1, id 1: log-probability -1.0000, chance 36.8 %, learned from"
    page.run("document.querySelectorAll('.tokens .token')[6].dispatchEvent(new Event('mouseover', {bubbles: true}))")
    assert page.run(said) == "token 6, id 6: log-probability -5.5000, chance 0.409 %, not learned from (mask 0)"
    assert page.run("document.querySelectorAll('.tokens .token.masked').length") == 1
    assert page.run("document.querySelectorAll('.tokens .token')[6].classList.contains('l4')")


def test_keys_lead_through_the_pages(page: Page, finished: str) -> None:
    page.open(f"{finished}/runs/r/rollouts")
    page.press("Tab")
    assert page.run("document.activeElement.className") == "skip"
    assert page.run("document.activeElement.getBoundingClientRect().left >= 0")
    page.run("document.querySelector('.rows .lead a').focus()")
    assert page.run("getComputedStyle(document.activeElement, '::after').outlineStyle") == "solid"
    page.go("Enter")
    assert page.run("document.querySelector('h1').textContent") == "i00003.p0000.r00"
    page.go("j")
    assert page.run("document.querySelector('h1').textContent") == "i00003.p0000.r01"
    page.go("ArrowRight")
    assert page.run("document.querySelector('h1').textContent") == "i00003.p0000.r02"
    page.go("k")
    assert page.run("document.querySelector('h1').textContent") == "i00003.p0000.r01"


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("path", PAGES)
def test_nothing_is_wider_than_the_screen(page: Page, finished: str, hostile: str, width: int, path: str) -> None:
    page.size(width)
    for address, run, rollout in ((finished, "r", "i00001.p0001.r01"), (hostile, "h", "i00000.p0000.r00")):
        page.open(address + path.format(run=run, rollout=rollout))
        assert (
            page.run("document.documentElement.scrollWidth")
            <= page.run("document.documentElement.clientWidth")
            <= width
        )
        assert page.complaints == []


def test_a_run_is_drawn(page: Page, finished: str) -> None:
    page.open(f"{finished}/runs/r")
    captions: list[Any] = page.run(
        "[...document.querySelectorAll('figure')].map(each => each.querySelector('figcaption').firstChild.textContent)"
    )
    assert captions[:5] == [
        "Training reward by iteration",
        "Held-out pass rate by policy version",
        "Held-out problems",
        "Stage timeline",
        "Where the time went",
    ]
    assert "entropy" in captions
    assert page.run("[...document.querySelectorAll('.plot')].every(each => each.querySelector('svg.main-svg'))")
    assert page.complaints == []


def test_a_live_run_is_followed_without_losing_the_place(page: Page, finished: str) -> None:
    page.open(f"{finished}/runs/r")
    page.run(
        "document.querySelector('[data-live]').dataset.version = 'older'; scrollTo({top: 900, behavior: 'instant'})"
    )
    page.run("document.querySelector('.plot').marked = true")
    before = page.run("scrollY")
    page.run("follow()")
    page.wait("document.querySelector('[data-live]').dataset.version !== 'older'")
    assert page.run("document.querySelector('.plot').marked")
    assert page.run("scrollY") == before > 0
    assert page.complaints == []
