"""Manifests for Kubernetes: as the golden files."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from holdfast.cli.entry import main
from holdfast.launch import KubernetesJob, render_kubernetes
from holdfast.launch.workers.secrets import JobSecrets
from tests.support.paths import SUPPORT

GOLDEN = SUPPORT / "kubernetes"


def kubernetes(options: str, *command: str) -> Result:
    """Returns what `holdfast kubernetes` says of a command."""
    arguments = ["kubernetes", "--image", "i:1", *options.split(), "--", *command]
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("name", ["job", "jobset"])
def test_manifests_are_as_the_golden_files(name: str) -> None:
    """An Indexed Job for one slice and a JobSet for two; never run on a cluster."""
    sliced = {
        "num_slices": 2,
        "resources": {"google.com/tpu": "4"},
        "node_selector": {"cloud.google.com/gke-tpu-topology": "2x4"},
    }
    changes = sliced if name == "jobset" else {}
    job = KubernetesJob(
        "digits",
        "example.org/digits:1",
        ("python", "train.py", "--directory", "gs://b/ckpt"),
        8 if name == "jobset" else 4,
        **changes,
    )  # type: ignore[arg-type]
    assert (
        render_kubernetes(job, JobSecrets("t", "k", "ca", "sc", "sk", "cc", "ck"))
        == (GOLDEN / f"{name}.json").read_text()
    )


def test_the_command_writes_a_list_of_objects() -> None:
    """In JSON, which kubectl takes; impossible sizes and names are refused."""
    done = kubernetes("--name j -n 8 --slices 2", "python", "-c", 'print("a: b")')
    assert done.exit_code == 0, done.output
    manifest = json.loads(done.stdout)
    assert (manifest["apiVersion"], manifest["kind"]) == ("v1", "List")
    documents = manifest["items"]
    assert [document["kind"] for document in documents] == [
        "Secret",
        "Service",
        "Deployment",
        "JobSet",
    ]
    pod = documents[3]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"][-1] == 'print("a: b")'
    assert (
        documents[2]["spec"]["template"]["spec"]["containers"][0]["command"][2]
        == "--num-processes=8"
    )
    secret = documents[0]["stringData"]
    assert secret["client.crt"].startswith("-----BEGIN CERTIFICATE") and len(secret["token"]) > 40
    for text in (value for value in secret.values() if len(value) > 5):
        assert text not in str(documents[1:]), "a secret stands outside the Secret"
    given = {item["path"] for item in pod["volumes"][0]["secret"]["items"]}
    assert given == {"token", "ca.crt", "client.crt", "client.key", "key"}
    done = kubernetes("--name j -n 1 --insecure", "true")
    assert done.exit_code == 0, done.output
    assert "Secret" not in done.stdout and "tls" not in done.stdout and "volume" not in done.stdout
    for bad, message in (
        ("--name J -n 1", "name='J'"),
        ("--name j -n 3 --slices 2", "slices of one size"),
    ):
        done = kubernetes(bad, "true")
        assert done.exit_code == 2 and message in done.stderr
