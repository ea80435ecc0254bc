"""Where a chat-completions endpoint is and how it is addressed: the URL, the headers, the secrets of one call.

Knows: `ModelSettings` and the environment. Does not know: messages, answers, or any HTTP library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit, urlunsplit

import msgspec

from rpcagent.errors import InvalidParams
from rpcagent.models.redaction import NAME, REFERENCE, Secrets, names_in
from rpcagent.runs.definition import ModelSettings
from rpcagent.runs.instants import LONGEST_MS
from rpcagent.urls import checked_url

OPENAI_URL = "https://api.openai.com/v1"
OPENAI_KEY = "OPENAI_API_KEY"
PATH = "/chat/completions"

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")
_OURS = frozenset(
    {"host", "content-length", "content-type", "transfer-encoding", "connection", "accept-encoding", "accept"}
)
_SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "api-key", "x-api-key", "cookie"})
_SECRET_QUERY = re.compile(r"(?:^|&)(?:api[-_]?key|key|token|access_token|code|sig|signature)=", re.IGNORECASE)
_NOT_OPTIONS = frozenset({"model", "messages", "tools", "functions", "stream", "n"})


class MissingSecret(Exception):
    """The environment does not have what the settings refer to; nothing was sent."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One call's way out. `host` is what messages name."""

    url: str
    host: str
    headers: dict[str, str]
    secrets: Secrets
    environment_proxy: bool

    def __repr__(self) -> str:
        return f"Endpoint({self.host})"  # the headers hold secrets


def endpoint_of(settings: ModelSettings, environ: Mapping[str, str]) -> Endpoint:
    """The endpoint, with the secrets as the environment holds them now. Raises MissingSecret.

    An empty `base_url` is OpenAI's, and its key is then OPENAI_API_KEY unless another is named.
    """
    base_url, key_name, headers = (
        settings.base_url,
        settings.api_key_env,
        settings.headers,
    )
    if not base_url:
        base_url, key_name = OPENAI_URL, key_name or OPENAI_KEY
    sent = {"Authorization": f"Bearer ${{{key_name}}}"} if key_name else {}
    taken = {name.lower() for name in headers}
    sent = {name: value for name, value in sent.items() if name.lower() not in taken} | headers
    names = names_in(sent.values())
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise MissingSecret(f"The environment of the daemon has no {', '.join(missing)}.")
    values = {name: environ[name] for name in names}
    unfit = [name for name, value in values.items() if not _HEADER_VALUE.fullmatch(value)]
    if unfit:
        raise MissingSecret(f"{', '.join(unfit)} holds something that no header can carry.")
    secrets = Secrets(values)
    pieces = urlsplit(base_url)
    return Endpoint(
        url=completions_url(base_url),
        host=pieces.netloc,
        headers={name: secrets.filled(value) for name, value in sent.items()},
        secrets=secrets,
        environment_proxy=bool(getattr(settings, "environment_proxy", False)),
    )


def completions_url(base_url: str) -> str:
    """The URL that is posted to; a query in `base_url` (an API version, say) stays."""
    scheme, netloc, path, query, _ = urlsplit(base_url)
    path = path.rstrip("/")
    return urlunsplit((scheme, netloc, path if path.endswith(PATH) else path + PATH, query, ""))


def check_endpoint(settings: ModelSettings, path: str) -> None:
    """Raises InvalidParams where these settings could never reach anybody, or would put a secret into the log."""
    _check_url(settings.base_url, f"{path}.baseUrl")
    key_name = settings.api_key_env
    if key_name and not NAME.fullmatch(key_name):
        raise InvalidParams("this is the name of an environment variable, not the key itself", path=f"{path}.apiKeyEnv")
    for name, value in settings.headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise InvalidParams(f"{name!r} is no header", path=f"{path}.headers")
        if name.lower() in _OURS:
            raise InvalidParams(f"{name} is set by the daemon", path=f"{path}.headers")
        if name.lower() in _SECRET_HEADERS and not REFERENCE.search(value):
            raise InvalidParams(f"{name} takes its secret from the environment, as ${{NAME}}", path=f"{path}.headers")
    for name in settings.options:
        if name in _NOT_OPTIONS:
            raise InvalidParams(f"{name} is set by the daemon", path=f"{path}.options")
    for name in ("connect", "first_token", "idle"):
        if not 1 <= getattr(settings, f"{name}_timeout_ms") <= LONGEST_MS:
            raise InvalidParams(f"a time limit is 1 to {LONGEST_MS} ms", path=f"{path}.{_camel(name)}TimeoutMs")


def _check_url(url: str, path: str) -> None:
    if not url:
        return
    pieces = checked_url(url, path, "apiKeyEnv, or into a header as ${NAME}")
    if _SECRET_QUERY.search(pieces.query):
        raise InvalidParams("a secret in a URL would be recorded; put it into a header, as ${NAME}", path=path)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
