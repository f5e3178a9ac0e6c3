"""Real S3 servers for the tests that want one; nothing is set globally."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from castore.testing.s3server import S3Server, S3ServerError

# A machine that is busy is slow at any moment: no example has to be done within a time.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def _server(backend: str) -> Iterator[S3Server]:
    server = S3Server(bucket="test", backend=backend)
    try:
        server.start()
    except (FileNotFoundError, S3ServerError) as e:
        server.stop()
        if os.environ.get("CI") or not isinstance(e, FileNotFoundError):
            pytest.fail(f"{backend} is needed and does not start: {e}")
        pytest.skip(str(e))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3server() -> Iterator[S3Server]:
    """SeaweedFS; a skip where it is not installed, but a failure in CI."""
    yield from _server("seaweedfs")


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    """moto: AWS's answers to the letter, but no locks; for tests of one thread."""
    yield from _server("moto")


@pytest.fixture
def s3_options(s3server: S3Server) -> dict[str, Any]:
    """``storage_options`` for `s3_url`."""
    return s3server.fsspec_options()


@pytest.fixture
def s3_url(s3server: S3Server) -> str:
    """A prefix that is this test's own."""
    return f"s3://{s3server.bucket}/{secrets.token_hex(8)}"


@pytest.fixture
def s3_env(s3server: S3Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment that alone makes `s3_url` work, set for this test and its children."""
    env = s3server.env()
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return env
