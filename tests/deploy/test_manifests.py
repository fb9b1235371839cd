"""Kubernetes accepts the manifests, and they agree with the images and with themselves."""

from __future__ import annotations

import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from shardflow.cli import serve
from shardflow.cli.common import CommandParser
from shardflow.cli.main import main
from shardflow.config import load_config
from shardflow.errors import ConfigError
from shardflow.monitoring.prometheus import parse_address
from shardflow.packing import ArrayTask, PackConfig
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.training.__main__ import EXIT_STOPPED
from shardflow.training.config import TrainConfig
from tests.conftest import REPOSITORY
from tests.deploy.manifests import MANIFESTS, Resource, jobs, memory_bytes, pod, resources

pytestmark = pytest.mark.fast

DOCKER = REPOSITORY / "docker"
IMAGES = {
    "localhost/shardflow-pack": DOCKER / "pack.Dockerfile",
    "localhost/shardflow-train": DOCKER / "train.Dockerfile",
}
CONTAINERS = [
    pytest.param(job, container, id=f"{job}-{container['name']}")
    for job in jobs()
    for container in [*pod(job).get("initContainers", []), *pod(job)["containers"]]
]


def container_of(job: str) -> Resource:
    """The only container of a Job that is no init container."""
    (found,) = pod(job)["containers"]
    container: Resource = found
    return container


def train_words() -> list[str]:
    """The words of the training command that the pod's shell executes."""
    shell, option, script = container_of("shardflow-train")["command"]
    assert (shell, option) == ("sh", "-c")
    return shlex.split(script)


def option_of(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def overrides_of(words: list[str]) -> list[str]:
    return [value for name, value in pairwise(words) if name == "--set"]


@pytest.mark.parametrize(
    "resource", resources(), ids=lambda found: f"{found['kind']}-{found['metadata']['name']}"
)
@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
def test_kubernetes_accepts_it(resource: Resource, version: str) -> None:
    kubernetes_validate.validate(resource, version, strict=True)


def test_every_file_is_looked_at() -> None:
    names = {"pack", "pack-merge", "pack-tasks", "serve", "storage", "tokenizer", "train"}
    assert {path.name for path in MANIFESTS} == {f"{name}.yaml" for name in names}
    assert set(jobs()) == {f"shardflow-{name}" for name in names - {"storage"}}


@pytest.mark.parametrize("job", jobs())
def test_a_pod_runs_as_the_user_of_the_image_and_knows_nothing_of_the_cluster(job: str) -> None:
    (users,) = {
        tuple(re.findall(r"^USER (\d+):(\d+)$", file.read_text(encoding="utf-8"), re.MULTILINE))
        for file in IMAGES.values()
    }
    ((user, group),) = users
    security = pod(job)["securityContext"]
    assert security["runAsNonRoot"] is True
    assert (security["runAsUser"], security["runAsGroup"]) == (int(user), int(group))
    assert (security["fsGroup"], security["fsGroupChangePolicy"]) == (int(group), "OnRootMismatch")
    assert pod(job)["automountServiceAccountToken"] is False
    assert pod(job).get("restartPolicy") == (None if job == "shardflow-serve" else "Never")


@pytest.mark.parametrize(("job", "container"), CONTAINERS)
def test_a_container_is_locked_in_and_says_what_it_needs(job: str, container: Resource) -> None:
    assert container["image"] in IMAGES
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    wanted = container["resources"]
    assert {"cpu", "memory"} <= wanted["requests"].keys()
    assert wanted["limits"]["memory"] == wanted["requests"]["memory"]
    # What lies in memory counts.
    volumes = {volume["name"]: volume for volume in pod(job)["volumes"]}
    mounted = [volumes[mount["name"]] for mount in container["volumeMounts"]]
    in_memory = sum(
        memory_bytes(volume["emptyDir"]["sizeLimit"]) for volume in mounted if "emptyDir" in volume
    )
    assert in_memory < memory_bytes(wanted["limits"]["memory"])


def test_claims_are_those_of_the_storage_file_and_training_never_sees_the_private_one() -> None:
    shipped = {found["metadata"]["name"] for found in resources() if found["kind"] == "PersistentVolumeClaim"}
    for job in jobs():
        claims = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pod(job)["volumes"]
            if "persistentVolumeClaim" in volume
        }
        assert claims <= shipped | {"shardflow-input"}
        assert ("shardflow-private" in claims) == job.startswith("shardflow-pack")


