# The packing image: DICOM in, a dataset out. No torch, no network when it runs.
#
#   docker build -f docker/pack.Dockerfile -t shardflow-pack .
#
# Runs as uid 10001 on a read-only root file system; what it writes to are /dataset, /private and a tmpfs at /tmp.
ARG BASE_IMAGE=python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS build

# The locked packages come first: a changed source file does not install them again. uv checks the hashes in the lock.
# Bytecode is compiled here: on a read-only file system each of many processes would compile all that it imports.
WORKDIR /build
COPY constraints.txt pyproject.toml ./
RUN awk '/^uv==/,!/\\$/' constraints.txt > uv.txt \
    && python -m pip install --no-cache-dir --quiet --target /build/uv --require-hashes --requirement uv.txt \
    && python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = project['optional-dependencies']; \
print(*project['dependencies'], *extras['pack'], *extras['wfdb'], *extras['remote'], sep='\n')" > requirements.txt \
    && python -m venv --without-pip /opt/shardflow \
    && uv/bin/uv pip install --no-cache --compile-bytecode --python /opt/shardflow/bin/python --constraints constraints.txt --requirement requirements.txt

COPY README.md LICENSE ./
COPY shardflow shardflow
COPY pipelines pipelines
RUN uv/bin/uv pip install --no-cache --compile-bytecode --python /opt/shardflow/bin/python --build-constraints constraints.txt --no-deps . \
    && uv/bin/uv pip check --python /opt/shardflow/bin/python

# hadolint ignore=DL3006
FROM ${BASE_IMAGE}

RUN groupadd --gid 10001 shardflow \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin shardflow \
    && install --directory --owner 10001 --group 10001 --mode 0755 /dataset \
    && install --directory --owner 10001 --group 10001 --mode 0700 /private

COPY --from=build /opt/shardflow /opt/shardflow
COPY docker/pack.toml docker/recently_active.py /etc/shardflow/

ENV PATH=/opt/shardflow/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
STOPSIGNAL SIGTERM
# A job is healthy while it writes; one study may take execution.task_timeout_s (900 s) twice.
HEALTHCHECK --interval=60s --timeout=30s --start-period=600s --retries=2 \
    CMD ["python", "/etc/shardflow/recently_active.py", "--within-s", "2000", "/dataset", "/private"]
ENTRYPOINT ["shardflow"]
CMD ["pack", "--config", "/etc/shardflow/pack.toml"]
