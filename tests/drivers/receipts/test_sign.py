"""Signatures: unsigned, another's key and tampered are three different verdicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from castore import BackendError, InvalidInputError
from castore_receipts import documents, expand_receipt, verify_all, verify_receipt
from castore_receipts.sign import holds, load_private, load_trusted, sign
from tests.drivers.receipts import runs


def key(folder: Path, name: str) -> tuple[Path, Path]:
    """A private and a public key file."""
    private = Ed25519PrivateKey.generate()
    secret, public = folder / f"{name}.key", folder / f"{name}.pem"
    secret.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(
        private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    return secret, public


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("keys")
    return {name: key(folder, name) for name in ("lab", "other")}


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory, keys: Any) -> Path:
    root = tmp_path_factory.mktemp("signed") / "run"
    made = runs.run(root, 20, sign_with=keys["lab"][0])
    made.final_evaluation()
    return root


def verdicts(place: Path, *trust: Path) -> tuple[str, str]:
    found = verify_receipt(place, trust=trust)
    return found["signature"].verdict, found["signer"].verdict


def test_three_verdicts(signed: Path, made: Path, keys: Any, tmp_path: Path) -> None:
    at, lab, other = runs.folder(signed, 20), keys["lab"][1], keys["other"][1]
    assert verdicts(at, lab) == ("ok", "ok")
    assert verdicts(at, other, lab) == ("ok", "ok")
    assert verdicts(at, other) == ("ok", "mismatch"), "another's key"
    assert verdicts(runs.folder(made, 20), lab) == ("missing", "missing"), "unsigned"
    assert verdicts(at) == ("ok", "not-checked")
    receipt = runs.read(at)
    forged = documents.seal(
        {k: v for k, v in receipt.items() if k not in documents.SEALS} | {"seconds": 1.0}
    )
    place = tmp_path / "step_0000020"
    place.mkdir()
    (place / "receipt.json").write_bytes(
        documents.encode({**forged, "signature": receipt["signature"]})
    )
    assert verdicts(place, lab) == ("mismatch", "ok"), "tampered"
    own = sign(forged, load_private(keys["other"][0]))
    (place / "receipt.json").write_bytes(documents.encode(own))
    assert verdicts(place, lab) == ("ok", "mismatch"), "signed again by somebody else"
    (place / "receipt.json").write_bytes(documents.encode(forged))
    assert verdicts(place, lab) == ("missing", "missing"), "signature taken away"


def test_every_receipt_of_a_run_is_signed(signed: Path, keys: Any, tmp_path: Path) -> None:
    found = list(verify_all([signed, signed / ".castore"], trust=[keys["lab"][1]]))
    assert len(found) == 4
    assert all(r.sound for r in found)
    receipt, _ = expand_receipt(signed, 20, tmp_path / "wide", sign_with=keys["other"][0])
    assert verdicts(runs.folder(tmp_path / "wide", 20), keys["other"][1]) == ("ok", "ok")
    assert receipt["signature"]["public_key"] in load_trusted(keys["other"][1])


@pytest.mark.parametrize("value", ["", "zz", "00" * 64, None, 5, "00" * 63])
def test_a_malformed_signature_is_a_mismatch(
    signed: Path, keys: Any, tmp_path: Path, value: Any
) -> None:
    receipt = runs.read(runs.folder(signed, 20))
    receipt["signature"]["value"] = value
    place = tmp_path / "step_0000020"
    place.mkdir()
    (place / "receipt.json").write_bytes(documents.encode(receipt))
    assert verdicts(place, keys["lab"][1]) == ("mismatch", "ok")


SPELLINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "capitals": lambda s: s.update(value=s["value"].upper()),
    "one capital of the key": lambda s: s.update(public_key=s["public_key"].upper()),
    "a space": lambda s: s.update(value=s["value"] + " "),
    "a field more": lambda s: s.update(note="x"),
}


@pytest.mark.parametrize("change", SPELLINGS.values(), ids=SPELLINGS)
def test_a_signature_has_one_spelling(
    signed: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    """It covers the document but itself: another spelling of it is tampering that it must show."""
    receipt = runs.read(runs.folder(signed, 20))
    assert holds(receipt)
    change(receipt["signature"])
    assert not holds(receipt)


def test_keys_that_are_none_are_refused_without_showing_them(tmp_path: Path, keys: Any) -> None:
    text = tmp_path / "text"
    text.write_text("hunter2")
    locked = tmp_path / "locked"
    locked.write_bytes(
        Ed25519PrivateKey.generate().private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")
        )
    )
    curve = tmp_path / "curve"
    curve.write_bytes(
        generate_private_key(SECP256R1()).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )
    )
    for path in (text, locked, curve, keys["lab"][1]):
        with pytest.raises(InvalidInputError) as found:
            load_private(path)
        assert "hunter2" not in str(found.value)
    for path in (text, keys["lab"][0]):
        with pytest.raises(InvalidInputError):
            load_trusted(path)
    with pytest.raises(BackendError, match="cannot be read"):
        load_private(tmp_path / "none")
    both = tmp_path / "both.pem"
    both.write_bytes(keys["lab"][1].read_bytes() + b"\n" + keys["other"][1].read_bytes())
    assert len(load_trusted(both)) == 2
