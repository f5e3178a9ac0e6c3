"""What an S3 failure means, told without secrets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from castore.backends._rules import scrub
from castore.errors import BackendError

_ADVICE = {
    "NoSuchBucket": "the bucket does not exist: check the URL (castore makes no buckets)",
    "InvalidAccessKeyId": "the access key is not known there: check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret key is wrong: check AWS_SECRET_ACCESS_KEY",
    "InvalidToken": "the session token is not valid: log in again",
    "ExpiredToken": "the session token has expired: log in again",
    "RequestTimeTooSkewed": "this machine's clock is off by over 15 minutes: set it right",
    "PermanentRedirect": "the bucket is in another region: check AWS_REGION",
    "AuthorizationHeaderMalformed": "the bucket is in another region: check AWS_REGION",
    "AccessDenied": "no permission: ask the bucket's owner for read (and for writing, put and"
    " delete) rights",
    "NoCredentialsError": "no credentials were found: set AWS_ACCESS_KEY_ID and"
    " AWS_SECRET_ACCESS_KEY, or log in",
    "PartialCredentialsError": "the credentials are incomplete: set AWS_ACCESS_KEY_ID and"
    " AWS_SECRET_ACCESS_KEY",
    **dict.fromkeys(
        ("EndpointConnectionError", "ConnectTimeoutError", "ConnectionTimeoutError"),
        "the server cannot be reached: check AWS_ENDPOINT_URL and the network",
    ),
    "SSLError": "the server's certificate is not trusted: check AWS_CA_BUNDLE and the URL",
    "ProxyConnectionError": "the proxy cannot be reached: check HTTPS_PROXY and NO_PROXY",
    "NotImplemented": "the store does not know this request: castore needs conditional writes",
    "InvalidBucketName": "this is not a legal bucket name: check the URL",
    "RecursionError": "the server redirects every request: check AWS_ENDPOINT_URL (http or https)"
    " and AWS_REGION",
    "ParamValidationError": "this is not a legal bucket or object name: check the URL",
}
_NOT_CONNECTED = {
    "ClientConnectorError", "ConnectionTimeoutError", "ConnectTimeoutError", "ProxyConnectionError",
    "SSLError",
}  # fmt: skip
"""Not ``EndpointConnectionError``: aiobotocore says so, too, when the connection broke later."""
_NEVER_SENT = _NOT_CONNECTED | {
    "CredentialRetrievalError", "EndpointResolutionError", "InvalidEndpointURLError",
    "InvalidRegionError", "NoCredentialsError", "NoRegionError", "ParamValidationError",
    "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError",
    "RecursionError",
}  # fmt: skip
"""And what the server never acted on: botocore follows redirects until it can no more."""


class ShortRead(Exception):
    """An answer's body ended early."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A failed request: HTTP status (0: no answer), the server's or client's code, and a text."""

    status: int
    code: str
    text: str
    sent: bool = True

    @property
    def missing(self) -> bool:
        """Whether the name, or the bucket where the answer had no body, is not there."""
        return self.status == 404 and self.code != "NoSuchBucket"

    @property
    def passing(self) -> bool:
        """Whether asking again may help."""
        if self.status == 0:
            return self.sent or self.code == "EndpointConnectionError"
        return self.status == 429 or self.code == "SlowDown" or self.unanswered

    @property
    def unanswered(self) -> bool:
        """Whether a write may have happened all the same."""
        if self.status == 0:
            return self.sent
        return (self.status >= 500 and self.status != 501) or self.code == "RequestTimeout"


def fault(error: BaseException, secrets: list[str] | None = None) -> Fault:
    """The failure behind an exception of s3fs, which keeps botocore's as its cause."""
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or at.__context__
    for e in chain:
        response: Any = getattr(e, "response", None)
        if isinstance(response, dict) and "ResponseMetadata" in response:
            inner = response.get("Error", {})
            status = int(response["ResponseMetadata"].get("HTTPStatusCode", 0))
            code = str(inner.get("Code", status))
            code = "AccessDenied" if code == "403" else code
            text = f"{code}: {inner.get('Message', '')}"
            return Fault(status, code, scrub(text, secrets or [])[:500])
    names = [c.__name__ for e in chain for c in type(e).__mro__]
    known = next((n for n in names if n in _ADVICE or n in _NEVER_SENT), names[0])
    text = scrub(f"{names[0]}: {error}", secrets or [])[:500]
    return Fault(0, known, text, sent=not _NEVER_SENT & set(names))


def told(url: str, what: str, found: Fault) -> BackendError:
    """The error a user sees: what, where, why, what to do."""
    advice = _ADVICE.get(found.code)
    detail = f"{advice} ({found.text})" if advice else f"{found.text} (status {found.status})"
    return BackendError(f"{url}: could not {what}: {detail}")
