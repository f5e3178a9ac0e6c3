"""State of the global random streams: Python, NumPy, torch on each device.

Keys as in ``rng_state`` of the documented files: ``python_random``, ``numpy_random``,
``torch_rng``, ``torch_cuda_rng``; and ``torch_mps`` where there is such a device. The public tool
reads and writes three of NumPy's five items and one CUDA device: the other two items stand under
``numpy_gauss``, and its shapes are read too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from castore import FormatError

RESTORED, MISSING, REFUSED = "restored", "missing", "refused"
_TWISTER = 624
_GAUSS = "numpy_gauss"  # of the stream numpy_random: the kept half of a pair of normal deviates

Setter: TypeAlias = Callable[[], None]


class _RefusedError(Exception):
    """A stream's saved state cannot be put into this process's stream."""


@dataclass(frozen=True, slots=True)
class RngReport:
    """What became of each stream that this process has or the state speaks of.

    ``streams`` maps a key to ``restored``, ``missing`` (this process has the stream, the state
    does not) or ``refused``; ``reasons`` says why for those that were not restored, and what is
    less than exact about those that were.
    """

    streams: Mapping[str, str]
    reasons: Mapping[str, str]

    @property
    def exact(self) -> bool:
        """Whether every stream is as it was when the state was taken."""
        return not self.reasons and all(s == RESTORED for s in self.streams.values())

    def lines(self) -> list[str]:
        """One line for each stream, for people."""
        notes = {k: f" ({r})" for k, r in self.reasons.items()}
        return [f"{key}: {what}{notes.get(key, '')}" for key, what in self.streams.items()]


def capture() -> dict[str, Any]:
    """The state of all streams now, in types that ``weights_only=True`` reads.

    ``torch_rng`` is a list of integers as documented, each CUDA device's a list within
    ``torch_cuda_rng``. Nothing is drawn and nothing is initialised: a CUDA that was never used
    has no state yet and is left out.
    """
    import numpy as np
    import torch

    numpy: Any = np.random.get_state(legacy=True)
    name, words, place, has_gauss, gauss = numpy
    state = {
        "python_random": random.getstate(),
        "numpy_random": (str(name), words.tolist(), int(place)),
        _GAUSS: (int(has_gauss), float(gauss)),
        "torch_rng": torch.get_rng_state().tolist(),
    }
    if _has_cuda():
        state["torch_cuda_rng"] = [s.tolist() for s in torch.cuda.get_rng_state_all()]
    if torch.backends.mps.is_available():
        state["torch_mps"] = torch.mps.get_rng_state().tolist()
    return state


def to_json(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same state in plain JSON types: tuples become lists, tensors lists of integers."""
    return {str(key): _plain(value) for key, value in state.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    to_list: Any = getattr(value, "tolist", None)
    return value if to_list is None else to_list()


def from_json(state: Mapping[str, Any]) -> dict[str, Any]:
    """What `to_json` was given, as `capture` gives it; the public tool's JSON as well.

    Streams that are malformed stay as they are: `restore` refuses them by name.
    """
    found = dict(state)
    python = found.get("python_random")
    if isinstance(python, list):
        found["python_random"] = tuple(tuple(v) if isinstance(v, list) else v for v in python)
    for key in ("numpy_random", _GAUSS):
        if isinstance(found.get(key), list):
            found[key] = tuple(found[key])
    return found


def restore(state: Mapping[str, Any] | None, *, strict: bool = True) -> RngReport:
    """Put the streams back to ``state``, on the devices where they live.

    Every stream is looked at before the first is changed. One that cannot be put back does not
    keep the others from it. A stream of a device that this machine does not have is refused; it
    fails a strict restore just as a damaged one does. Key names unknown to this version are
    refused too.

    Parameters
    ----------
    state : mapping or None
        As from `capture`, `from_json`, or the public tool. None is a state without streams.
    strict : bool
        Whether anything less than every stream is an error.

    Raises
    ------
    FormatError
        ``strict``, and a stream is missing or refused: nothing was changed. The message names
        every such stream.
    """
    report, setters = _prepared(state, strict)
    for put in setters:
        put()
    return report


def check(state: Mapping[str, Any] | None) -> None:
    """Raise what a strict `restore` would; nothing is changed."""
    _prepared(state, True)


def _prepared(state: Mapping[str, Any] | None, strict: bool) -> tuple[RngReport, list[Setter]]:
    given = _joined(state or {})
    streams: dict[str, str] = {}
    reasons: dict[str, str] = {}
    setters: list[Setter] = []
    for key in _keys(given):
        if given.get(key) is None:
            streams[key], reasons[key] = MISSING, "not in the saved state"
            continue
        try:
            setter, note = _prepare(key, given[key])
        except _RefusedError as e:
            streams[key], reasons[key] = REFUSED, str(e)
            continue
        setters.append(setter)
        streams[key] = RESTORED
        if note:
            reasons[key] = note
    report = RngReport(streams, reasons)
    if strict and any(s != RESTORED for s in streams.values()):
        raise FormatError(
            f"random streams cannot be restored: {'; '.join(report.lines())}; nothing was changed."
            " strict=False takes what there is"
        )
    return report, setters


def _joined(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with NumPy's five items in one place."""
    given = dict(state)
    gauss, numpy = given.pop(_GAUSS, None), given.get("numpy_random")
    if isinstance(numpy, list | tuple) and isinstance(gauss, list | tuple) and len(numpy) == 3:
        given["numpy_random"] = [*numpy, *gauss]
    return given


def _keys(given: Mapping[str, Any]) -> list[str]:
    """The streams of this process first, then whatever else the state holds."""
    import torch

    own = ["python_random", "numpy_random", "torch_rng"]
    if _has_cuda():
        own.append("torch_cuda_rng")
    if torch.backends.mps.is_available():
        own.append("torch_mps")
    return own + [str(k) for k, v in given.items() if k not in own and v is not None]


def _has_cuda() -> bool:
    """Whether CUDA is in use: to look at a state would otherwise start it."""
    import torch

    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _prepare(key: str, value: Any) -> tuple[Setter, str]:
    """How to put one stream back, and what is less than exact about it.

    The state is tried on a stream of its own first, so that what is malformed is found here.
    """
    prepare = {
        "python_random": _python,
        "numpy_random": _numpy,
        "torch_rng": _torch,
        "torch_cuda_rng": _cuda,
        "torch_mps": _mps,
    }.get(key)
    if prepare is None:
        raise _RefusedError("this version knows no such stream")
    try:
        return prepare(value)
    except (TypeError, ValueError, IndexError, RuntimeError, OverflowError) as e:
        raise _RefusedError(f"malformed: {_first_line(e)}") from e


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def _python(value: Any) -> tuple[Setter, str]:
    version, words, gauss = value
    state = (version, tuple(words), gauss)
    random.Random().setstate(state)
    return (lambda: random.setstate(state)), ""


def _numpy(value: Any) -> tuple[Setter, str]:
    import numpy as np

    items = list(value)
    if len(items) not in (3, 5):
        raise ValueError(f"{len(items)} items instead of 5")
    words = np.asarray(items[1], dtype=np.int64)
    if words.shape != (_TWISTER,) or words.min() < 0 or words.max() > 0xFFFFFFFF:
        raise ValueError(f"not {_TWISTER} numbers of 32 bits")
    if not 0 <= int(items[2]) <= _TWISTER:
        raise ValueError(f"place {items[2]} is not in 0 to {_TWISTER}")
    rest = items[3:] or [0, 0.0]
    state = (str(items[0]), words.astype(np.uint32), int(items[2]), int(rest[0]), float(rest[1]))
    np.random.RandomState().set_state(state)
    # The public tool leaves out the second half of a pair of normal deviates.
    note = "" if len(items) == 5 else "without its kept normal deviate, which was not saved"
    return (lambda: np.random.set_state(state)), note


def _bytes_tensor(value: Any) -> Any:
    """A CPU byte tensor, wherever a ``map_location`` has moved the saved one."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            raise ValueError("loaded to the meta device, which holds no values")
        if value.dtype != torch.uint8:
            raise ValueError(f"{value.dtype} instead of bytes")
        return value.detach().cpu().clone()
    if isinstance(value, bytes | bytearray):
        return torch.tensor(list(value), dtype=torch.uint8)
    if not isinstance(value, list | tuple) or not _are_bytes(value):
        raise ValueError("not a list of bytes")
    return torch.tensor(value, dtype=torch.uint8)


def _are_bytes(values: Iterable[Any]) -> bool:
    return all(type(v) is int and 0 <= v <= 255 for v in values)


def _torch(value: Any) -> tuple[Setter, str]:
    import torch

    state = _bytes_tensor(value)
    torch.Generator().set_state(state)
    return (lambda: torch.set_rng_state(state)), ""


def _cuda(value: Any) -> tuple[Setter, str]:
    import torch

    # The public tool's is the state of the one current device.
    devices: Sequence[Any] = [value] if _is_one(value) else value
    states = [_bytes_tensor(v) for v in devices]
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(states) > here:
        raise _RefusedError(f"of {len(states)} CUDA devices; this machine has {here}")
    for i, state in enumerate(states):
        torch.Generator(device=f"cuda:{i}").set_state(state)

    def put() -> None:
        for i, state in enumerate(states):
            torch.cuda.set_rng_state(state, i)

    missing = here - len(states)
    return put, f"{missing} more devices here than when saved" if missing else ""


def _is_one(value: Any) -> bool:
    return hasattr(value, "dtype") or (bool(value) and type(value[0]) is int)


def _mps(value: Any) -> tuple[Setter, str]:
    import torch

    state = _bytes_tensor(value)
    if not torch.backends.mps.is_available():
        raise _RefusedError("of an MPS device; this machine has none")
    return (lambda: torch.mps.set_rng_state(state)), ""
