# One image for the API (`bexp serve`, the default) and for workers (`bexp worker --device cuda:0`).
#
#   docker build --tag bexp .
#   docker run --detach --name bexp-api --publish 127.0.0.1:8642:8642 --env BEXP_DATABASE_URL=... bexp
#   docker exec bexp-api bexp token create me
#   docker run --detach --gpus all --no-healthcheck --env BEXP_DATABASE_URL=... bexp worker --device cuda:0
#
# In a container the API listens on all addresses, and cannot know which user a request comes from: each needs a token,
# also one from the host itself. The third command prints one; clients send it as BEXP_API_TOKEN. A worker needs no
# token: it works on the database, and both need the same one (postgresql://...). deploy/compose.yaml starts all of them
# with a PostgreSQL.
#
# The image has transformers, which measures a config.json of Hugging Face. For the nodes and the coordinator of a Ray
# cluster: docker build --build-arg EXTRAS=transformers,ray --tag bexp:ray .
#
# PyTorch's wheels contain CUDA. The host needs the driver and NVIDIA's container toolkit; the image needs neither.

ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS build

# A torch other than the pinned one from the default package index, for example TORCH=torch==2.11.0.
ARG TORCH=
ARG TORCH_INDEX_URL=

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1
RUN python -m venv /opt/bexp
WORKDIR /build

# torch by itself first: it is large and seldom changes, so that a change of the source does not download it again.
COPY constraints.txt ./
RUN if [ -n "${TORCH}" ]; then sed --in-place "s/^torch==.*/${TORCH}/" constraints.txt; fi \
    && /opt/bexp/bin/pip install ${TORCH_INDEX_URL:+--extra-index-url "${TORCH_INDEX_URL}"} \
       --constraint constraints.txt torch

# Optional parts of bexp, separated by commas: transformers, lora, ray.
ARG EXTRAS=transformers

COPY pyproject.toml README.md ./
COPY bexp ./bexp
COPY explorer ./explorer
COPY storage ./storage
COPY workers ./workers
COPY api ./api
RUN /opt/bexp/bin/pip install --constraint constraints.txt ".[service${EXTRAS:+,${EXTRAS}}]"

FROM python:${PYTHON_VERSION}-slim AS runtime

# Triton compiles its launchers with a C compiler when a kernel first runs.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

RUN groupadd --gid 10001 bexp \
    && useradd --uid 10001 --gid bexp --create-home --home-dir /home/bexp bexp \
    && mkdir -p /home/bexp/.local/share/bexp /var/cache/bexp \
    && chown -R bexp:bexp /home/bexp /var/cache/bexp

COPY --from=build /opt/bexp /opt/bexp
COPY examples /opt/bexp/share/examples

ENV PATH=/opt/bexp/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    BEXP_HOST=0.0.0.0 \
    BEXP_PORT=8642 \
    BEXP_KERNEL_CACHE=/var/cache/bexp \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

USER 10001:10001
WORKDIR /home/bexp
EXPOSE 8642

# This checks the API. A worker answers no requests, so switch it off there (--no-healthcheck): its lease shows its life.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ['BEXP_PORT'] + '/healthz', timeout=4)"]

ENTRYPOINT ["bexp"]
CMD ["serve", "--require-token"]
