"""Which parameters a collection freezes, which are tied, and how they are counted and saved."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from castore import InvalidInputError
from castore_pools.values import dtype_name, dtype_of, is_floating

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

TOKEN_EMBEDDING = "token-embedding"
_PLAIN = (str, int, float, bool, type(None))


def tied_keys(state: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Groups of keys that are one tensor in memory: same storage, place, shape and strides."""
    groups: dict[Any, list[str]] = defaultdict(list)
    for key, value in state.items():
        if hasattr(value, "untyped_storage") and value.numel():
            groups[_identity(value)].append(key)
    return [tuple(g) for g in groups.values() if len(g) > 1]


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return (
        *(tensor.device, storage.data_ptr(), tensor.storage_offset(), tensor.dtype),
        *(tuple(tensor.shape), tensor.stride()),
    )


def frozen_keys(
    model: Module, frozen: str | Sequence[str], stoi: Mapping[str, int] | None
) -> list[str]:
    """The keys to freeze, with all their tied names, in the state dict's order.

    Parameters
    ----------
    model : Module
    frozen : "token-embedding", or keys
    stoi : mapping, optional
        The vocabulary of a word-level model; tells its token embedding by the number of words.

    Raises
    ------
    InvalidInputError
        A key that the model lacks, or no single token embedding.
    """
    state = model.state_dict(keep_vars=True)
    if frozen == TOKEN_EMBEDDING:
        wanted = [_key_of(model, _token_embedding(model, stoi))]
    elif isinstance(frozen, str):
        raise InvalidInputError(
            f"frozen={frozen!r}: expected {TOKEN_EMBEDDING!r} or a list of keys"
        )
    else:
        wanted = list(frozen)
    lacking = [k for k in wanted if k not in state]
    if lacking:
        raise InvalidInputError(f"the model has no {lacking}: frozen keys name its state dict's")
    ties = {k: g for g in tied_keys(state) for k in g}
    chosen = {name for k in wanted for name in ties.get(k, (k,))}
    return [k for k in state if k in chosen]


def _token_embedding(model: Module, stoi: Mapping[str, int] | None) -> Tensor:
    """What the model says; else the embedding that fits ``stoi``, or is the only one."""
    from torch import nn

    for module in model.modules():
        ask = getattr(module, "get_input_embeddings", None)
        if callable(ask):
            found = ask()
            if isinstance(found, nn.Embedding):
                return found.weight
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    if stoi and len(embeddings) > 1:
        embeddings = [m for m in embeddings if m.num_embeddings >= len(stoi)]
    if len(embeddings) != 1:
        raise InvalidInputError(
            f"{len(embeddings)} embeddings may be the vocabulary's: give frozen=[keys] with the"
            " keys of the model's state dict"
        )
    return embeddings[0].weight


def _key_of(model: Module, weight: Tensor) -> str:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter is weight:
            return name
    raise InvalidInputError("the token embedding is no parameter of the model")


def frozen_parameters(model: Module, keys: Iterable[str]) -> list[Parameter]:
    """The parameters under ``keys``, each once; keys of buffers have none."""
    wanted = set(keys)
    named = model.named_parameters(remove_duplicate=False)
    return list({id(p): p for n, p in named if n in wanted}.values())


def count_elements(state: Mapping[str, Any], keys: Iterable[str] | None = None) -> int:
    """Elements of the tensors under ``keys`` (all of them by default); tied ones count once."""
    wanted = set(state if keys is None else keys)
    twins = {k for g in tied_keys(state) for k in g[1:] if g[0] in wanted}
    return sum(
        v.numel()
        for k, v in state.items()
        if k in wanted and k not in twins and hasattr(v, "numel")
    )


def saved_state(
    state: Mapping[str, Any], leave_out: Iterable[str] = (), dtype: str | None = None
) -> OrderedDict[str, Any]:
    """A state dict as it is written: on the CPU, row-major, owning its storage, ties kept.

    Floating-point tensors get ``dtype`` where one is given. `InvalidInputError` names values
    that are neither tensors nor plain.
    """
    skip = set(leave_out)
    made: dict[Any, Any] = {}
    out: OrderedDict[str, Any] = OrderedDict()
    for key, value in state.items():
        if key in skip:
            continue
        if not hasattr(value, "untyped_storage"):
            out[key] = _plain(key, value)
            continue
        identity = _identity(value) if value.numel() else key
        if identity not in made:
            made[identity] = _owned(value, dtype)
        out[key] = made[identity]
    if hasattr(state, "_metadata"):
        out._metadata = state._metadata  # type: ignore[attr-defined]
    return out


def _plain(key: str, value: Any) -> Any:
    """Extra state that every reader understands."""
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple):
        return type(value)(_plain(key, v) for v in value)
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: _plain(key, v) for k, v in value.items()}
    raise InvalidInputError(
        f"{key!r} is a {type(value).__name__}: a checkpoint holds tensors, texts, numbers, lists"
        " and dicts of them"
    )


def _owned(tensor: Tensor, dtype: str | None) -> Tensor:
    if tensor.is_meta or tensor.layout.__str__() != "torch.strided":
        raise InvalidInputError(f"a tensor of {tensor.layout} on {tensor.device} cannot be saved")
    value = tensor.detach()
    if dtype is not None and is_floating(dtype_name(value)):
        value = value.to(dtype_of(dtype))
    value = value.cpu().contiguous()
    if value.data_ptr() == tensor.data_ptr() or value.untyped_storage().nbytes() != value.nbytes:
        value = value.clone()
    return value


def not_finite(state: Mapping[str, Any]) -> list[str]:
    """Keys whose values are not all finite; elements are looked at in their own dtype."""
    import torch

    bad = []
    for key, value in state.items():
        if hasattr(value, "is_floating_point") and value.is_floating_point() and value.numel():
            plain = value.float() if dtype_name(value).startswith("float8") else value
            if not bool(torch.isfinite(plain).all()):
                bad.append(key)
    return bad
