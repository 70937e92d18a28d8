"""Sweeps what dead writers left.

The order of a deletion makes it safe at every moment: the record first (the step is gone, durably),
then the packs that it named. The order of a sweep too: packs are listed, then the claims, then the
commits of writers without a claim are stopped, then the record is read. A pack whose writer has no
claim then, and that the record does not name, can never be committed: its writer was fenced, or
closed after its last commit.

A step that has a record, and packs of one save alone, is not looked into: to read every record at
every opening would cost more than what it could find, packs beside the record of a save that wrote
none.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import CheckpointError, StepNotFound
from ..format.item_report import FILE_NAME
from ..format.record import read_record
from ..storage.base import Storage, UploadsParts
from ..storage.path import join, open_storage
from ..storage.steady_time import steady_time_s
from ..storage.tombstone import RECORD_NAME
from .claims import Claims, Writer, may_fence, this_writer, writer_of
from .object_claims import ObjectClaims, open_claims
from .step_files import StepFiles, delete_files, list_files, list_steps_files

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Upload:
    """A file that is being uploaded, or was when its writer died. `began_s` is in Unix seconds."""

    name: str
    id: str
    began_s: float


class Uploads:
    """The uploads below one prefix of a bucket of s3://, through boto3; none without it.

    obstore can neither list nor end them. Errors are boto3's.
    """

    def __init__(self, storage: UploadsParts) -> None:
        self._settings, self._prefix = storage.s3_settings

    def list(self) -> list[Upload]:
        """Returns the uploads that are not at their end."""
        if importlib.util.find_spec("boto3") is None:
            return []
        if "bucket" not in self._settings or self._settings.get("skip_signature") == "true":
            return []  # whoever has no credentials uploads nothing
        pages = self._client().get_paginator("list_multipart_uploads")
        skip = len(self._prefix)
        return [
            Upload(found["Key"][skip:], found["UploadId"], found["Initiated"].timestamp())
            for page in pages.paginate(Bucket=self._settings["bucket"], Prefix=self._prefix)
            for found in page.get("Uploads", [])
        ]

    def end(self, upload: Upload) -> None:
        """Ends an upload: its parts are deleted."""
        self._client().abort_multipart_upload(
            Bucket=self._settings["bucket"],
            Key=self._prefix + upload.name,
            UploadId=upload.id,
        )

    def _client(self) -> Any:
        import boto3
        from botocore.config import Config

        endpoint = self._settings.get("endpoint")
        return boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint,
            region_name=self._settings.get("region"),
            aws_access_key_id=self._settings.get("access_key_id"),
            aws_secret_access_key=self._settings.get("secret_access_key"),
            aws_session_token=self._settings.get("session_token"),
            config=Config(s3={"addressing_style": "path"}) if endpoint else None,
        )


@dataclass
class Swept:
    """What a sweep did: writers fenced, with the reasons, files deleted, and claims that stand."""

    fenced: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    standing: list[str] = field(default_factory=list)


class Fencing(NamedTuple):
    """Why other writers were fenced, and which were not: they live, or may live."""

    reasons: list[str]
    others: list[Writer]


def fence_others(claims: Claims, me: Writer, *, force: bool = False) -> Fencing:
    """Takes the claims of others away where that is right, or with `force` all.

    Raises Fenced where `me` is a lower attempt of its job.
    """
    reasons = []
    others = []
    for other, dead in claims.others(me.id):
        if force:
            reason = f"writer {other.id} was fenced by force"
        else:
            reason = may_fence(other, me, dead=dead)
        if reason:
            claims.fence(other.id)
            reasons.append(reason)
            _log.info("%s: fenced", reason)
        else:
            others.append(other)
    return Fencing(reasons, others)


def sweep_files(
    storage: Storage, claims: Claims, *, listed: Collection[str] | None = None
) -> list[str]:
    """Deletes packs that no record names, of writers without a claim; returns their names.

    Folders that are then empty go too, and uploads of such writers that never came to their end.
    `listed` are the names of all files of the root, from a listing before this call: an opening
    has one, and the order of a sweep asks only that it is older than the look at the claims.
    """
    uploads = _old_uploads(storage, claims)
    deleted = _sweep_steps(storage, claims, list_steps_files(storage, listed))
    _end_uploads(storage, claims, uploads)
    return deleted


def _old_uploads(storage: Storage, claims: Claims) -> list[Upload]:
    """Returns the uploads of packs that are older than a claim may be."""
    if not isinstance(storage, UploadsParts) or not isinstance(claims, ObjectClaims):
        return []
    try:
        found = Uploads(storage).list()
    except Exception as error:  # boto3's own kinds: the sweep of packs needs none of it
        _log.info("%s: its unfinished uploads could not be listed: %s", storage.root, error)
        return []
    oldest_s = steady_time_s() - claims.age_s
    return [each for each in found if each.began_s < oldest_s and _writer_of_pack(each.name)]


def _end_uploads(storage: Storage, claims: Claims, uploads: Sequence[Upload]) -> None:
    """Ends those of the uploads whose writer has no claim. They were listed before this call."""
    if not uploads:
        return
    assert isinstance(storage, UploadsParts)
    standing = claims.standing()
    for upload in uploads:
        if _writer_of_pack(upload.name) in standing:
            continue
        try:
            Uploads(storage).end(upload)
        except Exception as error:
            _log.info("%s: the upload of %s stays: %s", storage.root, upload.name, error)


def _writer_of_pack(path: str) -> str | None:
    """Returns the id of a pack's writer, by the pack's path in the root; None for other files."""
    match = FILE_NAME.fullmatch(path.rpartition("/")[2])
    return None if match is None else writer_of(match[3])


def sweep_step(storage: Storage, claims: Claims, step_dir: str) -> list[str]:
    """Does what `sweep_files` does for one step, or for the folder of a one-shot save ("")."""
    return _sweep_steps(storage, claims, {step_dir: list_files(storage, step_dir)})


def _sweep_steps(storage: Storage, claims: Claims, steps: Mapping[str, StepFiles]) -> list[str]:
    """Sweeps steps whose files were listed before this call."""
    # Listed after the packs: a claim is older than its packs, so a pack whose claim is not found
    # now has no writer that could still commit it.
    standing = claims.standing()
    deleted: list[str] = []
    for step_dir, files in steps.items():
        names = _delete_suspects(storage, claims, step_dir, files, standing)
        if storage.posix is not None and step_dir and (names or not files.packs):
            _delete_empty(storage, step_dir)
        deleted += [join(step_dir, name) for name in names]
    claims.forget_fenced()
    return deleted


def _delete_suspects(
    storage: Storage, claims: Claims, step_dir: str, files: StepFiles, standing: set[str]
) -> Sequence[str]:
    """Deletes packs of one step that no writer can still commit; returns their names."""
    writers = {name: writer_of(save_id) for name, save_id in files.packs.items()}
    names: Sequence[str] = [name for name, writer in writers.items() if writer not in standing]
    if not names or (files.has_record and len(set(files.packs.values())) == 1):
        return []
    if storage.posix is not None:
        names = _unnamed(storage, step_dir, names)
    if not names:
        return []
    names = claims.bury(step_dir, {name: writers[name] for name in names})
    # Looked at once more: a commit that was under way has come to its end only now. In an object
    # store `bury` has read the record itself, and changed it on the condition that it is the same.
    if storage.posix is not None:
        names = _unnamed(storage, step_dir, names)
    delete_files(storage, step_dir, names)
    return names


def _unnamed(storage: Storage, step_dir: str, names: Sequence[str]) -> list[str]:
    """Returns the files that a step's record does not name; none where that is not known."""
    named = _named(storage, step_dir)
    return [] if named is None else [name for name in names if name not in named]


