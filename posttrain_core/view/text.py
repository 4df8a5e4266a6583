"""Text that a model wrote, made safe for a page: characters that would not be seen as themselves by their escapes."""

import re
import unicodedata
from urllib.parse import quote, urlencode

from markupsafe import Markup, escape

from posttrain_core.inspect.text import visible

_KEPT = "\n\t"
_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+")


def seen(text: str, keep: str = _KEPT) -> Markup:
    """HTML whose text is `visible(text, keep)`; each escape is marked, so that it is told from the same characters
    written out, and names its character."""
    parts: list[Markup] = []
    plain = ""
    for char in text:
        shown = visible(char, keep)
        if shown == char:
            plain += char
            continue
        parts.append(escape(plain))
        parts.append(Markup('<span class="esc" title="{}">{}</span>').format(_name(char), shown))
        plain = ""
    return Markup("").join([*parts, escape(plain)])


def plain(value: object) -> object:
    """What Jinja puts into a page of a value: no hidden character comes through, wherever it is used."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return visible(value, keep=_KEPT)
    return value


def label(text: str) -> str:
    """For Plotly, which takes some HTML in its labels."""
    return str(escape(visible(text)))


def is_image(source: str) -> bool:
    """Whether a message's image can be shown: nothing is fetched from elsewhere."""
    return _IMAGE.fullmatch(source) is not None


def address(*parts: str, **query: object) -> str:
    """A path on this server; nothing for what is None or ""."""
    given = {name: value for name, value in query.items() if value not in (None, "")}
    path = "/" + "/".join(quote(part, safe="") for part in parts)
    return f"{path}?{urlencode(given)}" if given else path


def _name(char: str) -> str:
    return f"U+{ord(char):04X} {unicodedata.name(char, 'control character')}"
