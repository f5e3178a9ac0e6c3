"""Ed25519 signatures over a receipt's canonical bytes. Optional; needs ``cryptography``.

A signature says that the holder of a key vouches for these bytes, and nothing about the science.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castore import BackendError, InvalidInputError
from castore_receipts.documents import sealed_body

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ALGORITHM = "ed25519"
_DOMAIN = b"castore-receipt/1\n"
_PUBLIC_KEY, _VALUE = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{128}")
_FIELDS = {"algorithm", "public_key", "value"}
_END = b"-----END PUBLIC KEY-----"


def available() -> bool:
    """Whether signatures can be made and checked here."""
    from importlib.util import find_spec

    return find_spec("cryptography") is not None


def _need() -> None:
    if not available():
        raise InvalidInputError("signatures need cryptography: pip install 'castore[receipts]'")


def load_private(path: str | os.PathLike[str]) -> Ed25519PrivateKey:
    """The private key in a PEM file (``openssl genpkey -algorithm ed25519``).

    Raises
    ------
    InvalidInputError
        No unencrypted Ed25519 key; the message never shows the file's content.
    """
    _need()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError) as e:
        raise InvalidInputError(f"{path} holds no unencrypted private key in PEM form") from e
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidInputError(f"{path} holds another kind of key: expected Ed25519")
    return key


def load_trusted(path: str | os.PathLike[str]) -> frozenset[str]:
    """The public keys (hex of 32 bytes) in a file of one or more PEM blocks."""
    _need()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    found = set()
    for block in _read(path).split(_END)[:-1]:
        try:
            key = load_pem_public_key(block.strip() + b"\n" + _END + b"\n")
        except ValueError as e:
            raise InvalidInputError(f"{path} holds a block that is no public key") from e
        if not isinstance(key, Ed25519PublicKey):
            raise InvalidInputError(f"{path} holds another kind of key: expected Ed25519")
        found.add(key.public_bytes_raw().hex())
    if not found:
        raise InvalidInputError(f"{path} holds no public key in PEM form")
    return frozenset(found)


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise BackendError(f"{os.fspath(path)} cannot be read: {e.strerror}") from e


def sign(receipt: Mapping[str, Any], key: Ed25519PrivateKey) -> dict[str, Any]:
    """The receipt with a ``signature`` over its sealed body."""
    value = key.sign(_DOMAIN + sealed_body(receipt))
    public = key.public_key().public_bytes_raw().hex()
    signature = {"algorithm": ALGORITHM, "public_key": public, "value": value.hex()}
    return {**receipt, "signature": signature}


def holds(receipt: Mapping[str, Any]) -> bool:
    """Whether the signature in a receipt is one over its body by the key that it names.

    A signature is not part of what it is taken over, so only its one spelling counts: other
    letters, spaces or fields in it are a change that nothing else would show.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    signature: Any = receipt.get("signature")
    if not _well_spelled(signature):
        return False
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature["public_key"]))
        public.verify(bytes.fromhex(signature["value"]), _DOMAIN + sealed_body(receipt))
    except (InvalidSignature, ValueError, TypeError, KeyError):
        return False
    return True


def _well_spelled(signature: Any) -> bool:
    if not isinstance(signature, Mapping) or signature.keys() != _FIELDS:
        return False
    public, value = signature["public_key"], signature["value"]
    if not isinstance(public, str) or not isinstance(value, str):
        return False
    hexadecimal = _PUBLIC_KEY.fullmatch(public) and _VALUE.fullmatch(value)
    return signature["algorithm"] == ALGORITHM and hexadecimal is not None


def signer(receipt: Mapping[str, Any]) -> str:
    """The public key a signature names."""
    signature = receipt.get("signature")
    return str(signature.get("public_key")) if isinstance(signature, Mapping) else ""


def trusted_keys(paths: Sequence[str | os.PathLike[str]]) -> frozenset[str] | None:
    """All keys of several files; None where none was named, so that trust is not checked."""
    if not paths:
        return None
    return frozenset().union(*(load_trusted(p) for p in paths))
