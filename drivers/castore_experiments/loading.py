"""The part of `CheckpointManager` that reads states back, and goes back to them."""

from __future__ import annotations

from typing import Any

from castore_experiments import answers
from castore_experiments.catalog import Catalog
from castore_experiments.resume import Wanted, load


class Loading(Catalog):
    """States as they were saved, to look at or to go on from."""

    _allow_pickle: bool

    def load_checkpoint(
        self,
        exp_hash: str,
        load_model: bool | None = None,
        load_weights: bool = True,
        load_config: bool = False,
        load_data: bool = True,
        target_step: int | None = None,
        force: bool = False,
    ) -> dict[str, Any]:
        """Read a state without applying it.

        Parameters
        ----------
        exp_hash : str
            24 hexadecimal characters.
        load_model, load_weights, load_config, load_data : bool
            Which components. Configuration and data are read only if they differ from the current
            ones, or with ``force``. A pickled model is read by default where that is allowed, and
            left out elsewhere; True asks for it.
        target_step : int, optional
            The weights nearest to it, of two equally near ones the higher step; the last saved by
            default.

        Returns
        -------
        dict
            ``model``, ``weights`` (the file's mapping), ``config``, ``data_state`` (``snapshot``:
            DataFrame by sample_id and annotation_id), ``rng_state``, ``loaded_components`` (set),
            ``exp_hash`` and, if there are, ``dataloader_iteration_state``. For a hash that does
            not exist nothing is loaded.

        Raises
        ------
        CorruptObjectError, ObjectNotFoundError, FormatError
            Something of it is damaged; the message names it.
        UntrustedPickleError
            A file would run code when read, or a pickled model is asked for and not allowed.
        """
        archive = self._archive()
        if archive is None or exp_hash not in archive:
            return answers.nothing(exp_hash)
        trusted = self._session.trusts(self._allow_pickle)
        changed = archive.state(exp_hash).digests.changed(self._session.tracker.digests)
        wanted = Wanted(
            trusted and self._session.options.load_model if load_model is None else load_model,
            load_weights,
            load_config and (force or "hp" in changed),
            load_data and (force or "data" in changed),
            target_step,
        )
        return answers.checkpoint(load(archive, exp_hash, wanted, allow_pickle=trusted))

    def load_state(
        self,
        exp_hash: str,
        force: bool = False,
        load_model: bool = True,
        load_weights: bool = True,
        load_config: bool = True,
        load_data: bool = True,
        load_logger: bool = True,
        target_step: int | None = None,
        *,
        strict: bool = True,
    ) -> bool:
        """Go back to a state: what is trained from here descends from it.

        The watched model, optimizer, scheduler, mapping, data and loaders are brought to it, and
        the random streams. The branch that was current stays as it is; edits that wait are dropped.

        Parameters
        ----------
        exp_hash : str
        force : bool
            Also components that are current already.
        load_weights, load_config, load_data : bool
            Which components.
        load_model : bool
            As public code passes it. The watched model stays the object it is, so a pickled one is
            not read here: `load_checkpoint` gives that.
        load_logger : bool
            Whether curves go on from the loaded step; else they begin anew.
        target_step : int, optional
            As for `load_checkpoint`.
        strict : bool
            Whether a data loader that cannot go on exactly, another kind of optimizer or scheduler,
            or a random stream that cannot be restored, is an error. Else it is reported: the loader
            begins an epoch anew, optimizer or scheduler are as new.

        Returns
        -------
        bool
            False for a hash that does not exist: nothing was changed.

        Raises
        ------
        InvalidInputError
            A watched object does not take its part. Another architecture, and what ``strict``
            refuses, is found before anything is changed.
        CorruptObjectError, ObjectNotFoundError, FormatError, UntrustedPickleError
            As for `load_checkpoint`; nothing was changed.
        """
        archive = self._archive()
        if archive is None or exp_hash not in archive:
            return False
        session = self._session
        changed = archive.state(exp_hash).digests.changed(session.tracker.digests)
        whole = Wanted(
            False,
            load_weights,
            load_config and (force or "hp" in changed),
            load_data and (force or "data" in changed),
            target_step,
        )
        session.branch(load(archive, exp_hash, whole), curves=load_logger, strict=strict)
        return True

    def load_latest_checkpoint(
        self, model: Any = None, exp_hash: str | None = None, target_step: int | None = None
    ) -> dict[str, Any] | None:
        """The weight file of a hash (the current one) as a mapping, loaded into ``model`` if given.

        The last saved, or the one nearest to ``target_step``; None if there is none. Raises as
        `load_checkpoint`.
        """
        hash = exp_hash or self.current_exp_hash
        if hash is None:
            return None
        read = self.load_checkpoint(hash, False, load_data=False, target_step=target_step)
        found: dict[str, Any] | None = read["weights"]
        if found is not None and model is not None:
            model.load_state_dict(found["model_state_dict"])
        return found
