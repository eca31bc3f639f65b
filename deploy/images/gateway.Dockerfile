# The gateway: no machine-learning library, no model, some 100 MB.
#
#   docker build -f deploy/images/gateway.Dockerfile -t prefixgate-gateway .
#
# PYTHON is the base image; name it with its digest (python:3.11-slim-bookworm@sha256:...) for builds that repeat.
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
RUN python -m venv /opt/prefixgate
# What changes rarely comes first: the dependencies are a layer of their own.
COPY constraints.txt pyproject.toml LICENSE README.md ./
COPY cache cache
COPY config config
COPY gateway gateway
COPY proto proto
COPY worker worker
ARG EXTRAS=otel
RUN /opt/prefixgate/bin/pip install -c constraints.txt ".[${EXTRAS}]" \
    && /opt/prefixgate/bin/pip uninstall --yes pip setuptools

FROM ${PYTHON}
# A number, so that Kubernetes can see that it is not root's.
RUN groupadd --gid 10001 prefixgate \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/prefixgate prefixgate \
    && install --directory --owner=10001 --group=10001 --mode=0700 /run/prefixgate /var/cache/prefixgate
COPY --from=build /opt/prefixgate /opt/prefixgate
ENV PATH=/opt/prefixgate/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
# Calls, and metrics with the status page. The process drains at SIGTERM.
EXPOSE 8050 8051
STOPSIGNAL SIGTERM
ENTRYPOINT ["prefixgate"]
CMD ["gateway"]
