"""A weight file read, by torch's restricted reader only, and its states put into objects."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import IO, Any, cast

import torch

from castore import FormatError, InvalidInputError, UntrustedPickleError
from castore_experiments import allocations
from castore_experiments.schedulers import other_scheduler

_PICKLE = 64 << 20
_TRACKING = "weightslab.components.tracking.TrackingMode"
_FOREIGN = ("current_step", "tracking_mode")
_PREFIXES = ("module.", "_orig_mod.")
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}


@dataclass(frozen=True)
class WeightFile:
    """A decoded weight file; what it does not hold is None, or empty.

    ``loaders`` maps a loader's name to its state; the public tool's older flat state is that of a
    loader named ``default``.
    """

    step: int
    exp_hash: str
    timestamp: str
    model_state: Mapping[str, Any] | None
    optimizer_state: Mapping[str, Any] | None = None
    scheduler_state: Mapping[str, Any] | None = None
    rng_state: Mapping[str, Any] | None = None
    loaders: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metadata: Mapping[str, Any] | None = None


class ViewFile(io.RawIOBase):
    """A read-only file over bytes that are at hand; they are not copied."""

    def __init__(self, data: bytes | memoryview):
        self._data, self._at = memoryview(data), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """As `RawIOBase.read`, which makes room for ``size`` bytes before it looks for them."""
        left = max(0, len(self._data) - self._at)
        part = bytes(self._data[self._at :][: left if size < 0 else min(size, left)])
        self._at += len(part)
        return part

    def readinto(self, target: Any) -> int:
        part = self._data[self._at : self._at + len(target)]
        target[: len(part)] = part
        self._at += len(part)
        return len(part)


def decode(data: bytes | memoryview, where: str) -> WeightFile:
    """Read a weight file, ours or the public tool's, on the CPU. No code of it runs.

    Parameters
    ----------
    data : bytes
        The whole file.
    where : str
        What messages call it.

    Raises
    ------
    UntrustedPickleError
        It holds more than tensors and plain values: it could only be opened by running it.
    FormatError
        It is damaged, or no weight file.
    """
    found = load(data, where)
    if not isinstance(found, Mapping):
        raise FormatError(f"{where}: holds a {type(found).__name__}, not the keys of a weight file")
    states = {
        "model_state": "model_state_dict",
        "optimizer_state": "optimizer_state_dict",
        "scheduler_state": "scheduler_state_dict",
        "rng_state": "rng_state",
        "metadata": "metadata",
    }
    parts = {field: _mapping(found, key, where) for field, key in states.items()}
    step, exp_hash, timestamp = (found.get(k) for k in ("step", "exp_hash", "timestamp"))
    if type(step) is not int or not isinstance(exp_hash, str):
        raise FormatError(
            f"{where}: step {step!r} and exp_hash {exp_hash!r} are not a weight file's"
        )
    loaders = _loaders(_mapping(found, "dataloader_iteration_state", where) or {})
    return WeightFile(step, exp_hash, str(timestamp or ""), loaders=loaders, **parts)


def _mapping(found: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any] | None:
    value = found.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise FormatError(f"{where}: {key} is a {type(value).__name__}, not a mapping")
    return value


def _loaders(state: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    flat = any(not isinstance(v, Mapping) for v in state.values())
    return {"default": dict(state)} if flat else dict(state)


def load(data: bytes | memoryview, where: str) -> Any:
    """What a torch zip holds, read with ``weights_only=True`` and nothing else, ever.

    Raises
    ------
    UntrustedPickleError, FormatError
        As `decode`.
    """
    head = bytes(memoryview(data)[:4])
    if head[:1] == b"\x80":
        raise UntrustedPickleError(
            f"{where}: a bare pickle, which could only be opened by running it; weight files are"
            " zip archives. Save it again with torch.save if you trust where it comes from"
        )
    if head != b"PK\x03\x04":
        raise FormatError(f"{where}: no torch file: {len(data)} bytes that begin with {head!r}")
    try:
        with _known_names(data, where), ViewFile(data) as file:
            return torch.load(cast(IO[bytes], file), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:
        raise UntrustedPickleError(
            f"{where}: holds more than tensors and plain values ({_reason(e)}); opening it could"
            " run code, so it is not opened. Ask its writer for a plain state_dict"
        ) from e
    except FormatError:
        raise
    except Exception as e:  # its reader raises whatever a hostile pickle makes of its stack
        raise FormatError(f"{where}: damaged or no torch file: {_reason(e)}") from e


def _reason(error: Exception) -> str:
    """The line of torch's message that says what was met."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    return (telling or lines or [type(error).__name__])[0][:200]