def _named(storage: Storage, step_dir: str) -> set[str] | None:
    """Returns the files that a step's record names, none without a record.

    None (touch nothing): the record is damaged, or it may be there.
    """
    try:
        return set(read_record(storage, step_dir).file_names())
    except StepNotFound:
        # A client of a shared file system may not find a record that is there. It is believed only
        # where a listing shows other files of the step, and no record beside them.
        names = [entry.name for entry in storage.list(step_dir)]
        return set() if names and join(step_dir, RECORD_NAME) not in names else None
    except CheckpointError as error:
        _log.warning("%s is left as it is: %s", join(storage.root, step_dir), error)
        return None


def _delete_empty(storage: Storage, step_dir: str) -> None:
    """Removes empty folders: a writer may die after it made a folder, before it made a file."""
    # Where a file is left, at any depth, the folders may be somebody else's.
    if storage.list(step_dir, recursive=True, names_only=True):
        return
    # Folders alone: a writer may have saved the step since that listing.
    names = [entry.name for entry in storage.list(step_dir, names_only=True)]
    storage.delete([name for name in names if name.endswith("/")] + [f"{step_dir}/"])


def sweep(path: str | os.PathLike[str], *, force: bool = False) -> Swept:
    """Fences the dead writers of a root (with `force` all) and deletes their unfinished saves.

    One-shot saves too. Never touches steps that have a record, Orbax's or foreign files, or,
    without `force`, the saves of a manager that lives. Blocks. Raises CheckpointError where the
    root cannot be read or written.
    """
    storage = open_storage(path)
    claims = open_claims(storage)
    try:
        fenced = fence_others(claims, this_writer(), force=force).reasons
        deleted = [*sweep_step(storage, claims, ""), *sweep_files(storage, claims)]
        return Swept(fenced, deleted, sorted(claims.standing()))
    except OSError as error:
        raise CheckpointError(
            f"{storage.root} cannot be swept: {error}; expected a root that this process may write"
            " to. What was swept before stays so: sweep again",
            path=storage.root,
        ) from error