def test_mounts_are_the_folders_of_the_images_and_of_the_compose_file() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    for service, job in (
        ("pack", "shardflow-pack"),
        ("tokenizer", "shardflow-tokenizer"),
        ("train", "shardflow-train"),
    ):
        composed = {
            re.split(r":(?=/)", volume)[-1].removesuffix(":ro") for volume in compose[service]["volumes"]
        }
        mounts = {mount["mountPath"] for mount in container_of(job)["volumeMounts"]}
        assert composed <= mounts
        assert mounts - composed <= {"/key", "/tmp", "/dev/shm"}
        assert compose[service]["image"] == container_of(job)["image"]


@pytest.mark.parametrize("job", ["shardflow-pack", "shardflow-pack-tasks", "shardflow-pack-merge"])
def test_packing_is_told_settings_that_it_has_and_that_fit_its_share_of_the_node(job: str) -> None:
    container = container_of(job)
    command, *arguments = container["args"]
    assert command == "pack"
    in_image = option_of(arguments, "--config")
    assert in_image == "/etc/shardflow/pack.toml"
    here = [str(DOCKER / "pack.toml") if word == in_image else word for word in arguments]
    assert main(["pack", *here, "--print-config"]) == 0
    config = load_config(PackConfig, DOCKER / "pack.toml", overrides_of(arguments))
    wanted = container["resources"]
    assert config.execution.num_processes == int(wanted["requests"]["cpu"])
    in_use = config.execution.num_processes * config.execution.memory_bytes
    assert in_use + 2 * 2**30 <= memory_bytes(wanted["limits"]["memory"])
    assert Path(str(config.key_file)).parent == Path("/key")


def test_tasks_know_their_number_and_the_number_of_all() -> None:
    spec, container = jobs()["shardflow-pack-tasks"]["spec"], container_of("shardflow-pack-tasks")
    assert spec["completionMode"] == "Indexed"
    (variable,) = container["env"]
    index = variable["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    task = option_of(container["args"], "--task").replace(f"$({variable['name']})", "3")
    assert ArrayTask.parse(task) == ArrayTask(3, spec["completions"])
    assert spec["parallelism"] == spec["completions"]
    assert "--merge" in container_of("shardflow-pack-merge")["args"]


def test_the_mounted_secret_becomes_a_key_that_packing_takes(tmp_path: Path) -> None:
    """As the pod does it: the secret of mode 0440 is refused, the init container's copy is not."""
    volumes = {volume["name"]: volume for volume in pod("shardflow-pack")["volumes"]}
    assert volumes["secret"]["secret"]["defaultMode"] == 0o440
    assert volumes["key"]["emptyDir"]["medium"] == "Memory"
    for mount in container_of("shardflow-pack")["volumeMounts"]:
        assert mount["name"] != "secret"
    (tmp_path / "secret").mkdir()
    (tmp_path / "key").mkdir()
    secret = tmp_path / "secret" / "secret.key"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o440)
    with pytest.raises(ConfigError, match="got mode 0440"):
        SecretKey.load(secret)
    (init,) = pod("shardflow-pack")["initContainers"]
    command = [f"{tmp_path}{word}" if word.startswith("/") else word for word in init["command"]]
    subprocess.run(command, check=True)
    assert SecretKey.load(tmp_path / "key" / "secret.key").key_id


def test_the_tokenizer_command_is_one() -> None:
    program, *arguments = container_of("shardflow-tokenizer")["command"]
    assert (program, arguments[0]) == ("shardflow", "train-tokenizer")
    assert main(arguments) == 2  # no such dataset here; a wrong option would not get that far