def _known_names(data: bytes | memoryview, where: str) -> AbstractContextManager[None]:
    """Lets the public tool's one enumeration be read, as its text, without that tool.

    Looks at the archive first: torch never packs a member, and a packed one may be a thousand
    times its size.
    """
    try:
        with ViewFile(data) as file, zipfile.ZipFile(file) as z:
            packed = [i.filename for i in z.infolist() if i.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise FormatError(f"{where}: member {packed[0][:80]!r} is compressed")
            pickles = [z.read(i) for i in z.infolist() if _is_pickle(i)]
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, OSError) as e:
        if isinstance(e, FormatError):
            raise
        raise FormatError(f"{where}: damaged zip archive: {_reason(e)}") from e
    for content in pickles:
        allocations.check(content, where)
    foreign = any(b"weightslab.components.tracking" in content for content in pickles)
    return _tracking_as_text() if foreign else nullcontext()


def _is_pickle(member: zipfile.ZipInfo) -> bool:
    return member.filename.rpartition("/")[2] == "data.pkl" and member.file_size <= _PICKLE


def _as_text(value: Any) -> str:
    return str(value)


@contextmanager
def _tracking_as_text() -> Iterator[None]:
    # torch's types name classes only; a function in place of a class is taken all the same.
    names: list[Any] = [(_as_text, _TRACKING)]
    with torch.serialization.safe_globals(names):
        yield


# -- into objects


def apply(
    file: WeightFile,
    model: Any | None = None,
    optimizer: Any | None = None,
    scheduler: Any | None = None,
    *,
    strict: bool = True,
) -> None:
    """Load the states into those objects that are given.

    Ties are the model's own. Prefixes that wrappers put before names (``module.``, ``_orig_mod.``)
    need not agree. Names and shapes are compared before anything is changed. States of the
    optimizer get the strides of their parameters.

    Parameters
    ----------
    strict : bool
        Whether a missing state, and names on one side only, are errors.

    Raises
    ------
    InvalidInputError
        What does not fit, by name.
    """
    needed = [
        ("model", model, file.model_state),
        ("optimizer", optimizer, file.optimizer_state),
        ("scheduler", scheduler, file.scheduler_state),
    ]
    absent = [name for name, one, state in needed if one is not None and state is None]
    if absent and strict:
        raise InvalidInputError(f"step {file.step} of {file.exp_hash} holds no {absent[0]} state")
    unlike = other_kind(optimizer, file.optimizer_state)
    if unlike:
        raise InvalidInputError(f"the saved optimizer is of another kind: {unlike}")
    unlike = other_scheduler(scheduler, file.scheduler_state)
    if unlike:
        raise InvalidInputError(f"the saved scheduler is of another kind: {unlike}")
    if model is not None and file.model_state is not None:
        _load_model(model, file.model_state, strict)
    if optimizer is not None and file.optimizer_state is not None:
        _load_optimizer(optimizer, file.optimizer_state)
    if scheduler is not None and file.scheduler_state is not None:
        scheduler.load_state_dict(dict(file.scheduler_state))


