"""``castore://``: snapshots as a read-only fsspec file system.

castore://<namespace>/latest/<path>          the newest snapshot of a namespace
castore://<namespace>/<id>/<path>            a snapshot by its id, or at least 4 characters of it
castore://<namespace>/<key>=<value>/<path>   the newest snapshot with this label
castore://<namespace>/<path>                 the layout that the namespace's driver lays

The repository is ``repository=URL``, or the environment's ``CASTORE_REPOSITORY``.
"""

from __future__ import annotations

from castore.filesystem.view import CastoreFileSystem

__all__ = ["CastoreFileSystem"]
