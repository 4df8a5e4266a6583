"""Who may look, and what a page may do: the layer that every request passes."""

import secrets
from http.cookies import SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HEADERS = {
    # Inline styles are Plotly's: it places what it draws by style attributes. Scripts come from this server alone.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """Lets GET and HEAD through. Without a token: to loopback names alone, so that no name of a stranger's that
    resolves to this machine (DNS rebinding) reaches it. With one: to whoever has it, from the URL of the first visit
    and from a cookie then; names are not looked at, for a stranger's name has no such cookie.
    """

    def __init__(self, app: ASGIApp, token: str = "") -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page only reads\n", 405, {"Allow": "GET, HEAD"})
        headers = Headers(scope=scope)
        if not self._token:
            if _host_name(headers.get("host", "")) in LOOPBACK:
                return None
            return PlainTextResponse("open this page by http://127.0.0.1, or start it with --host\n", 400)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if self._is_token(dict(query).get("token", "")):
            return self._welcome(scope, [(name, value) for name, value in query if name != "token"])
        cookie = SimpleCookie(headers.get("cookie", "")).get(_cookie_name(scope))
        if cookie is not None and self._is_token(cookie.value):
            return None
        return PlainTextResponse("open the address that `posttrain view` printed: it holds the token\n", 401)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())

    def _welcome(self, scope: Scope, query: list[tuple[str, str]]) -> Response:
        """The same page without the token in its address, where a history or a screenshot would keep it."""
        path = "/" + scope["path"].lstrip("/")  # never //elsewhere
        answer = RedirectResponse(f"{path}?{urlencode(query)}" if query else path, 303)
        # Lax, not Strict: a link from the Prefect UI should open, and there is nothing here but reading.
        answer.set_cookie(_cookie_name(scope), self._token, httponly=True, samesite="lax", path="/")
        return answer


def _host_name(host: str) -> str:
    """Of "name:port" or "[::1]:port"."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _cookie_name(scope: Scope) -> str:
    """Cookies are shared by all ports of a host, viewers should not be."""
    server = scope.get("server") or ("", 0)
    return f"posttrain_view_{server[1]}"
