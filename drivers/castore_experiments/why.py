"""Say in words what differs between two configurations, architectures or data states."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from castore_experiments.architecture import Description, ModuleEntry, TensorEntry
from castore_experiments.canonical import spell

if TYPE_CHECKING:
    from castore_experiments.samples import DataState

MOST_NAMES = 5
_LONGEST = 80


def explain(a: object, b: object) -> list[str]:
    """What changed from ``a`` to ``b``, one line each; empty if nothing that counts did.

    Parameters
    ----------
    a, b : mapping, Description or DataState
        Two of one kind. Mappings are normal forms (`canonical.normal`, `canonical.decode`).

    Raises
    ------
    TypeError
        The two are of unlike kinds, or of another.
    """
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(_configs(a, b, ""))
    if isinstance(a, Description) and isinstance(b, Description):
        return list(_architectures(a, b))
    if _is_data(a) and _is_data(b):
        return list(_samples(cast("DataState", a), cast("DataState", b)))
    raise TypeError(f"cannot compare {type(a).__qualname__} with {type(b).__qualname__}")


def _is_data(value: object) -> bool:
    """Told by name, so that comparing two configurations does not load pandas."""
    return type(value).__name__ == "DataState"


def _shown(value: object) -> str:
    """A value in one short line; its type shows where the text alone would not tell."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _named(names: Iterable[str]) -> str:
    """The first names of many, and how many there are beyond."""
    listed = sorted(names)
    beyond = len(listed) - MOST_NAMES
    return ", ".join(listed[:MOST_NAMES]) + (f" and {beyond} more" if beyond > 0 else "")


def _configs(a: Any, b: Any, path: str) -> Iterator[str]:
    if spell(a) == spell(b):
        return
    if isinstance(a, dict) and isinstance(b, dict):
        yield from _mappings(a, b, path)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _configs(x, y, f"{path}[{i}]")
    else:
        yield f"{path}: {_shown(a)} -> {_shown(b)}{_of_type(a, b)}"


def _of_type(a: object, b: object) -> str:
    """Names the types where the two texts could be taken for one value."""
    if type(a) is type(b) or None in (a, b):
        return ""
    return f" ({type(a).__name__} -> {type(b).__name__})"


def _mappings(a: Mapping[Any, Any], b: Mapping[Any, Any], path: str) -> Iterator[str]:
    # By text, since 1 and True are one key to Python.
    left, right = ({spell(k): (k, v) for k, v in x.items()} for x in (a, b))
    for text in sorted(left.keys() | right.keys()):
        key = (left.get(text) or right[text])[0]
        here = f"{path}.{key}" if path and isinstance(key, str) else f"{path}[{key!r}]"
        here = here if path or not isinstance(key, str) else key
        if text not in right:
            yield f"{here}: removed (was {_shown(left[text][1])})"
        elif text not in left:
            yield f"{here}: added, {_shown(right[text][1])}"
        else:
            yield from _configs(left[text][1], right[text][1], here)


def _architectures(a: Description, b: Description) -> Iterator[str]:
    if a.init_step != b.init_step:
        yield f"initialised at step {a.init_step} -> {b.init_step}"
    yield from _modules(a.modules, b.modules)
    yield from _tensors(a.tensors, b.tensors)
    for names in sorted(set(a.ties) - set(b.ties)):
        yield f"no longer one tensor: {', '.join(names)}"
    for names in sorted(set(b.ties) - set(a.ties)):
        yield f"now one tensor: {', '.join(names)}"


def _modules(a: tuple[ModuleEntry, ...], b: tuple[ModuleEntry, ...]) -> Iterator[str]:
    left, right = {m.name: m for m in a}, {m.name: m for m in b}
    yield from _gone_and_new("module", _tops(left, right), _tops(right, left))
    for name in [n for n in left if n in right]:
        x, y, here = left[name], right[name], f"module {name}" if name else "the model"
        if x.kind != y.kind:
            yield f"{here}: {x.kind} -> {y.kind}"
        else:
            for line in _configs(dict(x.settings), dict(y.settings), ""):
                yield f"{here} ({x.kind}): {line}"
    yield from _order("modules", list(left), list(right))


