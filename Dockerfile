# Planning, and training where the host gives the container its devices.
#
#   docker build -t meshwright .
#   docker run --rm meshwright plan llama-3.1-8b --cluster 8xh100-sxm-80gb
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" --user "$(id -u)" meshwright launch plan.yaml
#
# --build-arg EXTRAS= leaves PyTorch out: an image that plans alone.
FROM python:3.13-slim AS build

ARG EXTRAS=[torch]

WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY planner planner
COPY runtime runtime
COPY profiler profiler
COPY meshwright meshwright
RUN python -m venv /opt/meshwright \
    && /opt/meshwright/bin/pip install --no-cache-dir -c constraints.txt pip \
    && /opt/meshwright/bin/pip install --no-cache-dir -c constraints.txt --build-constraint constraints.txt ".${EXTRAS}"

FROM python:3.13-slim

LABEL org.opencontainers.image.title="meshwright" \
      org.opencontainers.image.source="https://github.com/meshwright/meshwright" \
      org.opencontainers.image.licenses="Apache-2.0"

COPY --from=build /opt/meshwright /opt/meshwright
RUN useradd --create-home user && install --directory --owner user /work

ENV PATH=/opt/meshwright/bin:$PATH PYTHONSAFEPATH=1
USER user
WORKDIR /work
ENTRYPOINT ["meshwright"]
CMD ["--help"]
