"""What an S3 failure means: was the request sent, was it answered, may it be sent again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from castore.backend import UnansweredError
from castore.backends._rules import scrub
from castore.errors import BackendError

_BUSY = {429, 500, 502, 503, 504}
_BUSY_CODES = {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling"}

_ADVICE = {
    "NoSuchBucket": "the bucket does not exist: check the URL and the endpoint, or make the bucket",
    "InvalidAccessKeyId": (
        "the store does not know these credentials: check AWS_ACCESS_KEY_ID (or key= in"
        " storage_options) and the endpoint"
    ),
    "SignatureDoesNotMatch": (
        "the secret key is wrong: check AWS_SECRET_ACCESS_KEY (or secret= in storage_options)"
    ),
    "AccessDenied": (
        "no permission: these credentials need to list, get, put and delete there (s3:ListBucket,"
        " s3:GetObject, s3:PutObject, s3:DeleteObject)"
    ),
    "ExpiredToken": "the credentials have expired: get fresh ones",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it right",
    "NotImplemented": "the store does not know this request; castore needs conditional writes",
}
_ADVICE["Forbidden"] = _ADVICE["AllAccessDisabled"] = _ADVICE["AccessDenied"]
_ADVICE["InvalidToken"] = _ADVICE["InvalidAccessKeyId"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the store said when it refused."""

    status: int
    code: str
    message: str


class SignedRequestError(Exception):
    """A signed delete was answered with anything but success."""

    def __init__(self, status: int, code: str, message: str):
        super().__init__(f"{status} {code}: {message}")
        self.answer = Answer(status, code, message)


def answer_of(error: BaseException) -> Answer | None:
    """The refusal behind ``error``, None when there was no answer."""
    for e in _chain(error):
        if isinstance(e, SignedRequestError):
            return e.answer
        response = getattr(e, "response", None)
        if isinstance(response, dict) and "ResponseMetadata" in response:
            said = response.get("Error", {})
            status = int(response["ResponseMetadata"].get("HTTPStatusCode", 0))
            return Answer(status, str(said.get("Code", "")), str(said.get("Message", "")))
    return None


def date_of(headers: Any) -> float | None:
    """Seconds since the epoch of an answer's ``Date``, None when it has none."""
    try:
        return parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return None


def is_busy(error: BaseException) -> bool:
    """Whether the store answered that it could not serve now: the write may have happened."""
    answer = answer_of(error)
    return answer is not None and (answer.status in _BUSY or answer.code in _BUSY_CODES)


def not_connected(error: BaseException) -> bool:
    """Whether the connection itself failed, so that nothing was sent.

    botocore's ``EndpointConnectionError`` alone does not say so: aiobotocore raises it for
    connections lost after the request, too.
    """
    import aiohttp
    from botocore import exceptions as boto

    if isinstance(error, boto.ConnectTimeoutError | boto.ProxyConnectionError | boto.SSLError):
        return True
    refused = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
    return any(isinstance(e, refused) for e in _chain(error))


def is_unanswered(error: BaseException) -> bool:
    """Whether the request may have been carried out though no clear answer came."""
    if answer_of(error) is not None:
        return is_busy(error)
    return _lost(error) and not not_connected(error)


def may_retry(error: BaseException) -> bool:
    """Whether the same read may do better in a moment."""
    return is_busy(error) if answer_of(error) is not None else _lost(error)


def explain(error: BaseException, doing: str, endpoint: str, secrets: list[str]) -> BackendError:
    """``error`` as a `BackendError` (or `UnansweredError`) that says what, where, and what next.

    Its ``__cause__`` is ``error``, or a harmless copy when the text holds a secret.
    """
    answer = answer_of(error)
    text = scrub(str(error), secrets)
    where = f" at {scrub(endpoint, secrets)}" if endpoint else ""
    if answer is None:
        advice = _without_answer(error, text)
    else:
        said = f"{answer.status} {answer.code}: {scrub(answer.message, secrets)}".strip(": ")
        code = answer.code if answer.code in _ADVICE else {403: "AccessDenied"}.get(answer.status)
        advice = f"{_ADVICE[code]} ({said})" if code else said
        if is_busy(error):
            advice = f"the store is busy or failing, try again later ({said})"
    kind = UnansweredError if is_unanswered(error) else BackendError
    result = kind(f"could not {doing}{where}: {advice}")
    result.__cause__ = error if text == str(error) else OSError(f"{type(error).__name__}: {text}")
    return result


def _without_answer(error: BaseException, text: str) -> str:
    name = type(error).__name__
    if "Credential" in name or "ProfileNotFound" in name:
        return (
            "no usable credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass key="
            f" and secret= as storage_options ({text})"
        )
    if not_connected(error):
        return f"cannot connect: check the network, the endpoint and any proxy ({text})"
    if _lost(error):
        return f"no answer came: check the network and try again ({name}: {text})"
    return f"{name}: {text}"


def _lost(error: BaseException) -> bool:
    import aiohttp
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    return isinstance(
        error,
        boto.HTTPClientError
        | boto.IncompleteReadError
        | ResponseParserError
        | aiohttp.ClientError
        | aiohttp.http_exceptions.HttpProcessingError
        | asyncio.TimeoutError
        | ConnectionError
        | EOFError,
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        yield current
        seen.add(id(current))
        current = current.__cause__ or current.__context__
