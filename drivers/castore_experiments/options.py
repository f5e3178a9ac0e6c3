"""The ``checkpoint_manager`` block of a configuration: what is dumped, and where it is kept.

Defaults are those of the document; ``repository``, ``materialize``, ``namespace``,
``compression`` and ``keep`` are castore's own.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

from castore import InvalidInputError

Materialize: TypeAlias = Literal["latest", "all", "documents"]

_MATERIALIZE = ("latest", "all", "documents")
_COMPRESSION = ("auto", "none")


@dataclass(frozen=True, slots=True)
class Best:
    """Keep the ``n`` steps with the highest (``max``) or lowest (``min``) ``metric``."""

    metric: str
    mode: Literal["max", "min"] = "max"
    n: int = 1


@dataclass(frozen=True, slots=True)
class Keep:
    """Which weight checkpoints of a hash stay; see `castore_experiments.retention`.

    ``last`` newest ones, every multiple of ``every`` steps, and the ``best``.
    """

    last: int | None = None
    every: int | None = None
    best: Best | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """How a root is kept. Booleans say what of a state is dumped, and what resuming gives back.

    ``load_weights``, ``load_config`` and ``load_data`` are for watched objects; False overrules
    the constructor. ``load_model``: whether a pickled model that may be loaded is, unasked.
    What `load_state` and `load_checkpoint` are asked for does not depend on them.
    """

    enable_checkpoints: bool = True
    dump_model_architecture: bool = False
    dump_model_state: bool = True
    dump_optimizer_state: bool = True
    dump_data_state: bool = True
    dump_config_state: bool = True
    load_model: bool = True
    load_weights: bool = True
    load_config: bool = True
    load_data: bool = True
    repository: str | None = None
    namespace: str | None = None
    materialize: Materialize | None = None
    compression: Literal["auto", "none"] = "auto"
    keep: Keep | None = None


def parse_options(block: Mapping[str, Any] | None, onto: Options = Options()) -> Options:
    """``block`` read over the defaults ``onto``.

    Raises
    ------
    InvalidInputError
        An unknown option (the nearest known one is named), or a value of a wrong type.
    """
    if block is None:
        return onto
    if not isinstance(block, Mapping):
        raise _wrong("checkpoint_manager", block, "a mapping of options")
    known = {f.name for f in fields(Options)}
    return replace(onto, **{_known(k, known, ""): _value(k, v) for k, v in block.items()})


def _known(name: object, known: set[str], where: str) -> str:
    if isinstance(name, str) and name in known:
        return name
    near = difflib.get_close_matches(str(name), sorted(known), 1, 0)
    raise InvalidInputError(
        f"checkpoint_manager.{where}{name}: unknown option; did you mean {near[0]!r}?"
        f" There are: {', '.join(sorted(known))}"
    )


def _value(name: str, value: Any) -> Any:
    if name in ("repository", "namespace"):
        return None if value is None else _text(name, value)
    if name == "materialize":
        return None if value is None else _choice(name, value, _MATERIALIZE)
    if name == "compression":
        return _choice(name, value, _COMPRESSION)
    if name == "keep":
        return _keep(value)
    if not isinstance(value, bool):
        raise _wrong(f"checkpoint_manager.{name}", value, "true or false")
    return value


def _text(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else getattr(value, "__fspath__", lambda: None)()
    if not isinstance(text, str) or not text:
        raise _wrong(f"checkpoint_manager.{name}", value, "a text")
    return text


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise _wrong(f"checkpoint_manager.{name}", value, f"one of {', '.join(choices)}")
    return str(value)


def _keep(value: Any) -> Keep | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong("checkpoint_manager.keep", value, "a mapping such as {last: 3}")
    for key in value:
        _known(key, {"last", "every", "best"}, "keep.")
    return Keep(
        _count("keep.last", value.get("last")),
        _count("keep.every", value.get("every")),
        _best(value.get("best")),
    )


def _best(value: Any) -> Best | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong("checkpoint_manager.keep.best", value, "{metric: NAME, mode: max, n: 2}")
    for key in value:
        _known(key, {"metric", "mode", "n"}, "keep.best.")
    metric = _text("keep.best.metric", value.get("metric"))
    mode = _choice("keep.best.mode", value.get("mode", "max"), ("max", "min"))
    return Best(
        metric, "max" if mode == "max" else "min", _count("keep.best.n", value.get("n", 1)) or 1
    )


def parse_best(text: str | None) -> Best | None:
    """``METRIC:MODE:N`` as the command line takes it; mode and number may be left out."""
    if text is None:
        return None
    metric, _, rest = text.partition(":")
    mode, _, n = rest.partition(":")
    if n and not n.isdecimal():
        raise _wrong("keep.best", text, "METRIC:MODE:N, such as val:max:2")
    return _best({"metric": metric, "mode": mode or "max", "n": int(n or 1)})


def _count(name: str, value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise _wrong(f"checkpoint_manager.{name}", value, "a whole number of at least 1")
    return value


def _wrong(name: str, value: object, expected: str) -> InvalidInputError:
    return InvalidInputError(f"{name}: {value!r}: expected {expected}")