def _load_model(model: Any, state: Mapping[str, Any], strict: bool) -> None:
    own = model.state_dict()
    given = _renamed(_without_foreign(state, own), own)
    shapes = [
        f"{name}: {tuple(own[name].shape)} here, {tuple(value.shape)} saved"
        for name, value in given.items()
        if name in own and _shape(own[name]) is not None and _shape(own[name]) != _shape(value)
    ]
    if shapes:
        raise InvalidInputError(f"the saved model has other shapes: {'; '.join(shapes[:5])}")
    missing, more = sorted(set(own) - set(given)), sorted(set(given) - set(own))
    # Hooks may rename what an older version of a module saved: then torch's word counts.
    if strict and (missing or more) and not _has_hooks(model):
        raise InvalidInputError(
            f"the saved model has other names: missing {missing[:5]}, not here {more[:5]}"
        )
    _unexpand(model)
    try:
        model.load_state_dict(given, strict=strict)
    except (RuntimeError, KeyError) as e:
        raise InvalidInputError(f"the model does not take the saved state: {e}") from e


def _unexpand(model: Any) -> None:
    """Memory of their own for expanded tensors, whose elements share some: torch writes to none."""
    if isinstance(model, torch.nn.Module):
        for t in (*model.parameters(), *model.buffers()):
            if _shape(t) and t.layout == torch.strided and _is_expanded(t):
                t.data = t.detach().clone(memory_format=torch.contiguous_format)


def _is_expanded(t: torch.Tensor) -> bool:
    return any(n > 1 and step == 0 for n, step in zip(t.shape, t.stride(), strict=True))


def _shape(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
        return None
    return tuple(value.shape)


def _has_hooks(model: Any) -> bool:
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return any(m._load_state_dict_pre_hooks for m in modules)


def _without_foreign(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Without what the public tool's wrapper adds to a model's state."""
    extra = [n for n in _FOREIGN if n in state and n not in own and _shape(state[n]) is None]
    given = type(state)((k, v) for k, v in state.items() if k not in extra)  # type: ignore[call-arg]
    if hasattr(state, "_metadata"):
        given._metadata = state._metadata  # type: ignore[attr-defined]
    return given  # type: ignore[return-value]


def _renamed(state: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """With the prefixes that ``own`` has, if only wrappers make the difference."""
    if set(state) == set(own):
        return state
    bare = {_bare(name): name for name in own}
    if len(bare) != len(own) or set(bare) != {_bare(name) for name in state}:
        return state
    return {bare[_bare(name)]: value for name, value in state.items()}


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        while name.startswith(prefix):
            name = name.removeprefix(prefix)
        name = name.replace("." + prefix, ".")
    return name


def other_kind(optimizer: Any | None, state: Mapping[str, Any] | None) -> str:
    """What tells that a saved optimizer is of another kind than ``optimizer``; empty if nothing.

    Torch takes such a state, and fails at the next step. Settings that one side alone has tell it:
    a newer torch only adds some, and schedulers add theirs.
    """
    own, saved = (
        {str(key) for group in groups for key in group}
        for groups in (
            getattr(optimizer, "param_groups", ()),
            (state or {}).get("param_groups", ()),
        )
    )
    here, there = sorted(own - saved - _OF_SCHEDULERS), sorted(saved - own - _OF_SCHEDULERS)
    return f"{', '.join(there)} saved; {', '.join(here)} here" if here and there else ""


def _load_optimizer(optimizer: Any, state: Mapping[str, Any]) -> None:
    try:
        optimizer.load_state_dict(dict(state))
    except (ValueError, KeyError, RuntimeError) as e:
        raise InvalidInputError(f"the optimizer does not take the saved state: {e}") from e
    for parameter, values in getattr(optimizer, "state", {}).items():
        if not isinstance(parameter, torch.Tensor) or not isinstance(values, dict):
            continue
        for name, value in values.items():
            values[name] = _strided_like(value, parameter)


def _strided_like(value: Any, parameter: torch.Tensor) -> Any:
    """An optimizer makes its tensors in the layout of the parameter; the file holds row-major."""
    if _shape(value) != tuple(parameter.shape) or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
