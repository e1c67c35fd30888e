# syntax=docker/dockerfile:1
# Server on CPUs, from the wheel alone. Build and start:
#   docker build -t megatron-ext .
#   docker run --rm -p 127.0.0.1:8000:8000 -v megatron-ext-cache:/home/megatron/.cache megatron-ext
# Other commands and models:
#   docker run --rm megatron-ext run --prompts "What does a generator do?"
#   docker run --rm -p 127.0.0.1:8000:8000 -v /path/to/model:/model:ro megatron-ext serve --host 0.0.0.0 --load-hf /model

FROM python:3.11-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY arguments arguments
COPY megatron_ext megatron_ext
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
# The operators are compiled at the first start, for the CPU that is found then; the volume keeps them.
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/
RUN python -m pip install --no-cache-dir --constraint /tmp/constraints.txt \
    --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
COPY --from=wheel /wheels /tmp/wheels
RUN wheel="$(ls /tmp/wheels/*.whl)" \
    && python -m pip install --no-cache-dir --constraint /tmp/constraints.txt "${wheel}[server,grammar,tokenizers]" \
    && rm -r /tmp/wheels /tmp/constraints.txt
RUN useradd --create-home --uid 1000 megatron \
    && install --directory --owner megatron --mode 0700 /home/megatron/.cache
USER 1000:1000
WORKDIR /home/megatron
VOLUME /home/megatron/.cache
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["megatron-ext"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
