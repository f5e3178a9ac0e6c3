"""What an S3 failure means, told without secrets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

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
    "EndpointConnectionError": "the server cannot be reached: check AWS_ENDPOINT_URL and the network",
    "ConnectTimeoutError": "the server cannot be reached: check AWS_ENDPOINT_URL and the network",
    "InvalidBucketName": "this is not a legal bucket name: check the URL",
    "ParamValidationError": "this is not a legal bucket or object name: check the URL",
}
_NEVER_SENT = {
    "NoCredentialsError", "PartialCredentialsError", "EndpointConnectionError",
    "ConnectTimeoutError", "ParamValidationError", "InvalidEndpointURLError",
}  # fmt: skip
_SECRET = re.compile(r"(?i)(x-amz-[a-z-]+|signature|credential|awsaccesskeyid)=[^&\s'\"]+")


class ShortRead(Exception):
    """An answer's body ended early."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A failed request: HTTP status (0: no answer), the server's or client's code, and a text."""

    status: int
    code: str
    text: str

    @property
    def missing(self) -> bool:
        return self.status == 404 and self.code != "NoSuchBucket"

    @property
    def passing(self) -> bool:
        """Whether asking again may help."""
        if self.status == 0:
            return self.code not in _NEVER_SENT or self.code == "EndpointConnectionError"
        return (
            self.status >= 500 or self.status == 429 or self.code in ("SlowDown", "RequestTimeout")
        )

    @property
    def unanswered(self) -> bool:
        """Whether a write may have happened all the same."""
        if self.status == 0:
            return self.code not in _NEVER_SENT
        return self.status >= 500 or self.code == "RequestTimeout"


def fault(error: BaseException) -> Fault:
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
            return Fault(status, code, _clean(f"{code}: {inner.get('Message', '')}"))
    names = [type(e).__name__ for e in chain]
    known = next((n for n in names if n in _ADVICE or n in _NEVER_SENT), names[0])
    return Fault(0, known, _clean(f"{names[0]}: {error}"))


def told(url: str, what: str, found: Fault) -> BackendError:
    """The error a user sees: what, where, why, what to do."""
    advice = _ADVICE.get(found.code)
    detail = f"{advice} ({found.text})" if advice else f"{found.text} (status {found.status})"
    return BackendError(f"{url}: could not {what}: {detail}")


def send_delete(url: str) -> tuple[int, str]:
    """Send a signed DELETE once; status 0 when no answer came. Honours AWS_CA_BUNDLE."""
    from botocore.awsrequest import AWSRequest

    try:
        answer = _session().send(AWSRequest(method="DELETE", url=url).prepare())
        return answer.status_code, answer.content.decode(errors="replace")[:500]
    except Exception as e:
        return 0, type(e).__name__


@lru_cache(maxsize=1)
def _session() -> Any:
    import os

    from botocore.httpsession import URLLib3Session

    verify: Any = os.environ.get("AWS_CA_BUNDLE", True)
    return URLLib3Session(verify=verify, timeout=(5, 60), max_pool_connections=32)


def _clean(text: str) -> str:
    return _SECRET.sub(r"\1=...", text)[:500]
