"""Small rules that every backend keeps: size limit, byte ranges, and no secrets in what is kept."""

from __future__ import annotations

import re
from typing import Any

from castore.backend import MAX_OBJECT
from castore.digest import Buffer
from castore.errors import InvalidInputError

_SECRET = re.compile(
    r"^(key|apikey|username|user|sas|pwd)$|key_id|_key$|customerkey|secret|token|passw|passphrase"
    r"|credential|session|auth|connection_?string|cookie",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"//[^/@\s\"']*@")
_SIGNED = re.compile(r"\?[^\s\"'>]*(?:Signature|X-Amz-|AWSAccessKeyId)[^\s\"'>]*", re.IGNORECASE)


def refuse_large(name: str, *parts: Buffer, limit: int = MAX_OBJECT) -> None:
    """`InvalidInputError` for parts of more than ``limit`` bytes together."""
    size = sum(memoryview(part).nbytes for part in parts)
    if size > limit:
        raise InvalidInputError(
            f"{name}: {size} bytes, but one stored object has at most {limit}: cut it first"
        )


def span(start: int | None, stop: int | None) -> tuple[int, int | None]:
    """``[start, stop)`` with a definite start; negative bounds are `InvalidInputError`."""
    if (start or 0) < 0 or (stop or 0) < 0:
        raise InvalidInputError(f"range [{start}, {stop}): expected bounds of zero or more")
    return start or 0, stop


def without_secrets(options: Any) -> Any:
    """``options`` less everything that is named like a secret, at any depth, and user info in URLs.

    The environment (``AWS_*`` and the like) stands in for what is left out.
    """
    if isinstance(options, dict):
        return {k: without_secrets(v) for k, v in options.items() if not _SECRET.search(str(k))}
    if isinstance(options, list | tuple):
        return type(options)(without_secrets(v) for v in options)
    return _USERINFO.sub("//", options) if isinstance(options, str) else options


def secrets_in(options: Any) -> list[str]:
    """The values that `without_secrets` would leave out and that are worth scrubbing."""
    found: list[str] = []
    for key, value in options.items() if isinstance(options, dict) else ():
        if isinstance(value, dict):
            found += secrets_in(value)
        elif isinstance(value, str) and len(value) > 3 and _SECRET.search(str(key)):
            found.append(value)
    return found


def scrub(text: str, secrets: list[str]) -> str:
    """``text`` less ``secrets``, user info and the queries of signed URLs."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return _SIGNED.sub("?***", _USERINFO.sub("//", text))
