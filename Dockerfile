# Images of Forebay: targets router and gateway (no torch) and worker (vLLM on CPUs; kvbm too).
# Built without BuildKit's extras, so that Docker's classic builder makes them as well.
# Where packages come from is the business of pip's configuration in the base image.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    UV_NO_CACHE=1 \
    PATH=/venv/bin:$PATH
WORKDIR /app
RUN useradd --create-home --uid 10001 forebay \
    && mkdir /models /arena /blocks \
    && chown forebay:forebay /models /arena /blocks \
    && chmod 0770 /arena /blocks
COPY tools/setup.py tools/setup.py

FROM base AS services
COPY requirements/uv.txt requirements/lock-services.txt requirements/
RUN python3 tools/setup.py --set services --no-project --venv /venv \
    && /venv/bin/python -m pip uninstall --quiet --yes uv
COPY services services
RUN chmod -R a+rX services
ENV PYTHONPATH=/app:/app/services/gen
USER forebay
# All interfaces of the container; what is reached from outside it, compose.yaml says.
ENV FOREBAY_HOST=0.0.0.0

FROM services AS router
EXPOSE 8100 8101
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-m", "services.common.rpc.probe", "127.0.0.1:8100"]
CMD ["python", "-m", "services.router"]

FROM services AS gateway
EXPOSE 8000 8001
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=3)"]
CMD ["python", "-m", "services.gateway"]

FROM base AS worker
COPY requirements/uv.txt requirements/lock-cpu.txt requirements/
RUN python3 tools/setup.py --set cpu --no-project --venv /venv \
    && /venv/bin/python -m pip uninstall --quiet --yes uv \
    && rm -rf /var/lib/apt/lists/*
COPY services services
RUN chmod -R a+rX services
ENV PYTHONPATH=/app:/app/services/gen
USER forebay
ENV FOREBAY_HOST=0.0.0.0
EXPOSE 8200 8201 8202 8300 8301 6880
VOLUME /models
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-m", "services.common.rpc.probe", "127.0.0.1:8200"]
CMD ["python", "-m", "services.worker"]
