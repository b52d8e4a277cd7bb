# Planning, and training where the host gives the container its devices.
#
#   docker build -t meshwright .
#   docker run --rm meshwright plan llama-3.1-8b --cluster 8xh100-sxm-80gb
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" meshwright launch plan.yaml
#
# EXTRAS= leaves PyTorch out: an image that plans alone.
FROM python:3.13-slim

ARG EXTRAS=[torch]

WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY planner planner
COPY runtime runtime
COPY profiler profiler
COPY meshwright meshwright
RUN pip install --no-cache-dir -c constraints.txt pip \
    && pip install --no-cache-dir -c constraints.txt --build-constraint constraints.txt ".${EXTRAS}" \
    && rm -rf /source \
    && useradd --create-home user

USER user
WORKDIR /work
ENTRYPOINT ["meshwright"]
CMD ["--help"]
