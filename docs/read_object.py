"""Write an object of a local repository to stdout, verified: read_object.py REPOSITORY DIGEST."""

import struct
import sys
from pathlib import Path

import numpy as np
from blake3 import blake3
from numcodecs import Blosc  # which brings numpy; docs/format.md says the rest


def read(repository: str, digest: str) -> bytes:
    frame = (Path(repository) / "objects" / digest[:2] / digest).read_bytes()
    magic, version, codec, width, _, _, size, base = struct.unpack("<4s4B2I32s", frame[:48])
    if (magic, version, len(frame)) != (b"cst1", 1, 64 + size):
        sys.exit(f"{digest}: not a whole frame of version 1")
    content = frame[64:] if codec == 0 else bytes(Blosc().decode(frame[64:]))
    if codec == 2:  # zigzag(content - base), wrapping
        z, b = (np.frombuffer(x, f"<u{width}") for x in (content, read(repository, base.hex())))
        content = (b + ((z >> 1) ^ -(z & 1))).tobytes()
    return content if blake3(content).hexdigest() == digest else sys.exit(f"{digest}: damaged")


sys.stdout.buffer.write(read(sys.argv[1], sys.argv[2]))