def _tops(these: Mapping[str, ModuleEntry], those: Mapping[str, ModuleEntry]) -> list[str]:
    """Modules only in ``these``, without what lies below another of them."""
    only = [name for name in these if name not in those]
    known = set(only)
    tops = [n for n in only if not any(n[:i] in known for i, c in enumerate(n) if c == ".")]
    return [f"{name} ({these[name].kind})" for name in tops]


def _tensors(a: tuple[TensorEntry, ...], b: tuple[TensorEntry, ...]) -> Iterator[str]:
    left, right = {t.name: t for t in a}, {t.name: t for t in b}
    gone = [f"{n} {_shape(t)}" for n, t in left.items() if n not in right]
    new = [f"{n} {_shape(t)}" for n, t in right.items() if n not in left]
    yield from _gone_and_new("tensor", gone, new)
    for name in [n for n in left if n in right]:
        x, y = left[name], right[name]
        if x.shape != y.shape:
            yield f"{name}: shape {_shape(x)} -> {_shape(y)}"
        if x.dtype != y.dtype:
            yield f"{name}: {x.dtype} -> {y.dtype}"
        if x.role != y.role:
            yield f"{name}: {x.role} -> {y.role}"
    yield from _order("tensors", list(left), list(right))


def _shape(tensor: TensorEntry) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"


def _gone_and_new(what: str, gone: list[str], new: list[str]) -> Iterator[str]:
    if gone:
        yield f"{what}{'s' * (len(gone) > 1)} removed: {_named(gone)}"
    if new:
        yield f"{what}{'s' * (len(new) > 1)} added: {_named(new)}"


def _order(what: str, a: list[str], b: list[str]) -> Iterator[str]:
    """Names that stand in both, but elsewhere."""
    common = set(a) & set(b)
    x, y = [n for n in a if n in common], [n for n in b if n in common]
    if x != y:
        moved = {n for n, m in zip(x, y, strict=True) if n != m}
        yield f"{what} registered in another order: {_named(moved)}"


def _samples(a: DataState, b: DataState) -> Iterator[str]:
    left, right = (dict(zip(s.ids_text(), s.discarded.tolist(), strict=True)) for s in (a, b))
    both = left.keys() & right.keys()
    yield from _listed("sample", "removed", left.keys() - right.keys())
    yield from _listed("sample", "added", right.keys() - left.keys())
    yield from _listed("sample", "discarded", {i for i in both if right[i] and not left[i]})
    restored = {i for i in both if left[i] and not right[i]}
    yield from _listed("sample", "no longer discarded", restored)
    for i in sorted(right.keys() - left.keys()):
        if right[i]:
            yield f"some of the added samples are discarded, such as {i}"
            break
    before, after = a.tagged(), b.tagged()
    for name in sorted(before.keys() | after.keys()):
        yield from _tag(name, before.get(name, {}), after.get(name, {}))


def _tag(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """``a`` and ``b``: the tag's value by sample, True where it is a mark."""
    head = f"tag {name!r}"
    if a and not b:
        yield f"{head}: no sample has it any more ({len(a)} had it)"
        return
    yield from _listed(f"{head}: sample", "lost it", a.keys() - b.keys())
    yield from _listed(f"{head}: sample", "got it", b.keys() - a.keys())
    changed = {i for i in a.keys() & b.keys() if a[i] != b[i]}
    shown = [f"{i} {_shown(a[i])} -> {_shown(b[i])}" for i in sorted(changed)[: MOST_NAMES + 1]]
    if changed:
        beyond = len(changed) - MOST_NAMES
        tail = f" and {beyond} more" if beyond > 0 else ""
        yield f"{head}: {len(changed)} values changed: {', '.join(shown[:MOST_NAMES])}{tail}"


def _listed(what: str, verb: str, names: Collection[str]) -> Iterator[str]:
    """``2 samples discarded: a, b``, or with a head ``tag 'hard': 2 samples got it: a, b``."""
    if names:
        head, _, noun = what.rpartition(": ")
        count = f"{len(names)} {noun}{'s' * (len(names) != 1)}"
        yield f"{head}{': ' * bool(head)}{count} {verb}: {_named(names)}"
