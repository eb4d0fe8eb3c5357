# mmjax on CUDA 13, run by a user without rights:
#   docker build -t mmjax:0.1.0 .
#   docker run --gpus all --shm-size=16g --ulimit memlock=-1 -v "$PWD/storage:/storage" mmjax:0.1.0 mmjax doctor
#
# JAX's wheels bring CUDA's libraries; the base image brings what the driver's container runtime looks for.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1

WORKDIR /opt/mmjax
COPY requirements.lock ./
RUN pip install --requirement requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY mmjax mmjax
COPY configs configs
COPY launch launch
# 1000 is the user `ubuntu` of the base image. Runs and caches go to /storage, which a volume replaces.
RUN pip install --no-deps . && install --directory --owner=1000 --group=1000 /storage
USER 1000
ENV HOME=/home/ubuntu XDG_CACHE_HOME=/storage/.cache
WORKDIR /storage
CMD ["mmjax", "doctor"]
