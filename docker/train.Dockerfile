# The training image: a dataset in, checkpoints out. No pydicom: it never sees DICOM.
#
#   docker build -f docker/train.Dockerfile -t shardflow-train .
#
# With constraints.txt as it stands torch comes as its CUDA build. For another build name a place that has it with
# `--build-arg UV_FIND_LINKS=...` or `--build-arg UV_INDEX=...`, or a lock of your own, with uv in it, with
# `--build-arg CONSTRAINTS=FILE`. Runs as uid 10001 on a read-only root file system; what it writes to are /run-output
# and a tmpfs at /tmp.
ARG BASE_IMAGE=python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS build

# The locked packages come first: a changed source file does not install them again. uv checks the hashes in the lock.
# Bytecode is compiled here: on a read-only file system each of many processes would compile all that it imports.
WORKDIR /build
ARG CONSTRAINTS=constraints.txt
ARG UV_FIND_LINKS
ARG UV_INDEX
COPY ${CONSTRAINTS} pyproject.toml ./
RUN awk '/^uv==/,!/\\$/' "$(basename "${CONSTRAINTS}")" > uv.txt \
    && python -m pip install --no-cache-dir --quiet --target /build/uv --require-hashes --requirement uv.txt \
    && python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = project['optional-dependencies']; \
print(*project['dependencies'], *extras['train'], *extras['prometheus'], *extras['remote'], *extras['service'], sep='\n')" > requirements.txt \
    && python -m venv --without-pip /opt/shardflow \
    && uv/bin/uv pip install --no-cache --compile-bytecode --python /opt/shardflow/bin/python --constraints "$(basename "${CONSTRAINTS}")" --requirement requirements.txt

COPY README.md LICENSE ./
COPY shardflow shardflow
COPY pipelines pipelines
RUN uv/bin/uv pip install --no-cache --compile-bytecode --python /opt/shardflow/bin/python --build-constraints "$(basename "${CONSTRAINTS}")" --no-deps . \
    && uv/bin/uv pip check --python /opt/shardflow/bin/python

# hadolint ignore=DL3006
FROM ${BASE_IMAGE}

RUN groupadd --gid 10001 shardflow \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin shardflow \
    && install --directory --owner 10001 --group 10001 --mode 0755 /dataset /run-output

COPY --from=build /opt/shardflow /opt/shardflow
COPY docker/train.toml docker/recently_active.py /etc/shardflow/

# One node: processes of one container find each other on its loopback. Override GLOO_SOCKET_IFNAME for several nodes.
# (DL3064 takes TOKENIZERS_PARALLELISM for a secret.)
# hadolint ignore=DL3064
ENV PATH=/opt/shardflow/bin:$PATH \
    HOME=/tmp \
    HF_HUB_OFFLINE=1 \
    TOKENIZERS_PARALLELISM=false \
    GLOO_SOCKET_IFNAME=lo \
    OMP_NUM_THREADS=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
STOPSIGNAL SIGTERM
# A job is healthy while it writes; timeouts.startup_s and timeouts.control_s (600 s) end one that hangs.
HEALTHCHECK --interval=60s --timeout=30s --start-period=900s --retries=2 \
    CMD ["python", "/etc/shardflow/recently_active.py", "--within-s", "1300", "/run-output"]
CMD ["shardflow", "train", "--nproc-per-node", "2", "--config", "/etc/shardflow/train.toml"]
