"""What makes a URL one that a daemon may call: a scheme, a host, and no secret in its text. Pure."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

from rpcagent.errors import InvalidParams


def checked_url(url: str, path: str, credentials_go: str) -> SplitResult:
    """The pieces of an http or https URL. Raises InvalidParams at `path`; `credentials_go` ends the sentence that says where
    a user name and a password belong instead."""
    try:
        pieces = urlsplit(url)
        host, _ = pieces.hostname, pieces.port
    except ValueError:
        raise InvalidParams("this is no URL", path=path) from None
    if pieces.scheme not in {"http", "https"}:
        raise InvalidParams("the scheme is http or https", path=path)
    if not host or not re.fullmatch(r"[\x21-\x7e]+", url):
        raise InvalidParams("this is no URL", path=path)
    if pieces.username is not None or pieces.password is not None:
        raise InvalidParams(f"credentials go into {credentials_go}", path=path)
    if pieces.fragment or "#" in url:
        raise InvalidParams("a fragment is never sent", path=path)
    return pieces
