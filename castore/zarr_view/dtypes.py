"""Zarr data types for the numbers that NumPy itself lacks: bfloat16 and the float8 family.

zarr 3.1 knows none of them, so each wraps its `ml_dtypes` type here. Names are those of the
registry of Zarr extensions (https://github.com/zarr-developers/zarr-extensions, data-types), so
that other readers know them; ``float8_e4m3fn`` is not in that registry and is called
``castore.float8_e4m3fn``. Only zarr format 3, little-endian.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Self, TypeGuard

import ml_dtypes
import numpy as np
from zarr.core.common import JSON, ZarrFormat
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import ZDType, data_type_registry

try:
    from zarr.errors import DataTypeValidationError  # type: ignore[attr-defined]
except ImportError:  # zarr 3.1
    from zarr.dtype import DataTypeValidationError

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class _Float(ZDType[Any, Any], HasItemSize):
    """A float that converts to and from Python's; ``scalar_cls`` is the `ml_dtypes` class."""

    scalar_cls: ClassVar[type[Any]]

    @property
    def item_size(self) -> int:
        return np.dtype(self.scalar_cls).itemsize

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        if dtype != np.dtype(cls.scalar_cls):
            raise DataTypeValidationError(f"{dtype} is not {cls._zarr_v3_name}")
        return cls()

    def to_native_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.scalar_cls)

    @classmethod
    def _from_json_v2(cls, data: object) -> NoReturn:
        raise DataTypeValidationError(f"{data!r}: zarr format 2 has no {cls._zarr_v3_name}")

    @classmethod
    def _from_json_v3(cls, data: object) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name}")
        return cls()

    def to_json(self, zarr_format: ZarrFormat) -> Any:
        if zarr_format != 3:
            raise ValueError(f"zarr format {zarr_format} has no {self._zarr_v3_name}: use 3")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> TypeGuard[float]:
        return isinstance(data, int | float | np.number | self.scalar_cls)

    def cast_scalar(self, data: object) -> Any:
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} is no number that {self._zarr_v3_name} could hold")
        return self.scalar_cls(data)

    def default_scalar(self) -> Any:
        return self.scalar_cls(0)

    def from_json_scalar(self, data: JSON, *, zarr_format: ZarrFormat) -> Any:
        """A number, one of zarr's three words, or ``0x`` and the bits in hex."""
        if isinstance(data, str) and data.startswith("0x"):
            bits = int(data, 16).to_bytes(self.item_size, "little")
            return np.frombuffer(bits, self.scalar_cls)[0]
        if isinstance(data, str) and data in _SPECIAL:
            return self.scalar_cls(_SPECIAL[data])
        if isinstance(data, int | float):
            return self.scalar_cls(data)
        raise TypeError(f"{data!r}: expected a number, NaN, Infinity, -Infinity or 0x and bits")

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> float | str:
        value = float(self.cast_scalar(data))
        words = {math.inf: "Infinity", -math.inf: "-Infinity"}
        return "NaN" if math.isnan(value) else words.get(value, value)


@dataclass(frozen=True, kw_only=True)
class BFloat16(_Float, HasEndianness):
    """Two bytes: the upper half of a float32."""

    scalar_cls = ml_dtypes.bfloat16
    dtype_cls = type(np.dtype(ml_dtypes.bfloat16))
    _zarr_v3_name = "bfloat16"

    def to_native_dtype(self) -> np.dtype[Any]:
        if self.endianness != "little":
            raise ValueError("big-endian bfloat16 is not read: NumPy has no such type")
        return super().to_native_dtype()


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FN(_Float):
    """Four bits of exponent, three of mantissa, finite values and NaN."""

    scalar_cls = ml_dtypes.float8_e4m3fn
    dtype_cls = type(np.dtype(ml_dtypes.float8_e4m3fn))
    _zarr_v3_name = "castore.float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class Float8E4M3FNUZ(_Float):
    """As `Float8E4M3FN` with one zero and another bias."""

    scalar_cls = ml_dtypes.float8_e4m3fnuz
    dtype_cls = type(np.dtype(ml_dtypes.float8_e4m3fnuz))
    _zarr_v3_name = "float8_e4m3fnuz"


@dataclass(frozen=True, kw_only=True)
class Float8E5M2(_Float):
    """Five bits of exponent, two of mantissa."""

    scalar_cls = ml_dtypes.float8_e5m2
    dtype_cls = type(np.dtype(ml_dtypes.float8_e5m2))
    _zarr_v3_name = "float8_e5m2"


@dataclass(frozen=True, kw_only=True)
class Float8E5M2FNUZ(_Float):
    """As `Float8E5M2`, finite, with one zero and another bias."""

    scalar_cls = ml_dtypes.float8_e5m2fnuz
    dtype_cls = type(np.dtype(ml_dtypes.float8_e5m2fnuz))
    _zarr_v3_name = "float8_e5m2fnuz"


@dataclass(frozen=True, kw_only=True)
class Float8E8M0FNU(_Float):
    """A power of two, or NaN: there is no zero, so what was never written is 1."""

    scalar_cls = ml_dtypes.float8_e8m0fnu
    dtype_cls = type(np.dtype(ml_dtypes.float8_e8m0fnu))
    _zarr_v3_name = "float8_e8m0fnu"

    def default_scalar(self) -> Any:
        return self.scalar_cls(1)


_TYPES = (BFloat16, Float8E4M3FN, Float8E4M3FNUZ, Float8E5M2, Float8E5M2FNUZ, Float8E8M0FNU)


def register() -> None:
    """Make the types known to zarr in this process, but for names that somebody registered."""
    known = data_type_registry.contents
    taken = {c.dtype_cls for c in known.values()}
    for cls in _TYPES:
        if cls._zarr_v3_name not in known and cls.dtype_cls not in taken:
            data_type_registry.register(cls._zarr_v3_name, cls)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a name of `castore.tensors.ITEMSIZE`, little-endian."""
    known: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name, name))
    return known if hasattr(ml_dtypes, name) else known.newbyteorder("<")
