"""What a state that the caller named cannot give to what is watched, found before it is given."""

from __future__ import annotations

from castore import InvalidInputError
from castore_experiments import rng
from castore_experiments.components import Watched
from castore_experiments.resume import Resume


def refuse_unfit(resume: Resume, watched: Watched) -> None:
    """Raise what `Resume.apply` would find too late; nothing is changed.

    Raises
    ------
    InvalidInputError
        Another architecture; with ``strict`` another kind of optimizer or scheduler, or a data
        loader that cannot go on exactly.
    FormatError
        With ``strict``, a random stream that cannot be restored.
    """
    loaded = resume.loaded
    if loaded.file is not None and watched.model is not None and not resume.fits(watched.model):
        raise InvalidInputError(
            f"the watched model is not of the architecture of {loaded.state.hash}: watch one"
            " that is, or give load_weights=False; nothing was changed"
        )
    if not resume.strict:
        return
    _refuse_other_kinds(resume, watched)
    for name in watched.loaders.keys() & loaded.loaders.keys():
        if "castore" in loaded.loaders[name]:
            watched.loaders[name].check(loaded.loaders[name])
    if loaded.file is not None or loaded.document is not None:
        rng.check(loaded.rng_state)


def _refuse_other_kinds(resume: Resume, watched: Watched) -> None:
    from castore_experiments.schedulers import other_scheduler
    from castore_experiments.weights import other_kind

    file = resume.loaded.file
    if file is None:
        return
    others = {
        "optimizer": other_kind(watched.optimizer, file.optimizer_state),
        "scheduler": other_scheduler(watched.scheduler, file.scheduler_state),
    }
    for name, unlike in others.items():
        if unlike:
            raise InvalidInputError(
                f"the saved {name} is of another kind: {unlike}; nothing was changed. strict=False"
                " leaves the watched one as new"
            )
