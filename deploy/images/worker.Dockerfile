# The worker, for NVIDIA GPUs or, with STACK=cpu, for none.
#
#   docker build -f deploy/images/worker.Dockerfile -t prefixgate-worker .
#   docker build -f deploy/images/worker.Dockerfile --build-arg STACK=cpu --build-arg TORCH_INDEX=URL -t prefixgate-worker:cpu .
#
# The CUDA stack is that of constraints-cuda.txt. Kernels are compiled when the worker starts, by the NVRTC that comes as
# a Python package, and Triton brings its own assembler: there is no toolkit in the image. For the CPU variant TORCH_INDEX
# is the package index that has torch's CPU builds; without it torch comes with gigabytes of CUDA that nothing uses.
# PYTHON is the base image; name it with its digest for builds that repeat.
ARG PYTHON=python:3.11-slim-bookworm
ARG STACK=cuda

FROM ${PYTHON} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
RUN python -m venv /opt/prefixgate
COPY constraints.txt constraints-cuda.txt ./

FROM build AS stack-cuda
RUN /opt/prefixgate/bin/pip install -c constraints-cuda.txt "$(grep '^torch==' constraints-cuda.txt)"
COPY pyproject.toml LICENSE README.md ./
COPY cache cache
COPY config config
COPY gateway gateway
COPY proto proto
COPY worker worker
RUN /opt/prefixgate/bin/pip install -c constraints-cuda.txt ".[worker,cuda,flash,otel]"

FROM build AS stack-cpu
ARG TORCH_INDEX
RUN /opt/prefixgate/bin/pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt \
    "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml LICENSE README.md ./
COPY cache cache
COPY config config
COPY gateway gateway
COPY proto proto
COPY worker worker
RUN /opt/prefixgate/bin/pip install -c constraints.txt ".[worker,otel]"

# hadolint ignore=DL3006
FROM stack-${STACK} AS stack

FROM ${PYTHON}
# g++ compiles the attention for CPUs at the first start, and the host side of Triton's kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 prefixgate \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/prefixgate prefixgate \
    && install --directory --owner=10001 --group=10001 --mode=0700 /run/prefixgate /var/cache/prefixgate
COPY --from=stack /opt/prefixgate /opt/prefixgate
# Everything that is written at run time is written below one folder; the rest of the image can be read-only.
ENV PATH=/opt/prefixgate/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PREFIXGATE_CACHE_DIR=/var/cache/prefixgate \
    TRITON_CACHE_DIR=/var/cache/prefixgate/triton \
    HF_HOME=/var/cache/prefixgate/huggingface \
    HF_HUB_OFFLINE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
# Gateways, where they do not come by a socket file, and metrics. The process drains at SIGTERM.
EXPOSE 8060 8052
STOPSIGNAL SIGTERM
ENTRYPOINT ["prefixgate"]
CMD ["worker"]
