"""The pages and the JSON behind their charts. Each answer is of what is committed by the time that it is asked for."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from posttrain_core.errors import ConfigError, PosttrainError
from posttrain_core.inspect.catalogue import Run, list_runs
from posttrain_core.inspect.evaluation import evaluations
from posttrain_core.inspect.metrics import held_out_passes, iteration_metrics
from posttrain_core.inspect.status import status
from posttrain_core.inspect.timeline import intervals
from posttrain_core.records import Outcome, Purpose
from posttrain_core.store import ObjectStore
from posttrain_core.view import figures, listing, summaries
from posttrain_core.view.figures import Figure
from posttrain_core.view.guard import Guard
from posttrain_core.view.listing import Filters
from posttrain_core.view.rollout import CHANCES, as_text, rollout_page, tool_calls
from posttrain_core.view.text import address, is_image, plain, seen

_HERE = Path(__file__).parent
_WINDOW = 20  # iterations of the timeline
_NUM_ANSWERS = 64  # kept


class Viewer:
    """The handlers, and what they keep between two requests."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._runs: dict[str, Run] = {}
        self._rewards = summaries.Rewards()
        self._answers: OrderedDict[tuple[str, ...], list[Figure]] = OrderedDict()
        self._lock = threading.Lock()
        self._pages = _pages()

    @property
    def routes(self) -> list[Route | Mount]:
        run = "/runs/{run}"
        return [
            Route("/", self.runs),
            Route(run, self.run),
            Route(f"{run}/rollouts", self.rollouts),
            Route(f"{run}/rollouts/{{rollout}}", self.rollout),
            Route(f"{run}/state.json", self.state),
            Route(f"{run}/charts/{{chart}}.json", self.chart),
            Route("/plotly.min.js", plotly),
            Mount("/static", StaticFiles(directory=_HERE / "static")),
        ]

    # --- pages ---

    def runs(self, _: Request) -> Response:
        found = [status(run) for run in reversed(list_runs(self._store))]
        return self._page("runs.html", store=self._store.url, runs=found)

    def run(self, request: Request) -> Response:
        run = self._run(request)
        found = status(run)
        last = max(run.iterations, default=0)
        first = max(0, last + 1 - _WINDOW)
        return self._page(
            "run.html",
            run=run.name,
            status=found,
            version=_version(run),
            first=first,
            last=last,
            held_out=found.evaluated,
        )

    def rollouts(self, request: Request) -> Response:
        run = self._run(request)
        filters = listing.parse_filters(request.query_params) if request.query_params else _newest(run)
        start = max(0, _whole(request, "start", 0))
        num = listing.count(run, filters)
        rows = listing.page(run, filters, start) if start < num else []
        return self._page(
            "rollouts.html",
            run=run.name,
            filters=filters,
            rows=rows,
            start=start,
            num=num,
            page_size=listing.PAGE,
            domains=sorted(run.config.domains),
            orders={key: title for key, (title, _) in listing.ORDERS.items()},
            outcomes=[str(outcome) for outcome in Outcome],
            purposes=[str(purpose) for purpose in Purpose],
        )

    def rollout(self, request: Request) -> Response:
        run, rollout_id = self._run(request), request.path_params["rollout"]
        found = rollout_page(run, rollout_id)
        filters = listing.parse_filters(request.query_params)
        place = _whole(request, "at", -1)
        if place < 0:
            filters = Filters(str(found.rollout.purpose), found.rollout.policy_version)
            place = listing.place_of(run, rollout_id, filters)
        before, after = listing.neighbours(run, filters, place)
        return self._page(
            "rollout.html",
            run=run.name,
            page=found,
            filters=filters,
            place=place,
            before=before,
            after=after,
            back=place // listing.PAGE * listing.PAGE,
            chances=CHANCES,
        )

    # --- JSON ---

    def state(self, request: Request) -> Response:
        run = self._run(request)
        return JSONResponse({"version": _version(run)})

    def chart(self, request: Request) -> Response:
        make = _CHARTS.get(request.path_params["chart"])
        if make is None:
            raise HTTPException(404, "no such chart")
        run = self._run(request)
        key = (run.name, _version(run), request.url.path, request.url.query)
        with self._lock:
            found = self._answers.get(key)
        if found is None:
            found = make(self, run, request)
            with self._lock:
                self._answers[key] = found
                while len(self._answers) > _NUM_ANSWERS:
                    self._answers.popitem(last=False)
        return JSONResponse({"figures": [asdict(figure) for figure in found]})

    def rewards(self, run: Run, _: Request) -> list[Figure]:
        return [figures.reward_figure(self._rewards.of(run))]

    def held_out(self, run: Run, _: Request) -> list[Figure]:
        return [figures.held_out_figure(evaluations(held_out_passes(run)))]

    def problems(self, run: Run, request: Request) -> list[Figure]:
        purpose = Purpose(listing.parse_filters({"purpose": request.query_params.get("purpose", "")}).purpose or "eval")
        found = summaries.pass_rates(run, purpose, max(0, _whole(request, "start", 0)))
        return [figures.heat_map(run.name, found, str(purpose))]

    def time(self, run: Run, request: Request) -> list[Figure]:
        last = _whole(request, "last", max(run.iterations, default=0))
        first = _whole(request, "first", max(0, last + 1 - _WINDOW))
        found = summaries.schedule(intervals(run, range(first, last + 1)))
        return [figures.timeline_figure(found), figures.time_figure(found)]

    def metrics(self, run: Run, _: Request) -> list[Figure]:
        return figures.metric_figures(summaries.metric_series(iteration_metrics(run)))

    # --- parts ---

    def _run(self, request: Request) -> Run:
        """As it is now, with what was read of it before."""
        name = request.path_params["run"]
        known = self._runs.get(name)
        run = known.renewed() if known is not None else Run(self._store, name)
        try:
            _ = run.record
        except ConfigError as error:
            raise HTTPException(404, str(error)) from None
        self._runs[name] = run
        return run

    def _page(self, template: str, code: int = 200, **values: Any) -> Response:
        text = self._pages.get_template(template).render(values)
        return HTMLResponse(text, code, {"Cache-Control": "no-store"})

    async def failed(self, _: Request, error: Exception) -> Response:
        """What went wrong, in words, for what has a name."""
        if isinstance(error, HTTPException):
            return self._page("error.html", error.status_code, message=str(error.detail))
        return self._page("error.html", 400 if isinstance(error, ConfigError) else 500, message=str(error))


