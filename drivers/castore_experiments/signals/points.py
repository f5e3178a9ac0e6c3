"""What a logged point is made of beside its value: the columns most do not have, and samples."""

from __future__ import annotations

from typing import Any

from castore_experiments.signals import values as v
from castore_experiments.signals.rows import Block


def extra(given: tuple[Any, ...], samples: Block | None) -> tuple[Any, ...]:
    """The columns of a point that most points do not have, in their order."""
    audit, marker, split, tags, note, outliers, outlier_count, count, trend, margin, low, high = (
        given
    )
    low_found, high_found = v.ends(samples.values if samples else None)
    return (
        bool(audit),
        bool(marker),
        v.text(split, "split_name"),
        v.json_text(tags, "evaluation_tags", "[]"),
        v.text(note, "point_note"),
        v.json_text(outliers, "outliers", ""),
        v.count(outlier_count, len(outliers), "outlier_count"),
        v.count(count, len(samples.values) if samples else 0, "sample_count"),
        v.optional(trend, "trend_value"),
        v.optional(margin, "trend_margin"),
        low_found if low is None else v.number(low, "value_min"),
        high_found if high is None else v.number(high, "value_max"),
    )


def samples(metric: str, hash: str | None, step: int, given: Any) -> Block:
    """Values by sample: a mapping, or two columns; `InvalidInputError` for what is neither."""
    what = f"{metric}: per_sample"
    ids, found = v.pairs(given, 2, what)
    return Block(metric, hash, step, v.ids(ids, what), v.floats(found, what))


def instances(metric: str, hash: str | None, step: int, given: Any) -> Block:
    """Values by sample and annotation: a mapping, or three columns; else `InvalidInputError`."""
    what = f"{metric}: per_instance"
    ids, annotations, found = v.pairs(given, 3, what)
    numbers = v.integers(annotations, what)
    return Block(metric, hash, step, v.ids(ids, what), v.floats(found, what), numbers)