def test_the_training_command_is_one_and_its_pods_find_each_other() -> None:
    words, spec = train_words(), jobs()["shardflow-train"]["spec"]
    assert words[:3] == ["exec", "shardflow", "train"]
    assert option_of(words, "--config") == "/etc/shardflow/train.toml"
    load_config(TrainConfig, DOCKER / "train.toml", overrides_of(words))
    assert int(option_of(words, "--nnodes")) == spec["completions"] == spec["parallelism"]
    assert spec["completionMode"] == "Indexed"

    service = _service("shardflow-train")
    assert service["metadata"]["name"] == pod("shardflow-train")["subdomain"]
    assert service["spec"]["clusterIP"] == "None"
    labels = spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (port,) = service["spec"]["ports"]
    name = service["metadata"]["name"]
    assert option_of(words, "--rdzv-endpoint") == f"shardflow-train-0.{name}:{port['port']}"
    for policy in (found for found in resources() if found["kind"] == "NetworkPolicy"):
        selector = policy["spec"]["podSelector"]["matchLabels"]
        name = (
            policy["metadata"]["name"].removesuffix("-serve") if "train" in policy["metadata"]["name"] else ""
        )
        target = jobs()[name or policy["metadata"]["name"]]["spec"]["template"]["metadata"]["labels"]
        assert selector == target


def _service(name: str) -> Resource:
    (service,) = [
        found for found in resources() if found["kind"] == "Service" and found["metadata"]["name"] == name
    ]
    return service


def test_data_servers_are_found_by_name_and_ask_for_the_token_that_training_has() -> None:
    container, service = container_of("shardflow-serve"), _service("shardflow-serve")
    program, name, *datasets = container["command"]
    assert (program, name, datasets) == ("shardflow", "serve", ["/dataset"])
    parser = CommandParser()
    serve.add_arguments(parser)
    arguments = parser.parse_args([*datasets, *container["args"]])
    host, port = parse_address(arguments.listen, "--listen")
    assert host == "0.0.0.0"
    assert service["spec"]["clusterIP"] == "None"  # so that the name stands for every pod
    assert service["spec"]["ports"][0]["port"] == container["ports"][0]["containerPort"] == port
    labels = jobs()["shardflow-serve"]["spec"]["template"]["metadata"]["labels"]
    assert (
        service["spec"]["selector"] == labels == jobs()["shardflow-serve"]["spec"]["selector"]["matchLabels"]
    )
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert str(Path(arguments.token_file).parent) in mounts
    assert int(container["resources"]["requests"]["cpu"]) == arguments.threads
    text = next(path for path in MANIFESTS if path.name == "serve.yaml").read_text(encoding="utf-8")
    words = shlex.split(re.sub("\\n#", " ", text[: text.index("apiVersion")]), comments=False)
    overrides = [value for value in overrides_of(words) if value.startswith("loader.")]
    settings = load_config(TrainConfig, DOCKER / "train.toml", overrides).loader
    assert (settings.execution, settings.servers) == ("service", ("shardflow-serve:8815",))


@pytest.mark.parametrize(("index", "is_host"), [("0", "1"), ("1", "0"), ("7", "0")])
def test_the_first_pod_holds_the_rendezvous(index: str, is_host: str) -> None:
    script = container_of("shardflow-train")["command"][2].replace("exec shardflow", "printf '%s\\n'")
    shown = subprocess.run(
        ["sh", "-c", script],
        env={"JOB_COMPLETION_INDEX": index, "POD_IP": "10.0.0.4"},
        check=True,
        capture_output=True,
        text=True,
    )
    words = shown.stdout.split("\n")
    assert f"is_host={is_host}" in option_of(words, "--rdzv-conf").split(",")
    assert option_of(words, "--local-addr") == "10.0.0.4"


def test_there_is_time_to_write_a_checkpoint() -> None:
    timeout_s = int(option_of(train_words(), "--shutdown-timeout"))
    assert timeout_s + 20 <= pod("shardflow-train")["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(
    ("job", "hopeless", "stopped"),
    [
        ("shardflow-pack", [2, 3], 130),
        ("shardflow-pack-tasks", [2, 3], 130),
        ("shardflow-pack-merge", [2, 3, 4], 130),
        ("shardflow-train", [2, 3], EXIT_STOPPED),
    ],
)
def test_exit_codes_are_answered_as_the_jobs_mean_them(job: str, hopeless: list[int], stopped: int) -> None:
    rules = jobs()[job]["spec"]["podFailurePolicy"]["rules"]
    names = {container["name"] for container in pod(job)["containers"]}
    answers = [
        (rule["action"], rule["onExitCodes"]["values"] if "onExitCodes" in rule else "disruption")
        for rule in rules
    ]
    assert answers == [("FailJob", hopeless), ("Ignore", [stopped]), ("Ignore", "disruption")]
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} <= names
    assert jobs()[job]["spec"]["podReplacementPolicy"] == "Failed"
