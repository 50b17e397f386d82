# docker build -t moetool . && docker run --rm -v "$PWD:/data" moetool compress model smaller --ratio 75%
#
# g++ builds kernels when they are needed first; torch comes from PyPI, in the tested version.
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/moetool
COPY constraints.txt ./
RUN pip install --no-cache-dir "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml setup.py README.md LICENSE ./
COPY configs configs
COPY moetool moetool
RUN pip install --no-cache-dir -c constraints.txt '.[gguf,compressed-tensors,plots]'
WORKDIR /data
ENTRYPOINT ["moetool"]
