"""Uploads that a death left in a bucket are ended by a sweep."""

from __future__ import annotations

import subprocess
import sys
import uuid

import boto3
import pytest

from holdfast.checkpoint.steps.claims import this_writer
from holdfast.checkpoint.steps.garbage import Uploads, sweep_files
from holdfast.checkpoint.steps.object_claims import ObjectClaims
from holdfast.checkpoint.storage.bucket import BucketStorage
from tests.support.object_servers import BUCKET, s3_server
from tests.support.proxy import address_of

CENTURY_S = 100 * 365 * 86_400.0  # moto says of each upload that it began in 2010


def test_old_uploads_of_writers_without_a_claim_are_ended() -> None:
    """Not those of a writer that lives, of another file, of another root, nor younger ones."""
    with s3_server() as query:
        root = f"uploads-{uuid.uuid4().hex[:8]}"  # servers of one process share what they hold
        storage = BucketStorage(f"s3://{BUCKET}/{root}{query}")
        writer = this_writer()
        claims = ObjectClaims(storage)
        claims.take(writer)
        client = boto3.client("s3", endpoint_url=f"http://{address_of(query)}")
        names = [
            "1/state/00000-00000-00c0ffee00000001.safetensors",
            f"1/state/00000-00000-{writer.id}00000001.safetensors",
            "1/state/notes.txt",
        ]
        for name in [*names, f"../else/{names[0]}"]:
            key = f"{root}/{name}".replace(f"{root}/../", "")
            client.create_multipart_upload(Bucket=BUCKET, Key=key)

        def left() -> list[str]:
            return [upload.name for upload in Uploads(storage).list()]

        assert sorted(left()) == sorted(names)
        sweep_files(storage, ObjectClaims(storage, claim_age_s=CENTURY_S))
        assert sorted(left()) == sorted(names)
        sweep_files(storage, claims)
        assert sorted(left()) == sorted(names[1:])
        found = client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
        assert f"else/{names[0]}" in [upload["Key"] for upload in found]


@pytest.mark.timeout(120)
def test_what_a_killed_writer_was_uploading_is_ended() -> None:
    """A process that ends in the middle of a streamed file leaves its parts, until a sweep."""
    program = (
        "import os, sys\n"
        "from holdfast.checkpoint.storage.bucket import PART_BYTES, BucketStorage\n"
        "def parts():\n"
        "    for number in range(4):\n"
        "        if number == 3: os._exit(9)\n"
        "        yield number * PART_BYTES, [memoryview(bytearray(PART_BYTES))]\n"
        "name = '1/state/00000-00000-00c0ffee00000001.safetensors'\n"
        "BucketStorage(sys.argv[1]).write(name, 4 * PART_BYTES, parts())\n"
    )
    with s3_server() as query:
        url = f"s3://{BUCKET}/killed{query}"
        done = subprocess.run([sys.executable, "-c", program, url], timeout=100, check=False)
        assert done.returncode == 9
        storage = BucketStorage(url)
        assert len(Uploads(storage).list()) == 1
        sweep_files(storage, ObjectClaims(storage))
        assert Uploads(storage).list() == []


def test_without_boto3_there_are_none_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep then leaves them, as on stores that have no such uploads."""
    assert Uploads(BucketStorage("memory://uploads")).list() == []
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert Uploads(BucketStorage("s3://bucket/run?region=us-east-1")).list() == []
