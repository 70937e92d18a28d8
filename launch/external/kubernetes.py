"""Renders Kubernetes manifests: an Indexed Job for one slice, a JobSet for more.

The coordinator is a Deployment and a Service of its own. Held against golden files; not run on a
cluster. Sources: kubernetes.io, "Indexed Job for parallel processing" and "Pod failure policy";
jobset.sigs.k8s.io, labels and failure policy. Exit codes: 75 (preempted) and a disrupted pod do not
count as failures, 93 ends the job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..supervisor.job import DO_NOT_RESTART, PREEMPTED
from ..workers.secrets import CLIENT_FILES, SERVER_FILES, JobSecrets, server_arguments

_PORT = 8476
_SECRETS = "/run/holdfast"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")


@dataclass(frozen=True)
class KubernetesJob:
    """What to render.

    Above one slice it is a JobSet with one Job a slice; `resources` are of one pod. Unless
    `insecure`, the manifest holds a Secret with a token and certificates that are made for this
    job.
    """

    name: str
    image: str
    command: Sequence[str]
    num_processes: int
    num_slices: int = 1
    namespace: str = "default"
    resources: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 10
    grace_s: int = 120
    insecure: bool = False

    @property
    def processes_per_slice(self) -> int:
        """The number of processes of one slice."""
        return self.num_processes // self.num_slices

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"name={self.name!r}: expected at most 40 of a-z, 0-9 and -, with no - at an end"
            )
        if self.num_processes < 1 or self.num_slices < 1 or self.num_processes % self.num_slices:
            raise ValueError(
                f"num_processes={self.num_processes} in num_slices={self.num_slices}: expected"
                " slices of one size"
            )
        if not self.command:
            raise ValueError("no command to run")


def render(job: KubernetesJob, secrets: JobSecrets | None = None) -> str:
    """Returns the manifest as JSON, a List of its objects, for `kubectl apply -f -`.

    Kubernetes starts pods again as its own policies say. `secrets` default to new ones, unless the
    job is insecure: treat the manifest as a secret then. Raises ImportError where certificates
    cannot be made.
    """
    if secrets is None and not job.insecure:
        name = _coordinator_name(job)
        secrets = JobSecrets.create(
            [name, f"{name}.{job.namespace}", f"{name}.{job.namespace}.svc"]
        )
    worker = _indexed_job(job)
    if job.num_slices == 1:
        top = _object("batch/v1", "Job", job, job.name, spec=worker)
    else:
        replicated = {"name": "workers", "replicas": job.num_slices, "template": {"spec": worker}}
        spec = {
            "failurePolicy": {"maxRestarts": job.max_restarts, "rules": [_FAILS]},
            "network": {"enableDNSHostnames": True},
            "replicatedJobs": [replicated],
        }
        top = _object("jobset.x-k8s.io/v1alpha2", "JobSet", job, job.name, spec=spec)
    objects = [_secret(job, secrets)] if secrets else []
    objects += [_service(job), _coordinator(job), top]
    manifest = {"apiVersion": "v1", "kind": "List", "items": objects}
    return json.dumps(manifest, indent=2) + "\n"


# A Job's own policy fails it for DO_NOT_RESTART alone.
_FAILS = {"name": "fatal", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}


def _secret_name(job: KubernetesJob) -> str:
    return f"{job.name}-coordination"


def _secret(job: KubernetesJob, secrets: JobSecrets) -> dict[str, Any]:
    files = secrets.files_of_client() | secrets.files_of_server()
    return _object("v1", "Secret", job, _secret_name(job), type="Opaque", stringData=files)


def _mount(
    job: KubernetesJob, pod: dict[str, Any], container: dict[str, Any], names: Sequence[str]
) -> None:
    """Gives a container those files of the Secret that it needs, if the job has one."""
    if job.insecure:
        return
    container["volumeMounts"] = [{"name": "coordination", "mountPath": _SECRETS, "readOnly": True}]
    items = [{"key": name, "path": name} for name in names]
    pod["volumes"] = [
        {"name": "coordination", "secret": {"secretName": _secret_name(job), "items": items}}
    ]


def _object(
    version: str, kind: str, job: KubernetesJob, name: str, **fields: object
) -> dict[str, Any]:
    labels = {"app.kubernetes.io/part-of": job.name}
    metadata = {"name": name, "namespace": job.namespace, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def _coordinator_name(job: KubernetesJob) -> str:
    return f"{job.name}-coordinator"


def _service(job: KubernetesJob) -> dict[str, Any]:
    name = _coordinator_name(job)
    spec = {
        "selector": {"app.kubernetes.io/name": name},
        "ports": [{"name": "grpc", "port": _PORT, "targetPort": _PORT}],
    }
    return _object("v1", "Service", job, name, spec=spec)


def _coordinator(job: KubernetesJob) -> dict[str, Any]:
    """Returns a Deployment of the coordinator.

    The Deployment starts it again once all pods have been gone for the time that it lingers. Pods
    that come again before that begin the job anew at the same one.
    """
    name = _coordinator_name(job)
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": job.name}
    command = [
        "holdfast",
        "coordinator",
        f"--num-processes={job.num_processes}",
        "--host=0.0.0.0",
        f"--port={_PORT}",
        f"--advertise={name}",
        "--recoverable",
        "--survivable",
        "--linger-s=10",
        "--startup-timeout-s=0",
    ]
    command += [] if job.insecure else server_arguments(Path(_SECRETS))
    container: dict[str, Any] = {
        "name": "coordinator",
        "image": job.image,
        "command": command,
        "ports": [{"containerPort": _PORT}],
    }
    pod: dict[str, Any] = {"containers": [container]}
    _mount(job, pod, container, SERVER_FILES)
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {
        "replicas": 1,
        "selector": {"matchLabels": {"app.kubernetes.io/name": name}},
        "strategy": {"type": "Recreate"},
        "template": template,
    }
    return _object("apps/v1", "Deployment", job, name, spec=spec)


def _indexed_job(job: KubernetesJob) -> dict[str, Any]:
    rules: list[dict[str, Any]] = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [DO_NOT_RESTART]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [PREEMPTED]}},
    ]
    return {
        "completionMode": "Indexed",
        "completions": job.processes_per_slice,
        "parallelism": job.processes_per_slice,
        "backoffLimit": job.max_restarts * job.num_processes if job.num_slices == 1 else 0,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": _pod(job)},
    }


def _pod(job: KubernetesJob) -> dict[str, Any]:
    task = [
        "holdfast",
        "task",
        f"--coordinator={_coordinator_name(job)}:{_PORT}",
        *([] if job.insecure else [f"--secrets={_SECRETS}"]),
        "--",
        *job.command,
    ]
    container: dict[str, Any] = {
        "name": "process",
        "image": job.image,
        "command": task,
        "env": _environment(job),
    }
    if job.resources:
        container["resources"] = {"limits": dict(job.resources)}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [container],
    }
    _mount(job, pod, container, CLIENT_FILES)
    if job.node_selector:
        pod["nodeSelector"] = dict(job.node_selector)
    return pod


def _environment(job: KubernetesJob) -> list[dict[str, Any]]:
    fixed = {
        "JOB_ID": job.name,
        "PODS_PER_JOB": str(job.processes_per_slice),
        "JOBS": str(job.num_slices),
    }
    labels = {}
    if job.num_slices > 1:
        fixed["FIRST_HOST"] = f"{job.name}-workers-0-0.{job.name}"
        labels = {
            "JOB_INDEX": "jobset.sigs.k8s.io/job-index",
            "RESTART_ATTEMPT": "jobset.sigs.k8s.io/restart-attempt",
        }
    variables: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in fixed.items()
    ]
    for name, label in labels.items():
        source = {"fieldPath": f"metadata.labels['{label}']"}
        variables.append({"name": name, "valueFrom": {"fieldRef": source}})
    return variables