_CHARTS: dict[str, Callable[[Viewer, Run, Request], list[Figure]]] = {
    "rewards": Viewer.rewards,
    "held_out": Viewer.held_out,
    "problems": Viewer.problems,
    "time": Viewer.time,
    "metrics": Viewer.metrics,
}


def create_app(store: ObjectStore, token: str = "") -> ASGIApp:
    """An ASGI application; with a token only for those who have it, else only for this machine's loopback names."""
    viewer = Viewer(store)
    handlers: dict[Any, Any] = {HTTPException: viewer.failed, PosttrainError: viewer.failed}
    return Guard(Starlette(routes=viewer.routes, exception_handlers=handlers), token)


def plotly(_: Request) -> Response:
    """From Plotly's own package, which need not be imported for it."""
    spec = find_spec("plotly")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "package_data" / "plotly.min.js"
    return FileResponse(path, media_type="text/javascript", headers={"Cache-Control": "max-age=86400"})


def _pages() -> Environment:
    pages = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=plain,
    )
    pages.filters.update(seen=seen, as_text=as_text, tool_calls=tool_calls, number=_number)
    pages.globals.update(address=address, is_image=is_image)
    return pages


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"


def _newest(run: Run) -> Filters:
    """The last iteration that has rollouts: what a list begins with, for it costs little however long the run is."""
    last = [scope.iteration for scope in run.scopes(Purpose.TRAIN, "generate")][-1:]
    return replace(Filters(str(Purpose.TRAIN)), iteration=last[0]) if last else Filters()


def _whole(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, "").strip()
    try:
        return int(text) if text else default
    except ValueError:
        raise ConfigError(f"{name} {text!r}: it is a whole number") from None


def _version(run: Run) -> str:
    """Another one whenever something was committed."""
    return hashlib.sha256(repr(list(run.committed.items())).encode()).hexdigest()[:16]
